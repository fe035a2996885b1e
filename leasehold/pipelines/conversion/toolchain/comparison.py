"""Compares the outputs of two models, and measures how fast a model runs. Both toolchains (our own of open-source
libraries, and Kneron's) call it for their reports.
"""

from __future__ import annotations

import math
import sys
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from leasehold.pipelines.conversion.toolchain.running import Runnable, Tensors

#: Equal outputs have an infinite SNR: _MAX_DB is reported. For an infinite difference, -_MAX_DB is reported.
_MAX_DB = 200.0
#: Reported for an infinite difference. JSON has no infinity, and null would look as if nothing had been measured.
LARGEST_FLOAT = sys.float_info.max
_TIMED_RUNS = 5


def compare(reference: list[Tensors], answers: list[Tensors]) -> dict[str, dict[str, float]]:
    """For each output, over all samples: SNR in dB, cosine similarity, largest error, and top-1 agreement (0 to 1).

    The first three leave out values that are NaN or infinite in the reference. An output counts as infinitely different
    (`LARGEST_FLOAT`) if its shape differs, or if it has a NaN or infinite value where the reference has a finite one.
    """
    return {
        name: _compare_output([answer[name] for answer in reference], [answer[name] for answer in answers])
        for name in reference[0]
    }


def _compare_output(reference: list[np.ndarray[Any, Any]], answers: list[np.ndarray[Any, Any]]) -> dict[str, float]:
    """Compare one output of both models. Both lists have its value for each sample, in the same order."""
    pairs = list(zip(reference, answers, strict=True))
    top1_equal = [_same_top1(expected, answer) for expected, answer in pairs]
    agreement = sum(top1_equal) / len(top1_equal)
    infinite_difference = {"snr_db": -_MAX_DB, "cosine": 0.0, "max_error": LARGEST_FLOAT, "top1_agreement": agreement}
    if any(expected.shape != answer.shape for expected, answer in pairs):
        return infinite_difference
    all_expected, all_answers = (
        np.concatenate([np.asarray(values, np.float64).ravel() for values in side]) for side in (reference, answers)
    )
    is_finite = np.isfinite(all_expected)
    expected, actual = all_expected[is_finite], all_answers[is_finite]
    if not np.isfinite(actual).all():
        return infinite_difference
    noise, signal = float(np.sum((expected - actual) ** 2)), float(np.sum(expected**2))
    product_of_norms = math.sqrt(signal) * float(np.linalg.norm(actual))
    return {
        "snr_db": _snr_db(signal, noise),
        # An output of zeros has no direction: 1 if both outputs are equal, else 0.
        "cosine": float(expected @ actual) / product_of_norms if product_of_norms else float(noise == 0),
        "max_error": float(np.max(np.abs(expected - actual), initial=0.0)),
        "top1_agreement": agreement,
    }


def _same_top1(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> bool:
    """Whether the largest score is at the same place, for each item of the batch."""
    if first.shape != second.shape:
        return False
    return not first.size or np.array_equal(np.argmax(_rows(first), axis=1), np.argmax(_rows(second), axis=1))


def _snr_db(signal: float, noise: float) -> float:
    """The signal-to-noise ratio in dB, from -_MAX_DB to _MAX_DB. -0.0 if the reference is all zeros and the answer is
    not: there is no signal to compare with.
    """
    if not noise:
        return _MAX_DB
    if not signal:
        return -0.0
    ratio = signal / noise
    if not ratio:  # the quotient is too small for a float
        return -_MAX_DB
    return max(-_MAX_DB, min(_MAX_DB, 10 * math.log10(ratio)))


def _rows(answer: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The scores as one row for each item of the batch."""
    return np.asarray(answer).reshape(answer.shape[0] if answer.ndim > 1 else 1, -1)


def describe(answers: list[Tensors]) -> dict[str, dict[str, float | None]]:
    """Mean, minimum and maximum of each output. Clients compare them with their own simulation. None: the output has no
    values, or the figure is NaN or infinite.
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
