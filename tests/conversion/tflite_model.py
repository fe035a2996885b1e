"""A TensorFlow Lite model of one convolution, written with the schema's own builder: no TensorFlow is needed."""

from __future__ import annotations

from typing import Any

import flatbuffers
import numpy as np
import tflite


def convolution(side: int = 8) -> bytes:
    """3x3, three channels to four, ReLU; as TensorFlow lays it out: NHWC, the weights OHWI."""
    built = flatbuffers.Builder(1024)
    weights = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
    buffers = [_buffer(built, data) for data in (None, weights, np.zeros(4, np.float32))]
    shapes: list[tuple[str, list[int], int]] = [
        ("x", [1, side, side, 3], 0), ("w", [4, 3, 3, 3], 1), ("b", [4], 2), ("y", [1, side, side, 4], 0),
    ]  # fmt: skip
    tensors = [_tensor(built, *said) for said in shapes]
    graph = _graph(built, tensors, _operator(built))
    tflite.OperatorCodeStart(built)
    tflite.OperatorCodeAddDeprecatedBuiltinCode(built, tflite.BuiltinOperator.CONV_2D)
    tflite.OperatorCodeAddBuiltinCode(built, tflite.BuiltinOperator.CONV_2D)
    tflite.OperatorCodeAddVersion(built, 1)
    code = tflite.OperatorCodeEnd(built)
    codes = _offsets(built, tflite.ModelStartOperatorCodesVector, [code])
    graphs = _offsets(built, tflite.ModelStartSubgraphsVector, [graph])
    data = _offsets(built, tflite.ModelStartBuffersVector, buffers)
    tflite.ModelStart(built)
    tflite.ModelAddVersion(built, 3)
    tflite.ModelAddOperatorCodes(built, codes)
    tflite.ModelAddSubgraphs(built, graphs)
    tflite.ModelAddBuffers(built, data)
    built.Finish(tflite.ModelEnd(built), file_identifier=b"TFL3")
    return bytes(built.Output())


def _buffer(built: Any, data: Any) -> int:
    vector = None if data is None else built.CreateNumpyVector(np.frombuffer(data.tobytes(), dtype=np.uint8))
    tflite.BufferStart(built)
    if vector is not None:
        tflite.BufferAddData(built, vector)
    return int(tflite.BufferEnd(built))


def _tensor(built: Any, name: str, shape: list[int], buffer: int) -> int:
    said, sides = built.CreateString(name), built.CreateNumpyVector(np.array(shape, dtype=np.int32))
    tflite.TensorStart(built)
    tflite.TensorAddShape(built, sides)
    tflite.TensorAddType(built, tflite.TensorType.FLOAT32)
    tflite.TensorAddBuffer(built, buffer)
    tflite.TensorAddName(built, said)
    return int(tflite.TensorEnd(built))


def _operator(built: Any) -> int:
    tflite.Conv2DOptionsStart(built)
    tflite.Conv2DOptionsAddPadding(built, tflite.Padding.SAME)
    tflite.Conv2DOptionsAddStrideW(built, 1)
    tflite.Conv2DOptionsAddStrideH(built, 1)
    tflite.Conv2DOptionsAddFusedActivationFunction(built, tflite.ActivationFunctionType.RELU)
    options = tflite.Conv2DOptionsEnd(built)
    takes, gives = (built.CreateNumpyVector(np.array(said, dtype=np.int32)) for said in ([0, 1, 2], [3]))
    tflite.OperatorStart(built)
    tflite.OperatorAddOpcodeIndex(built, 0)
    tflite.OperatorAddInputs(built, takes)
    tflite.OperatorAddOutputs(built, gives)
    tflite.OperatorAddBuiltinOptionsType(built, tflite.BuiltinOptions.Conv2DOptions)
    tflite.OperatorAddBuiltinOptions(built, options)
    return int(tflite.OperatorEnd(built))


def _graph(built: Any, tensors: list[int], operator: int) -> int:
    held = _offsets(built, tflite.SubGraphStartTensorsVector, tensors)
    operators = _offsets(built, tflite.SubGraphStartOperatorsVector, [operator])
    takes, gives = (built.CreateNumpyVector(np.array(said, dtype=np.int32)) for said in ([0], [3]))
    tflite.SubGraphStart(built)
    tflite.SubGraphAddTensors(built, held)
    tflite.SubGraphAddInputs(built, takes)
    tflite.SubGraphAddOutputs(built, gives)
    tflite.SubGraphAddOperators(built, operators)
    return int(tflite.SubGraphEnd(built))


def _offsets(built: Any, start: Any, items: list[int]) -> int:
    start(built, len(items))
    for item in reversed(items):
        built.PrependUOffsetTRelative(item)
    return int(built.EndVector())
