"""Compares the outputs of two models, and measures how fast a model runs. Both toolchains call it for their reports."""

from __future__ import annotations

import math
import sys
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from leasehold.pipelines.conversion.toolchain.running import Runnable, Tensors

_MAX_DB = 200.0  # the SNR that is reported for equal outputs (theirs is infinite); negated for an infinite difference
#: Reported in place of an infinite difference. JSON has no infinity: null would look as if nothing had been measured.
LARGEST = sys.float_info.max
_TIMED_RUNS = 5


def compare(reference: list[Tensors], answers: list[Tensors]) -> dict[str, dict[str, float]]:
    """For each output, over all samples: SNR in dB, cosine similarity, largest error, top-1 agreement of 0 to 1.

    Values that are NaN or infinite in the reference are left out of the first three. Outputs of different shapes, and
    an answer that is NaN or infinite where the reference is not, count as infinitely different (`LARGEST`).
    """
    return {
        name: _compare_output([answer[name] for answer in reference], [answer[name] for answer in answers])
        for name in reference[0]
    }


def _compare_output(first: list[np.ndarray[Any, Any]], second: list[np.ndarray[Any, Any]]) -> dict[str, float]:
    """Compare one output. `first`, `second`: its values for each sample, in the same order."""
    top1_equal = [_same_top1(x, y) for x, y in zip(first, second, strict=True)]
    agreement = sum(top1_equal) / len(top1_equal)
    a, b = (np.concatenate([np.asarray(x, np.float64).ravel() for x in side]) for side in (first, second))
    if any(x.shape != y.shape for x, y in zip(first, second, strict=True)) or not np.isfinite(b[np.isfinite(a)]).all():
        return {"snr_db": -_MAX_DB, "cosine": 0.0, "max_error": LARGEST, "top1_agreement": agreement}
    a, b = a[np.isfinite(a)], b[np.isfinite(a)]
    noise, signal = float(np.sum((a - b) ** 2)), float(np.sum(a**2))
    lengths = math.sqrt(signal) * float(np.linalg.norm(b))
    return {
        "snr_db": _snr_db(signal, noise),
        "cosine": float(a @ b) / lengths if lengths else float(noise == 0),
        "max_error": float(np.max(np.abs(a - b), initial=0.0)),
        "top1_agreement": agreement,
    }


def _same_top1(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> bool:
    """Whether the largest score of each item of the batch stands at the same place."""
    if first.shape != second.shape:
        return False
    return not first.size or np.array_equal(np.argmax(_rows(first), axis=1), np.argmax(_rows(second), axis=1))


def _snr_db(signal: float, noise: float) -> float:
    """The signal-to-noise ratio in dB, from -_MAX_DB to _MAX_DB. For a reference of zeros it is -0."""
    if not noise:
        return _MAX_DB
    ratio = signal / noise
    if ratio:
        return max(-_MAX_DB, min(_MAX_DB, 10 * math.log10(ratio)))
    return -_MAX_DB if signal else -0.0


def _rows(answer: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The scores as one row for each item of the batch."""
    return np.asarray(answer).reshape(answer.shape[0] if answer.ndim > 1 else 1, -1)


def describe(answers: list[Tensors]) -> dict[str, dict[str, float | None]]:
    """Mean, minimum and maximum of each output, for clients that compare them with a simulation of their own. None: the
    output has no values, or the figure is NaN or infinite.
    """
    return {name: _describe_output([answer[name] for answer in answers if answer[name].size]) for name in answers[0]}


def _describe_output(values: list[np.ndarray[Any, Any]]) -> dict[str, float | None]:
    if not values:
        return dict.fromkeys(("mean", "min", "max"))
    figures = {
        "mean": float(np.mean([np.mean(value) for value in values])),
        "min": float(np.min([np.min(value) for value in values])),
        "max": float(np.max([np.max(value) for value in values])),
    }
    return {name: figure if math.isfinite(figure) else None for name, figure in figures.items()}


def milliseconds(model: Runnable, sample: Tensors) -> float:
    """The median time of a few runs on one core of this machine. It is not the time on the target platform."""
    seconds = []
    for _ in range(_TIMED_RUNS):
        began = perf_counter()
        model.run(sample)
        seconds.append(perf_counter() - began)
    return round(1000 * median(seconds), 3)
