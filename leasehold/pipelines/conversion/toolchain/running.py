"""Running a model with onnxruntime: one thread, no extensions, bounded, the same answer for the same input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnxruntime as ort

from leasehold.pipelines.conversion.toolchain import refusals

Tensors: TypeAlias = dict[str, np.ndarray[Any, Any]]
ort.disable_telemetry_events()  # the sandbox lets nothing out; a model's owner expects no attempt either

_QUIET = 4  # fatal only: the runtime's words may quote the model

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


class Runnable:
    """A model ready to run. Raises Permanent("not_runnable") when onnxruntime refuses it."""

    def __init__(self, model: bytes | Path, *, optimised: bool = True) -> None:
        level = ort.GraphOptimizationLevel
        self._session = _session(model, _options(level.ORT_ENABLE_ALL if optimised else level.ORT_DISABLE_ALL))
        self.outputs = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> Tensors:
        try:
            answers = self._session.run(self.outputs, dict(inputs))
        except Exception as error:
            raise _refused(error) from error
        return dict(zip(self.outputs, answers, strict=True))

    def random_input(self, rng: np.random.Generator) -> Tensors:
        return drawn(((value.name, value.type[7:-1], value.shape) for value in self._session.get_inputs()), rng)


def drawn(inputs: Iterable[tuple[str, str, Sequence[int]]], rng: np.random.Generator) -> Tensors:
    """Standard normal numbers for floats, zeros and ones for the rest: valid as an index everywhere.

    `inputs`: name, type and shape of each.
    """
    made: Tensors = {}
    for name, type_, shape in inputs:
        kind = _TYPES.get(type_)
        if kind is None:
            raise refusals.not_runnable(f"inputs of type {type_} are not supported")
        floats = np.issubdtype(kind, np.floating)
        values = rng.standard_normal(shape) if floats else rng.integers(0, 2, shape)
        made[name] = values.astype(kind)
    return made


def compiled(source: Path, target: Path) -> None:
    """Write the graph as onnxruntime optimises it for any processor: little is left for the one that runs it."""
    options = _options(ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED)
    options.optimized_model_filepath = str(target)
    _session(source, options)


def _options(level: Any) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = _QUIET
    options.graph_optimization_level = level
    return options


def _session(model: bytes | Path, options: Any) -> Any:
    source = str(model) if isinstance(model, Path) else model
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise _refused(error) from error


def _refused(error: Exception) -> Exception:
    """Pass memory on, for the worker to judge; everything else is the model's own fault."""
    if isinstance(error, MemoryError) or "bad_alloc" in str(error) or "allocate memory" in str(error):
        return MemoryError()
    return refusals.not_runnable(str(error).partition("\n")[0])
