"""How much each tenant has running, for looks to take tenants in turn.

To count it is to read all that runs, and what ran since the last vacuum, which an old snapshot may hold up for hours.
Where that takes long it is counted more seldom, and looks go by what was counted last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic

from leasehold.runtime.duty_cycle import pause_after

#: Looks that count take no more than this share of the time; but what they go by is never older than so many seconds.
COUNTING_SHARE = 1 / 100
OLDEST_SECONDS = 60.0


class TenantLoad:
    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._running: Mapping[str, int] = {}
        self._count_at = 0.0

    def running(self) -> Mapping[str, int] | None:
        """What the next look goes by; None: it shall count, if several tenants have work."""
        return None if self._clock() >= self._count_at else self._running

    def looked(self, asked_at: float, running: Mapping[str, int] | None) -> None:
        """A look, asked for at `asked_at` and answered now, counted; or it did not (None)."""
        if running is None:
            return
        now = self._clock()
        self._running = running
        self._count_at = now + pause_after(now - asked_at, share=COUNTING_SHARE, least=0.0, most=OLDEST_SECONDS)
