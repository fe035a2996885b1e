"""Runs models with onnxruntime, on one thread of the processor, so that the same input gives the same answer. Both
toolchains use this module. The module loads no libraries of custom operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnxruntime as ort

from leasehold.pipelines.conversion.toolchain import refusals

#: The name of an input or an output of a model -> its value.
Tensors: TypeAlias = dict[str, np.ndarray[Any, Any]]
ort.disable_telemetry_events()  # nobody who sends a model expects telemetry, and the sandbox blocks the network

_FATAL_ONLY = 4  # onnxruntime's log level for fatal errors only, because its other messages may quote the model

#: The name of an element type in onnxruntime -> the type in numpy.
_TYPES: dict[str, Any] = {
    "float": np.float32,
    "float16": np.float16,
    "double": np.float64,
    "int64": np.int64,
    "int32": np.int32,
    "int8": np.int8,
    "uint8": np.uint8,
    "bool": np.bool_,
}


#: An input is a picture if its elements have one of these types, and it has this many dimensions.
_OF_PIXELS, _PICTURE_DIMENSIONS = (np.uint8, np.int8), 4


class Runnable:
    """A loaded model. `optimised`: whether onnxruntime may optimise the graph first. Raises Permanent("not_runnable")
    if onnxruntime refuses the model, or an output is not a tensor of numbers.
    """

    def __init__(self, model: bytes | Path, *, optimised: bool = True) -> None:
        levels = ort.GraphOptimizationLevel
        level = levels.ORT_ENABLE_ALL if optimised else levels.ORT_DISABLE_ALL
        self._session = _open_session(model, _session_options(level))
        for output in self._session.get_outputs():
            if not output.type.startswith("tensor(") or output.type == "tensor(string)":
                raise refusals.not_runnable(f"the output {output.name[:100]!r} is not a tensor of numbers")
        self.outputs = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> Tensors:
        try:
            answers = self._session.run(self.outputs, dict(inputs))
        except Exception as error:
            raise _error_to_raise(error) from error
        return dict(zip(self.outputs, answers, strict=True))

    def random_input(self, rng: np.random.Generator) -> Tensors:
        inputs = self._session.get_inputs()
        return random_tensors(((value.name, _element_type(value.type), value.shape) for value in inputs), rng)


def _element_type(tensor_type: str) -> str:
    """The type of the tensor's elements, for example `float` for `tensor(float)`."""
    return tensor_type.removeprefix("tensor(").removesuffix(")")


def random_tensors(inputs: Iterable[tuple[str, str, Sequence[int]]], rng: np.random.Generator) -> Tensors:
    """Random values: standard normal for floats, all values of a byte for pictures of bytes, and 0 or 1 for other
    inputs, because 0 and 1 are nearly always valid indices.

    `inputs`: the name, type and shape of each input.
    """
    tensors: Tensors = {}
    for name, type_, shape in inputs:
        dtype = _TYPES.get(type_)
        if dtype is None:
            raise refusals.not_runnable(f"inputs of type {type_} are not supported")
        is_float = np.issubdtype(dtype, np.floating)
        if is_float:
            values: np.ndarray[Any, Any] = rng.standard_normal(shape)
        elif dtype in _OF_PIXELS and len(shape) == _PICTURE_DIMENSIONS:
            values = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, shape)
        else:
            values = rng.integers(0, 2, shape)
        tensors[name] = values.astype(dtype)
    return tensors


def compile_graph(source: Path, target: Path) -> None:
    """Optimise the graph, but only in ways that suit any processor, and write the new graph to `target`. onnxruntime
    then loads it fast.
    """
    options = _session_options(ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED)
    options.optimized_model_filepath = str(target)
    _open_session(source, options)


def _session_options(level: Any) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = _FATAL_ONLY
    options.graph_optimization_level = level
    return options


def _open_session(model: bytes | Path, options: Any) -> Any:
    source = str(model) if isinstance(model, Path) else model
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise _error_to_raise(error) from error


def _error_to_raise(error: Exception) -> Exception:
    """The error to raise in place of onnxruntime's. For a lack of memory it is MemoryError, so that the worker decides
    what to do. Every other error counts as an error of the model.
    """
    if isinstance(error, MemoryError) or "bad_alloc" in str(error) or "allocate memory" in str(error):
        return MemoryError()
    return refusals.not_runnable(str(error).partition("\n")[0])
