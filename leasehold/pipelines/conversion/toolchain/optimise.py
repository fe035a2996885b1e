"""From the model that was sent to the one that is quantised: checked, of one opset, simplified, and still the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxslim
from onnx import checker, version_converter

from leasehold.pipelines.conversion.limits import ModelLimits
from leasehold.pipelines.conversion.toolchain import refusals
from leasehold.pipelines.conversion.toolchain.running import Runnable, Tensors
from leasehold.pipelines.conversion.toolchain.shapes import fix_inputs, inferred

_TRIALS = 3
_TOLERANCE = 1e-3  # relative to the output's largest value: float32 sums in another order
#: The newest file format that onnxruntime's releases of the last two years read.
_IR_VERSION = 10
_OLDEST_OPSET = 7  # what onnxruntime promises to run


def checked(model: onnx.ModelProto, limits: ModelLimits) -> tuple[onnx.ModelProto, list[str]]:
    """The model with fixed inputs and inferred shapes, in an opset that the runtime promises to run, and what was
    changed for that.
    """
    changes = fix_inputs(model)
    model.ir_version = min(model.ir_version, _IR_VERSION)
    try:
        checker.check_model(model, full_check=False)
    except (checker.ValidationError, RuntimeError, ValueError) as error:
        raise refusals.invalid_model(str(error).partition("\n")[0]) from error
    return inferred(_of_age(model, changes), limits), changes


def _of_age(model: onnx.ModelProto, changes: list[str]) -> onnx.ModelProto:
    """The same model, lifted to an opset that the runtime promises to run. Adds what was done to `changes`."""
    current = opset_of(model)
    if current >= _OLDEST_OPSET:
        return model
    made = converted(model, _OLDEST_OPSET)
    changes.append(f"opset {current} was lifted to {_OLDEST_OPSET}")
    return made


def opset_of(model: onnx.ModelProto) -> int:
    """The version of the standard that it is written in."""
    return next(int(o.version) for o in model.opset_import if o.domain in {"", "ai.onnx"})


def converted(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """The same model in another opset."""
    if opset_of(model) == opset:
        return model
    try:
        made: onnx.ModelProto = version_converter.convert_version(model, opset)
    except Exception as error:  # the converter raises whatever its C++ threw
        raise refusals.opset_not_convertible(opset, str(error).partition("\n")[0]) from error
    return made


def simplified(model: onnx.ModelProto) -> onnx.ModelProto:
    """Fold, fuse and drop with onnxslim; a model that it cannot take, or makes too large, stays as it is."""
    try:
        slim: onnx.ModelProto = onnxslim.slim(model)
        slim.ByteSize()  # raises when constants that were worked out make it larger than protobuf can write
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - an optimiser that gives up costs speed, not the job: `facts` shows no change
        return model
    slim.ir_version = min(slim.ir_version, _IR_VERSION)
    return slim


def answers(original: Path, seed: int) -> list[tuple[Tensors, Tensors]]:
    """Random inputs, and what the original answers: as it was written, without the runtime's own optimisations."""
    model, rng = Runnable(original, optimised=False), np.random.default_rng(seed)
    given = [model.random_input(rng) for _ in range(_TRIALS)]
    return [(one, model.run(one)) for one in given]


def difference(answered: list[tuple[Tensors, Tensors]], optimised: Path) -> float:
    """The largest difference of the optimised model's answers, relative to the output's largest value.

    Raises Permanent("not_equivalent") when it is beyond the tolerance.
    """
    model = Runnable(optimised)
    worst = max(_apart(answer, model.run(given)) for given, answer in answered)
    if not worst <= _TOLERANCE:
        raise refusals.not_equivalent(worst)
    return worst


def _apart(first: Tensors, second: Tensors) -> float:
    if first.keys() != second.keys():
        return float("inf")
    worst = 0.0
    for name, one in first.items():
        a, b = np.asarray(one, np.float64), np.asarray(second[name], np.float64)
        if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return float("inf")
        kept = np.isfinite(a)
        if kept.any():
            scale = max(float(np.abs(a[kept]).max()), 1e-6)
            worst = max(worst, float(np.abs(a[kept] - b[kept]).max()) / scale)
    return worst


def report(before: dict[str, Any], now: dict[str, Any], changes: list[str], apart: float) -> dict[str, Any]:
    """What came in, what goes out, what was changed and how equal the two are."""
    operators = sorted({*before["operators"], *now["operators"]})
    moved = {
        name: now["operators"].get(name, 0) - before["operators"].get(name, 0)
        for name in operators
        if now["operators"].get(name, 0) != before["operators"].get(name, 0)
    }
    return {
        "original": before,
        "optimised": now,
        "changes": changes,
        "operators_changed": moved,
        "equivalence": {"trials": _TRIALS, "largest_relative_difference": apart, "tolerance": _TOLERANCE},
    }
