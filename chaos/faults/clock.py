"""The database's clock, by which leases run: a jump, and the jump back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from chaos.faults.effects import Deal
from chaos.plan import Fault
from chaos.settings import LEASE_SECONDS
from chaos.stack import Installation
from leasehold.runtime.transient import until_answered

#: Many leases: all are over at once, or last for the whole run if nobody takes them away.
JUMP_SECONDS = int(5 * LEASE_SECONDS)
_PATIENCE = 20.0


class ClockFaults:
    """Each returns by how many seconds PostgreSQL's clock was wrong, by its own answer."""

    def __init__(self, installation: Installation, jumping: asyncio.Lock) -> None:
        self._installation = installation
        self._jumping = jumping
        self.jumps: list[tuple[float, float]] = []  # when, by the true clock, and to how far ahead

    @property
    def deals(self) -> Mapping[str, Deal]:
        return {"F38": self._jump}

    async def _jump(self, fault: Fault) -> int:
        clock = self._installation.servers.clock
        if clock is None:
            return 0
        async with self._jumping:
            ahead = JUMP_SECONDS if "ahead" in fault.name else -JUMP_SECONDS
            clock.jump(ahead)
            self.jumps.append((time.time(), ahead))
            try:
                wrong = await until_answered(self._wrong, within=_PATIENCE)
                await asyncio.sleep(fault.seconds)
            finally:
                clock.jump(0)
                self.jumps.append((time.time(), 0))
        return wrong

    async def _wrong(self) -> int:
        async with self._installation.connection() as connection:
            database_time = await connection.fetchval("SELECT clock_timestamp()")
        off: float = database_time.timestamp() - time.time()
        return abs(round(off))
