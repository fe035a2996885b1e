"""Computes how many workers a pool (workers that are scaled together) should have, from the pool's load and present
size. The computation uses no state of an earlier computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from leasehold.domain.pipeline import pinned_queue

#: A pool grows to the size at which all its slots (a slot is room for one attempt in a worker) are busy. It shrinks to
#: the size at which this part of its slots is busy. For example, if a load keeps 7 workers busy, the pool grows if it
#: has fewer than 7 workers, and shrinks if it has more than 10. With 7 to 10 workers the pool keeps its size, because
#: small changes of the load must not start and stop workers.
BUSY_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """The load of a queue. `due`: the number of tasks that could start now. `running`: the number of running attempts.
    `oldest`: for how many seconds the oldest due task has waited. `attempt_seconds`: about how many seconds an attempt
    takes; None: no attempt runs. `slots`: how many slots one worker has for this queue; 0: the pool does not serve the
    queue; None: no worker of the pool has reported its slots.
    """

    due: int
    running: int
    oldest: float
    attempt_seconds: float | None
    slots: int | None


def served_queues(queues: frozenset[str], labels: tuple[str, ...]) -> frozenset[str]:
    """The queues that a worker with these labels serves: the given queues, and for each queue and each label the pinned
    queue `QUEUE@LABEL`, which only workers with this label serve. A given queue that is pinned already gets no second
    label.
    """
    return queues | {pinned_queue(queue, label) for queue in queues for label in labels if "@" not in queue}


def slots_needed(load: QueueLoad, target_wait: float) -> float:
    """How many slots the queue needs so that every due task starts within about `target_wait` seconds. This is the
    number of running attempts, plus at most one slot for each due task. In `target_wait` seconds, one slot starts
    `target_wait / attempt_seconds` tasks. If no attempt runs, the time of an attempt is unknown. Then each due task
    counts as one slot.
    """
    if load.attempt_seconds is None:
        return load.running + load.due
    return load.running + min(load.due, load.due * load.attempt_seconds / target_wait)


def wanted_workers(loads: Mapping[str, QueueLoad], *, target_wait: float, present: int, least: int, most: int) -> int:
    """The number of workers that the pool should have, from `least` to `most`. `present`: the number of workers that
    the pool has, without draining workers.

    If a queue has tasks, but no worker has reported its slots for the queue, the pool does not shrink. If this pool is
    empty, it starts one worker, which will report the slots. A queue with 0 slots is left out, because more workers
    would not serve it either.
    """
    is_unknown = any(load.slots is None and load.due + load.running for load in loads.values())
    if is_unknown:
        least = max(least, present, 1)
    busy_workers = sum(slots_needed(load, target_wait) / load.slots for load in loads.values() if load.slots)
    grows_to, shrinks_to = ceil(busy_workers), ceil(busy_workers / BUSY_SHARE)
    size = min(max(present, grows_to), shrinks_to)  # from `grows_to` to `shrinks_to`, as near to `present` as possible
    return min(max(size, least), most)
