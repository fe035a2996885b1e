"""Disks: that of the workers' scratch files, full."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from chaos.faults.effects import Deal
from chaos.plan import Fault
from chaos.stack import Installation
from leasehold.runtime.transient import until_answered

_PATIENCE = 20.0


class DiskFaults:
    """Each returns how many processes or statements met it."""

    def __init__(self, installation: Installation, broken: asyncio.Lock) -> None:
        self._it = installation
        self._broken = broken

    @property
    def deals(self) -> Mapping[str, Deal]:
        return {"F32": self._fill_scratch}

    async def _fill_scratch(self, fault: Fault) -> int:
        """All workers of a run keep their scratch files there. Returns how many attempts failed for it."""
        before = await self._refused()
        await asyncio.to_thread(self._it.disk.fill)
        await asyncio.sleep(fault.seconds)
        self._it.disk.empty()
        return await self._refused() - before

    async def _refused(self) -> int:
        async def count() -> int:
            async with self._it.connection() as connection:
                return int(await connection.fetchval("SELECT count(*) FROM failure WHERE code = 'disk_full'"))

        return await until_answered(count, within=_PATIENCE)
