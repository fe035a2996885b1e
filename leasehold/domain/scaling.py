"""How many workers a pool should have. The size that the pool has now is the only memory: no process keeps any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from leasehold.domain.pipeline import pinned_queue

#: A pool shrinks only to a size at which at most this share of its slots would be needed. Between that size and the
#: least that suffices it stays as it is: a load that swings by less moves nobody.
FULL = 0.7


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """`due`: tasks that could start now. `running`: attempts under way. `oldest`: seconds that the oldest due task has
    waited. `attempt_seconds`: how long the attempts that run now last, about; None: none runs. `slots`: of this queue
    in one worker; None: no worker of the pool has said.
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
    """The slots that let every due task start within about `target_wait` seconds: those that are busy, and enough for
    the due ones to go through in that time; but never more than there are tasks.
    """
    seconds = target_wait if load.attempt_seconds is None else load.attempt_seconds
    return load.running + min(load.due, load.due * seconds / target_wait)


def wanted_workers(loads: Mapping[str, QueueLoad], *, target_wait: float, present: int, least: int, most: int) -> int:
    """The workers that the pool should have, from `least` to `most`. `present`: those that it has, without draining
    ones.

    Work whose slots nobody has reported keeps the pool as it is, or makes its first worker start: that one shows how
    much a worker can do. Workers that do not serve a queue would not serve it in greater number.
    """
    is_unknown = any(load.slots is None and load.due + load.running for load in loads.values())
    least = max(least, max(present, 1) if is_unknown else 0)
    workers = sum(slots_needed(load, target_wait) / load.slots for load in loads.values() if load.slots)
    enough, calm = ceil(workers), ceil(workers / FULL)
    return min(max(min(max(present, enough), calm), least), most)
