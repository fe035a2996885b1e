"""Optimises a model for the open toolchain (onnxruntime, without the vendor's tools). Checks the model, converts its
opset (the version of the ONNX standard that it uses), simplifies it, and compares its answers (the values of its
outputs) with those of the original.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import checker, version_converter

from leasehold.pipelines.conversion.limits import ModelLimits
from leasehold.pipelines.conversion.toolchain import refusals
from leasehold.pipelines.conversion.toolchain.running import Runnable, Tensors
from leasehold.pipelines.conversion.toolchain.shapes import fix_inputs, infer_shapes

#: The answers of the original and of the optimised model are compared for this many random inputs.
_TRIALS = 3
#: The largest difference between the answers of both models that is accepted, as a share of the output's largest value.
#: Sums differ a little, because the optimised model adds in another order.
_TOLERANCE = 1e-3
#: The newest version of ONNX's file format that onnxruntime's releases of the last two years can read.
_IR_VERSION = 10
_OLDEST_OPSET = 7  # the oldest opset that onnxruntime promises to run


def check(model: onnx.ModelProto, limits: ModelLimits) -> tuple[onnx.ModelProto, list[str]]:
    """Check the model. Returns the model with a fixed batch size, with inferred shapes, and in an opset that
    onnxruntime promises to run. Also returns one sentence for each change. Raises Permanent if the model is refused.
    """
    changes = fix_inputs(model)
    model.ir_version = min(model.ir_version, _IR_VERSION)
    try:
        checker.check_model(model, full_check=False)
    except (checker.ValidationError, RuntimeError, ValueError) as error:
        raise refusals.invalid_model(str(error).partition("\n")[0]) from error
    return infer_shapes(_lift_old_opset(model, changes), limits), changes


def _lift_old_opset(model: onnx.ModelProto, changes: list[str]) -> onnx.ModelProto:
    """Convert a model of an old opset to an opset that onnxruntime promises to run. Adds a sentence to `changes`."""
    current = opset_of(model)
    if current >= _OLDEST_OPSET:
        return model
    lifted = convert(model, _OLDEST_OPSET)
    changes.append(f"opset {current} was lifted to {_OLDEST_OPSET}")
    return lifted


def opset_of(model: onnx.ModelProto) -> int:
    """The version of the ONNX standard that the model uses."""
    return next(int(o.version) for o in model.opset_import if o.domain in {"", "ai.onnx"})


def convert(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """The same model in another opset. Raises Permanent if the converter refuses it."""
    if opset_of(model) == opset:
        return model
    try:
        converted: onnx.ModelProto = version_converter.convert_version(model, opset)
    except MemoryError:
        raise
    except Exception as error:  # the converter's C++ code may raise any error
        raise refusals.opset_not_convertible(opset, str(error).partition("\n")[0]) from error
    return converted


def simplify(model: onnx.ModelProto) -> onnx.ModelProto:
    """Fold, fuse and drop operators with onnxslim. A model that onnxslim refuses or makes too large stays unchanged."""
    import onnxslim  # noqa: PLC0415 - loads sympy, which takes half a second; in a worker, `preload` has done it

    try:
        slim: onnx.ModelProto = onnxslim.slim(model)
        slim.ByteSize()  # raises if folded constants make the model larger than protobuf can write
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the unsimplified model is only slower; the report then shows no change
        return model
    slim.ir_version = min(slim.ir_version, _IR_VERSION)
    return slim


def trial_answers(original: Path, seed: int) -> list[tuple[Tensors, Tensors]]:
    """Random inputs with the original model's answers. onnxruntime runs the model without its own optimisations."""
    model, rng = Runnable(original, optimised=False), np.random.default_rng(seed)
    inputs = [model.random_input(rng) for _ in range(_TRIALS)]
    return [(trial, model.run(trial)) for trial in inputs]


def largest_difference(trials: list[tuple[Tensors, Tensors]], optimised: Path) -> float:
    """The largest difference between the answers of both models, relative to the output's largest value.

    `trials`: from `trial_answers`. Raises Permanent("not_equivalent") if the difference is beyond the tolerance.
    """
    model = Runnable(optimised)
    worst = max(_relative_difference(answer, model.run(inputs)) for inputs, answer in trials)
    if not worst <= _TOLERANCE:  # not `>`, because NaN must be refused, too
        raise refusals.not_equivalent(worst)
    return worst


def _relative_difference(original: Tensors, optimised: Tensors) -> float:
    """The largest relative difference between the answers to one input. It is infinite if the outputs differ in their
    names, their shapes, or their NaN or infinite values.
    """
    if original.keys() != optimised.keys():
        return float("inf")
    worst = 0.0
    for name, values in original.items():
        expected, actual = np.asarray(values, np.float64), np.asarray(optimised[name], np.float64)
        is_finite = np.isfinite(expected)
        if expected.shape != actual.shape or not np.array_equal(is_finite, np.isfinite(actual)):
            return float("inf")
        # Values that are not finite must be the same in both answers. For example, +inf in place of NaN is a
        # difference.
        if not np.array_equal(expected[~is_finite], actual[~is_finite], equal_nan=True):
            return float("inf")
        if is_finite.any():
            scale = max(float(np.abs(expected[is_finite]).max()), 1e-6)  # no division by 0
            worst = max(worst, float(np.abs(expected[is_finite] - actual[is_finite]).max()) / scale)
    return worst


def difference_report(
    before: dict[str, Any], after: dict[str, Any], changes: list[str], difference: float
) -> dict[str, Any]:
    """The report of the step. `before`, `after`: the facts of the original and of the optimised model. `operators`
    among these facts says how often each operator occurs.
    """
    operators = sorted({*before["operators"], *after["operators"]})
    changed_operators = {
        name: after["operators"].get(name, 0) - before["operators"].get(name, 0)
        for name in operators
        if after["operators"].get(name, 0) != before["operators"].get(name, 0)
    }
    return {
        "original": before,
        "optimised": after,
        "changes": changes,
        "operators_changed": changed_operators,
        "equivalence": {"trials": _TRIALS, "largest_relative_difference": difference, "tolerance": _TOLERANCE},
    }
