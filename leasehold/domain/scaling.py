"""How many workers a pool should have. The size that the pool has now is the only memory: no process keeps any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from leasehold.domain.pipeline import pinned_queue

#: A pool shrinks only to a size at which at most this share of its slots would be busy. Between that size and the
#: smallest that suffices, the pool stays as it is: so small swings of the load start and stop no worker.
FULL = 0.7


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """`due`: tasks that could start now. `running`: attempts under way. `oldest`: seconds that the oldest due task has
    waited. `attempt_seconds`: how long the attempts that run now last, about; None: none runs. `slots`: how many slots
    one worker has for this queue; 0: it does not serve the queue; None: no worker of the pool has reported.
    """

    due: int
    running: int
    oldest: float
    attempt_seconds: float | None
    slots: int | None


def served_queues(named: frozenset[str], labels: tuple[str, ...]) -> frozenset[str]:
    """The queues `named`, and those that are pinned to one of the labels."""
    return named | {pinned_queue(queue, label) for queue in named for label in labels if "@" not in queue}


def slots_needed(load: QueueLoad, target_wait: float) -> float:
    """The slots that let every due task start within about `target_wait` seconds: the busy slots, and as many as the
    due tasks need to start in that time, but at most one for each due task.
    """
    seconds = target_wait if load.attempt_seconds is None else load.attempt_seconds
    return load.running + min(load.due, load.due * seconds / target_wait)


def wanted_workers(loads: Mapping[str, QueueLoad], *, target_wait: float, present: int, least: int, most: int) -> int:
    """The workers that the pool should have, from `least` to `most`. `present`: those that it has, without draining
    ones.

    Tasks in a queue whose slots nobody has reported keep the pool from shrinking. If the pool is empty, its first
    worker starts and reports them. A queue with 0 slots counts for nothing: more workers would not serve it either.
    """
    is_unknown = any(load.slots is None and load.due + load.running for load in loads.values())
    least = max(least, max(present, 1) if is_unknown else 0)
    workers = sum(slots_needed(load, target_wait) / load.slots for load in loads.values() if load.slots)
    smallest_to_keep, largest_to_keep = ceil(workers), ceil(workers / FULL)
    wanted = min(max(present, smallest_to_keep), largest_to_keep)
    return min(max(wanted, least), most)
