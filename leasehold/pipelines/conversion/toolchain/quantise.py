"""Quantises a model to int8 for the open toolchain. The quantisation is static: onnxruntime first runs samples, and the
range of a tensor is the minimum and the maximum of its values. Weights have one scale for each channel. The int8 model
has the form QDQ: the nodes QuantizeLinear and DequantizeLinear stand around the operators of the original.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

from leasehold.domain.errors import StepError
from leasehold.pipelines.conversion.toolchain import refusals
from leasehold.pipelines.conversion.toolchain.layer_sensitivity import name_of
from leasehold.pipelines.conversion.toolchain.running import Tensors

#: onnxruntime quantises the weights of these operators when it loads a model.
_QUANTISED_ON_LOAD = {"Conv", "ConvTranspose", "Gemm"}
_LOWEST = "leasehold_lowest_float"  # the name of the constant that `_protect` adds to the model
#: An option of onnxruntime for a single tensor: quantise the tensor with one scale, not with one scale for each
#: channel.
_ONE_SCALE = {"quant_type": QuantType.QInt8, "symmetric": True}


class _SampleReader:
    """The CalibrationDataReader that onnxruntime expects: `get_next` returns None after the last sample."""

    def __init__(self, samples: Iterable[Tensors], on_sample: Callable[[int], None]) -> None:
        self._samples = iter(enumerate(samples))
        self._on_sample = on_sample

    def get_next(self) -> Tensors | None:
        number, sample = next(self._samples, (0, None))
        if sample is not None:
            self._on_sample(number)
        return sample


def quantise_static(
    source: Path,
    target: Path,
    samples: Iterable[Tensors],
    on_sample: Callable[[int], None],
    *,
    ranges: Path | None = None,
    float_layers: Sequence[str] = (),
) -> None:
    """Write the int8 model to `target`. Calls `on_sample` with the number of each sample, from 0, before that
    sample runs.

    `ranges`: a file for the range of each tensor. The first call for a model runs the samples and writes the file; a
    later call reads the file and runs no sample. Without `ranges` each call runs the samples. `float_layers`: the names
    (`name_of`) of the nodes that stay float.

    Raises Permanent("not_quantisable") if onnxruntime cannot quantise the model.
    """
    options: dict[str, Any] = {"WeightSymmetric": True, "ActivationSymmetric": False}
    private_copy = target.with_name("float.onnx")
    # onnxruntime writes into the directory of its input, and the directory of `source` is read-only.
    model = _copy_with_names(source, private_copy)
    options["TensorQuantOverrides"] = {name: [_ONE_SCALE] for name in _of_one_scale(model)}
    excluded = [*float_layers, *_clips_without_zero(model)]
    del model  # frees its memory, because onnxruntime reads the model from the file
    root = logging.getLogger()
    level = root.level
    # Otherwise onnxruntime would log the advice to optimise the model. But the step `onnx` has already optimised it.
    root.setLevel(logging.ERROR)
    try:
        quantize_static(
            private_copy,
            target,
            _SampleReader(samples, on_sample),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            # Use weights of 7 bits. A processor without VNNI adds two products in 16 bits, and with 8-bit weights the
            # sum would overflow. The model would then give other answers on such a processor (see onnxruntime's page on
            # quantisation).
            reduce_range=True,
            nodes_to_exclude=excluded,
            extra_options=options,
            calibration_cache_path=ranges,
        )
    except (MemoryError, StepError):  # `on_sample` raises a StepError when the job was cancelled
        raise
    except Exception as error:
        raise refusals.not_quantisable(f"{type(error).__name__} {error}".partition("\n")[0]) from error
    finally:
        root.setLevel(level)
        private_copy.unlink()
    if float_layers:
        _protect(target, float_layers)


def _protect(path: Path, float_layers: Sequence[str]) -> None:
    """Change the int8 model, so that onnxruntime leaves these layers float when it loads the model.

    When onnxruntime loads a model, its optimiser WeightBiasQuantization quantises the weights of a layer that stands
    between DequantizeLinear and QuantizeLinear. Without this function, the user of a package would have to switch the
    optimiser off. The optimiser leaves the layer alone if another node stands between DequantizeLinear and the layer.
    So this function inserts `Max` with the lowest float. This node changes no value, and no optimiser removes it.
    """
    model = onnx.load_model(path)
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.name in float_layers and node.op_type in _QUANTISED_ON_LOAD:
            kept = f"{node.name}_float_input"
            nodes.append(helper.make_node("Max", [node.input[0], _LOWEST], [kept], name=kept))
            node.input[0] = kept
        nodes.append(node)
    if len(nodes) == len(model.graph.node):
        return
    lowest = np.array(np.finfo(np.float32).min, dtype=np.float32)
    model.graph.initializer.append(numpy_helper.from_array(lowest, _LOWEST))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    path.write_bytes(model.SerializeToString())


def _copy_with_names(source: Path, target: Path) -> onnx.ModelProto:
    """Copy the model, and name each node by `name_of`. By these names onnxruntime finds the nodes that stay float, and
    the nodes that use the same bias. Returns the copy.
    """
    model = onnx.load_model(source, load_external_data=False)
    for node in model.graph.node:
        node.name = name_of(node)
    target.write_bytes(model.SerializeToString())
    return model


def _of_one_scale(model: onnx.ModelProto) -> list[str]:
    """The names of the weights that need one scale, because onnxruntime cannot quantise them with a scale for each
    channel, or cannot run the result. These are the weights of a MatMul if they have more than two dimensions, and the
    weights of a ConvTranspose with several groups.
    """
    dimensions = {constant.name: len(constant.dims) for constant in model.graph.initializer}
    names: list[str] = []
    for node in model.graph.node:
        groups = next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
        if node.op_type == "MatMul":
            names += [name for name in node.input if dimensions.get(name, 0) > 2]  # noqa: PLR2004 - rows and columns
        elif node.op_type == "ConvTranspose" and groups > 1 and node.input[1] in dimensions:
            names.append(node.input[1])
    return names


def _clips_without_zero(model: onnx.ModelProto) -> list[str]:
    """The names of the Clips whose range does not contain 0. They must not be quantised. The reason: onnxruntime drops
    a quantised Clip, because the range of the quantised tensor cuts off the same values. But the range of a quantised
    tensor always contains 0.
    """
    constants = {constant.name: constant for constant in model.graph.initializer}
    names = []
    for node in model.graph.node:
        if node.op_type != "Clip":
            continue
        # A bound is None if the Clip has no such bound, or if the bound is no constant.
        bounds = [numpy_helper.to_array(constants[name]) if name in constants else None for name in node.input[1:]]
        lowest, highest = [*bounds, None, None][:2]
        if (lowest is not None and np.all(lowest > 0)) or (highest is not None and np.all(highest < 0)):
            names.append(node.name)
    return names
