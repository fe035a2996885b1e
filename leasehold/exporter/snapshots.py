"""Estimates since when a snapshot is held. For a standby or a replication slot, PostgreSQL tells only the oldest
transaction whose rows are still needed, and no time. It tells no time for sessions of other roles, either, unless the
exporter's role may see them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from time import monotonic

#: The most rounds that are remembered: two hours or more.
_MAX_ROUNDS = 720


class SnapshotAges:
    """Remembers the next transaction id of each round. A snapshot keeps the rows that transactions from its `xmin` on
    have deleted. So it counts as held since the first round whose next id was greater than its `xmin`, because vacuum
    may remove no row that was deleted after that round.
    """

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._next_xids: list[int] = []
        self._times: list[float] = []

    def seconds(self, next_xid: int, age: int) -> float:
        """Record a round. Returns for how many seconds, at least, the snapshot has been held. The number is precise to
        one round. `age`: how many transactions began since the snapshot, as PostgreSQL's `age(xmin)`; 0: none began, so
        the snapshot keeps nothing.
        """
        now = self._clock()
        if self._next_xids and next_xid < self._next_xids[-1]:  # another server, which counts its own transactions
            self._next_xids.clear()
            self._times.clear()
        self._next_xids.append(next_xid)
        self._times.append(now)
        first = bisect_right(self._next_xids, next_xid - age)
        seconds = now - self._times[first] if first < len(self._times) else 0.0
        del self._next_xids[:-_MAX_ROUNDS], self._times[:-_MAX_ROUNDS]
        return seconds
