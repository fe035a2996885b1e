"""Compares the outputs of two models, describes the outputs of one model, and measures how fast a model runs. Both
toolchains (the platform's own, which uses open-source libraries, and that of the vendor Kneron) call this module for
their reports.
"""

from __future__ import annotations

import math
import sys
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from leasehold.pipelines.conversion.toolchain.running import Runnable, Tensors

#: The SNR (signal-to-noise ratio, in dB) that is reported for equal outputs, in place of infinity. For an infinite
#: difference, -_MAX_DB is reported.
_MAX_DB = 200.0
#: The error that is reported for an infinite difference. JSON has no infinity, and null would look as if nothing had
#: been measured.
LARGEST_FLOAT = sys.float_info.max
_TIMED_RUNS = 5
#: If an output is a single score, the scores of both models agree if they differ by at most this part (0 to 1) of the
#: reference's score.
_ONE_SCORE = 0.05


class Comparison:
    """Compares two models, sample by sample, because the answers to all samples may need more memory than a step has.

    The figures of each output, over all samples, are the SNR in dB, the cosine similarity, the largest error, and the
    top-1 agreement (0 to 1). The first three leave out values that are NaN or infinite in the reference. An output
    counts as infinitely different (`LARGEST_FLOAT`) if its shape differs, or if it has a NaN or infinite value where
    the reference has a finite value.
    """

    def __init__(self) -> None:
        self._outputs: dict[str, _OutputComparison] = {}

    def add(self, reference: Tensors, answer: Tensors) -> None:
        """Add one sample. `reference`, `answer`: the outputs of the reference model, and of the model to compare."""
        for name, expected in reference.items():
            self._outputs.setdefault(name, _OutputComparison()).add(expected, answer[name])

    def figures(self) -> dict[str, dict[str, float]]:
        """The figures by the name of the output."""
        return {name: output.figures() for name, output in self._outputs.items()}


class _OutputComparison:
    """Compares one output of both models. It keeps sums over the samples, and not the values."""

    def __init__(self) -> None:
        self._top1_equal: list[bool] = []
        self._is_infinite = False
        # Over all values: the sum of the squares of the reference (`_signal`), the sum of the squares of the answer,
        # the sum of their products, the sum of the squared errors (`_noise`), and the largest error.
        self._signal = self._answer_power = self._product = self._noise = self._max_error = 0.0

    def add(self, expected: np.ndarray[Any, Any], answer: np.ndarray[Any, Any]) -> None:
        self._top1_equal.append(_same_top1(expected, answer))
        if expected.shape != answer.shape:
            self._is_infinite = True
            return
        is_finite = np.isfinite(expected)
        wanted, actual = (side[is_finite].astype(np.float64) for side in (expected, answer))
        if not np.isfinite(actual).all():
            self._is_infinite = True
            return
        error = wanted - actual
        self._signal += float(wanted @ wanted)
        self._answer_power += float(actual @ actual)
        self._product += float(wanted @ actual)
        self._noise += float(error @ error)
        self._max_error = max(self._max_error, float(np.max(np.abs(error), initial=0.0)))

    def figures(self) -> dict[str, float]:
        agreement = sum(self._top1_equal) / len(self._top1_equal)
        if self._is_infinite:
            return {"snr_db": -_MAX_DB, "cosine": 0.0, "max_error": LARGEST_FLOAT, "top1_agreement": agreement}
        product_of_norms = math.sqrt(self._signal) * math.sqrt(self._answer_power)
        return {
            "snr_db": _snr_db(self._signal, self._noise),
            # An output of zeros has no direction, so the figure is then 1 if both outputs are equal, and otherwise 0.
            "cosine": self._product / product_of_norms if product_of_norms else float(self._noise == 0),
            "max_error": self._max_error,
            "top1_agreement": agreement,
        }


def _same_top1(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> bool:
    """Whether, in every item of the batch, the largest score is at the same place. `first`: the reference's output. An
    output of integers, such as the index of a class, must be equal. If an item has only one score, its place says
    nothing. Such a score may differ from the reference's score by at most the part _ONE_SCORE of it.
    """
    if first.shape != second.shape:
        return False
    if not first.size:
        return True
    if not np.issubdtype(first.dtype, np.floating):
        return np.array_equal(first, second)
    expected, actual = _rows(first), _rows(second)
    if expected.shape[1] == 1:
        return np.allclose(actual, expected, rtol=_ONE_SCORE, atol=0.0, equal_nan=True)
    return np.array_equal(np.argmax(expected, axis=1), np.argmax(actual, axis=1))


def _snr_db(signal: float, noise: float) -> float:
    """The signal-to-noise ratio in dB, from -_MAX_DB to _MAX_DB. The ratio is -0.0 if the reference is all zeros and
    the answer is not, because there is no signal to compare with.
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


class Description:
    """Mean, minimum and maximum of each output, over all samples. Clients compare these figures with their own
    simulation. A figure is None if the output has no values, or if the figure would be NaN or infinite.
    """

    def __init__(self) -> None:
        # output -> (mean, minimum, maximum) of each sample
        self._samples: dict[str, list[tuple[float, float, float]]] = {}

    def add(self, answer: Tensors) -> None:
        """Add one sample. `answer`: the model's outputs for it, by name."""
        for name, values in answer.items():
            samples = self._samples.setdefault(name, [])
            if values.size:
                samples.append((float(np.mean(values)), float(np.min(values)), float(np.max(values))))

    def figures(self) -> dict[str, dict[str, float | None]]:
        """The figures by the name of the output."""
        return {name: _figures_of(samples) for name, samples in self._samples.items()}


def _figures_of(samples: list[tuple[float, float, float]]) -> dict[str, float | None]:
    if not samples:
        return dict.fromkeys(("mean", "min", "max"))
    means, minima, maxima = zip(*samples, strict=True)
    figures = {"mean": float(np.mean(means)), "min": float(np.min(minima)), "max": float(np.max(maxima))}
    return {name: figure if math.isfinite(figure) else None for name, figure in figures.items()}


def milliseconds(model: Runnable, sample: Tensors) -> float:
    """The median time of a few runs on one core of this machine. It is not the time on the target platform."""
    seconds = []
    for _ in range(_TIMED_RUNS):
        began = perf_counter()
        model.run(sample)
        seconds.append(perf_counter() - began)
    return round(1000 * median(seconds), 3)
