"""How near the int8 model's answers come to the float model's, and which of the two is faster."""

from __future__ import annotations

import math
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from leasehold.pipelines.conversion.toolchain.running import Runnable, Tensors

_MAX_DB = 200.0  # of equal signals, whose ratio is infinite
_TIMED = 5


def compared(first: list[Tensors], second: list[Tensors]) -> dict[str, dict[str, float]]:
    """For each output, over all samples: SNR in dB, cosine similarity, largest error, top-1 agreement of 0 to 1."""
    return {name: _one([answer[name] for answer in first], [answer[name] for answer in second]) for name in first[0]}


def _one(first: list[np.ndarray[Any, Any]], second: list[np.ndarray[Any, Any]]) -> dict[str, float]:
    a, b = (np.concatenate([np.asarray(x, np.float64).ravel() for x in side]) for side in (first, second))
    noise, signal = float(np.sum((a - b) ** 2)), float(np.sum(a**2))
    lengths = math.sqrt(signal) * float(np.linalg.norm(b))
    same = [
        np.array_equal(np.argmax(_rows(x), axis=1), np.argmax(_rows(y), axis=1))
        for x, y in zip(first, second, strict=True)
    ]
    return {
        "snr_db": min(_MAX_DB, 10 * math.log10(signal / noise))
        if noise and signal
        else (_MAX_DB if not noise else 0.0),
        "cosine": float(a @ b) / lengths if lengths else float(noise == 0),
        "max_error": float(np.max(np.abs(a - b), initial=0.0)),
        "top1_agreement": sum(same) / len(same),
    }


def _rows(answer: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """One row of scores for each of the batch."""
    return np.asarray(answer).reshape(answer.shape[0] if answer.ndim > 1 else 1, -1)


def described(answers: list[Tensors]) -> dict[str, dict[str, float]]:
    """What one model answered, for who wants to compare it with a simulation of their own."""
    return {
        name: {
            "mean": float(np.mean([np.mean(answer[name]) for answer in answers])),
            "min": float(min(np.min(answer[name]) for answer in answers)),
            "max": float(max(np.max(answer[name]) for answer in answers)),
        }
        for name in answers[0]
    }


def milliseconds(model: Runnable, sample: Tensors) -> float:
    """The median of a few runs on one core of this machine; not the time on the platform."""
    taken = []
    for _ in range(_TIMED):
        begun = perf_counter()
        model.run(sample)
        taken.append(perf_counter() - begun)
    return round(1000 * median(taken), 3)
