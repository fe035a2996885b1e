"""Remembers how many steps each tenant runs in the whole installation. Polls serve the tenant that runs the fewest
steps first.

To count, PostgreSQL reads all running tasks, with every row version since the last vacuum. An old snapshot can delay
the vacuum for hours. So the longer a count takes, the less often polls count. Between two counts, polls use the earlier
count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic

from leasehold.runtime.duty_cycle import Pauses

#: The largest part of the time that counts may take. Exception: a count is due after OLDEST_SECONDS in any case.
COUNTING_SHARE = 1 / 100
OLDEST_SECONDS = 60.0


class TenantLoad:
    """The last count of running steps, and the time when the next count is due."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._running: Mapping[str, int] = {}
        self._counting = Pauses(share=COUNTING_SHARE, at_least=0.0, at_most=OLDEST_SECONDS, clock=clock)

    def running(self) -> Mapping[str, int] | None:
        """Tenant -> running steps, for the next poll. None: the next poll must count, if several tenants have work."""
        return None if self._counting.due else self._running

    def polled(self, started_at: float, running: Mapping[str, int] | None) -> None:
        """Record a poll that ran from `started_at` until now. `running`: its count; None: the poll did not count."""
        if running is not None:
            self._running = running
            self._counting.done(started_at)
