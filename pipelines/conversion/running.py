"""Running a model with onnxruntime: one thread, no extensions, bounded, the same answer for the same input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import onnxruntime as ort

from pipelines.conversion import refusals

Tensors: TypeAlias = dict[str, np.ndarray[Any, Any]]
ort.disable_telemetry_events()  # the sandbox lets nothing out; a model's owner expects no attempt either

_QUIET = 4  # fatal only: the runtime's words may quote the model

_TYPES: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}


class Runnable:
    """A model ready to run. Raises Permanent("not_runnable") when onnxruntime refuses it."""

    def __init__(self, model: bytes, *, optimised: bool = True) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = _QUIET
        level = ort.GraphOptimizationLevel
        options.graph_optimization_level = level.ORT_ENABLE_ALL if optimised else level.ORT_DISABLE_ALL
        try:
            self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise _refused(error) from error
        self.outputs = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, np.ndarray[Any, Any]]) -> Tensors:
        try:
            answers = self._session.run(self.outputs, dict(inputs))
        except Exception as error:
            raise _refused(error) from error
        return dict(zip(self.outputs, answers, strict=True))

    def random_input(self, rng: np.random.Generator) -> Tensors:
        """Standard normal numbers for floats, zeros and ones for the rest: valid as an index everywhere."""
        made: Tensors = {}
        for value in self._session.get_inputs():
            kind = _TYPES.get(value.type)
            if kind is None:
                raise refusals.not_runnable(f"inputs of type {value.type} are not supported")
            floats = np.issubdtype(kind, np.floating)
            drawn = rng.standard_normal(value.shape) if floats else rng.integers(0, 2, value.shape)
            made[value.name] = drawn.astype(kind)
        return made


def _refused(error: Exception) -> Exception:
    """Pass memory on, for the worker to judge; everything else is the model's own fault."""
    if isinstance(error, MemoryError) or "bad_alloc" in str(error) or "allocate memory" in str(error):
        return MemoryError()
    return refusals.not_runnable(str(error).partition("\n")[0])
