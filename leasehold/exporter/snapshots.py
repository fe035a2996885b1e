"""Estimates for how long the oldest snapshot in the database has been held.

PostgreSQL does not always report a time. For a standby or a replication slot, it reports only the oldest transaction
whose rows are still needed. For a session of another database role, it reports a time only if the exporter's role may
see that session.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from time import monotonic

#: At most this many rounds are remembered. In a round, the exporter runs each of its queries once. Two rounds are 10 s
#: or more apart, so the remembered rounds cover at least two hours.
_MAX_ROUNDS = 720


class SnapshotAges:
    """Remembers the next transaction id of each round. A snapshot keeps the rows that transactions from its `xmin` on
    have deleted. So it counts as held since the first round whose next id was greater than its `xmin`. The reason:
    vacuum may remove no row that was deleted after that round.
    """

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        # The next transaction id, and the time, of each remembered round.
        self._next_xids: list[int] = []
        self._times: list[float] = []

    def seconds(self, next_xid: int, age: int) -> float:
        """Record a round. Returns for how many seconds the snapshot counts as held, precise to one round. The snapshot
        may have been held for longer, for example since before the first remembered round.

        `next_xid`: the next transaction id of the server. `age`: how many transactions began since the snapshot, as
        PostgreSQL's `age(xmin)`; 0: none began, so the snapshot keeps nothing.
        """
        now = self._clock()
        # If the ids went back, this is another server, which counts its own transactions.
        if self._next_xids and next_xid < self._next_xids[-1]:
            self._next_xids.clear()
            self._times.clear()
        self._next_xids.append(next_xid)
        self._times.append(now)
        # `next_xid - age` is the snapshot's `xmin`.
        first = bisect_right(self._next_xids, next_xid - age)
        seconds = now - self._times[first] if first < len(self._times) else 0.0
        del self._next_xids[:-_MAX_ROUNDS], self._times[:-_MAX_ROUNDS]
        return seconds
