"""Faults of the database's clock, by which leases expire: a jump, and the jump back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from chaos.faults.effects import FaultMaker
from chaos.plan import Fault
from chaos.settings import LEASE_SECONDS
from chaos.stack import Installation
from leasehold.runtime.transient import until_answered

#: Longer than several leases. After a jump ahead all leases have passed. After a jump back no lease passes in the run.
JUMP_SECONDS = int(5 * LEASE_SECONDS)
_PATIENCE_SECONDS = 20.0


class ClockFaults:
    """Each fault returns by how many seconds PostgreSQL's clock was wrong, as PostgreSQL itself answered."""

    def __init__(self, installation: Installation, jump_lock: asyncio.Lock) -> None:
        self._installation = installation
        self._jump_lock = jump_lock
        self.jumps: list[tuple[float, float]] = []  # (the true time, seconds ahead from then on)

    @property
    def makers(self) -> Mapping[str, FaultMaker]:
        return {"F38": self._jump}

    async def _jump(self, fault: Fault) -> int:
        clock = self._installation.servers.clock
        if clock is None:
            return 0
        async with self._jump_lock:
            ahead = JUMP_SECONDS if "ahead" in fault.name else -JUMP_SECONDS
            # What is recorded includes the whole time of the wrong clock, although this process may be held up here.
            self.jumps.append((time.time(), ahead))
            clock.jump(ahead)
            try:
                seconds_wrong = await until_answered(self._seconds_wrong, within=_PATIENCE_SECONDS)
                await asyncio.sleep(fault.seconds)
            finally:
                clock.jump(0)
                self.jumps.append((time.time(), 0))
        return seconds_wrong

    async def _seconds_wrong(self) -> int:
        async with self._installation.connection() as connection:
            database_time = await connection.fetchval("SELECT clock_timestamp()")
        ahead: float = database_time.timestamp() - time.time()
        return abs(round(ahead))
