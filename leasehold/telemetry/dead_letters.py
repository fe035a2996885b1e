"""Counts the tasks that failed for good. The worker whose attempt failed counts the task. If that worker was lost, the
worker whose sweeper ended the lease counts the task.
"""

from __future__ import annotations

from collections.abc import Iterable

from leasehold.telemetry.meters import Bounded, fast_counter

DEAD = fast_counter(
    "dead_letters_total",
    "Tasks that failed for good: no further attempt follows, unless somebody replays them. Without those whose "
    "external worker reported the failure, and without the steps that a workflow started: it decides what follows",
    ["pipeline", "step", "code"],
)
BY_PIPELINE = fast_counter(
    "pipeline_dead_letters_total",
    "Tasks that failed for good, as leasehold_dead_letters_total, by pipeline alone. other: of a pipeline that this "
    "process has no code of, such as a template. Without deliveries whose webhook is disabled: its owner has them",
    ["pipeline"],
)
#: Dead letters with these codes have a cause that only the owner of a webhook can mend. BY_PIPELINE leaves them out,
#: because operators need no alert about them.
_OF_OWNERS = frozenset({"webhook_disabled"})
#: BY_PIPELINE has a label for each pipeline in `_declared`. Dead letters of all other pipelines count as `other`.
_OTHER = "other"
_declared = {_OTHER}
#: Bounds the number of different codes, because handlers choose them.
bounded_code = Bounded()


def declare(pipelines: Iterable[str]) -> None:
    """Make the counters of these pipelines now, with the value 0. PromQL's `increase()` does not count the events that
    a counter has already counted when it first appears. So without this call, the first dead letters of a process would
    cause no alert, even if there were many.
    """
    _declared.update(pipelines)
    BY_PIPELINE.labels(_OTHER)  # this counter also counts the pipelines beyond the bound on the number of counters
    for pipeline in sorted(_declared):
        BY_PIPELINE.labels(pipeline)


def count_dead_letter(pipeline: str, step: str, code: str) -> None:
    """Count a task that failed for good. `code`: the code of its error."""
    DEAD.labels(pipeline, step, bounded_code(code)).inc()
    if code not in _OF_OWNERS:
        BY_PIPELINE.labels(pipeline if pipeline in _declared else _OTHER).inc()
