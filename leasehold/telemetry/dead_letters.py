"""Counts the tasks that failed for good. The worker whose attempt failed counts the task. If that worker was lost, the
worker whose sweeper ended its lease counts the task.
"""

from __future__ import annotations

from leasehold.telemetry.meters import Bounded, fast_counter

DEAD = fast_counter(
    "dead_letters_total",
    "Tasks that failed for good: no further attempt follows, unless somebody replays them. Without those whose "
    "external worker reported the failure, and without the steps that a workflow started: it decides what follows",
    ["pipeline", "step", "code"],
)
#: Bounds the number of different codes, because handlers choose them.
bounded_code = Bounded()


def count_dead_letter(pipeline: str, step: str, code: str) -> None:
    """Count a step that failed for good, and is in the list of dead letters now."""
    DEAD.labels(pipeline, step, bounded_code(code)).inc()
