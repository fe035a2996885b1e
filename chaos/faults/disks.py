"""Disks: the workers' scratch files', full; PostgreSQL's, full, and standing still."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from chaos.faults.effects import Deal, LogWatch, most
from chaos.plan import Fault
from chaos.stack import Installation
from leasehold.runtime.transient import until_answered

_PATIENCE = 20.0


class DiskFaults:
    """Each returns how many processes or statements met it."""

    def __init__(self, installation: Installation, broken: asyncio.Lock) -> None:
        self._installation = installation
        self._broken = broken

    @property
    def deals(self) -> Mapping[str, Deal]:
        return {
            "F32": self._fill_scratch,
            "F36": self._stall_database,
            "F37": self._fill_database,
        }

    async def _stall_database(self, fault: Fault) -> int:
        """Every write of PostgreSQL waits in the kernel. Returns how many of its processes did."""
        servers = self._installation.servers
        async with self._broken:
            if not await servers.volume.freeze():
                return 0
            try:
                return await most(lambda: len(servers.blocked("postgres")), fault.seconds)
            finally:
                await servers.volume.thaw()

    async def _fill_database(self, fault: Fault) -> int:
        """A server that found no room for its WAL has ended, and is started again once there is. Returns how many
        statements, or starts, failed.
        """
        servers = self._installation.servers
        watch = LogWatch(servers.postgres_log)
        async with self._broken:
            await asyncio.to_thread(servers.volume.fill)
            try:
                await asyncio.sleep(fault.seconds)
            finally:
                servers.volume.empty()
            await servers.restart_postgres()
        return watch.count("No space left on device")

    async def _fill_scratch(self, fault: Fault) -> int:
        """All workers of a run keep their scratch files there. Returns how many attempts failed for it."""
        before = await self._refused()
        await asyncio.to_thread(self._installation.disk.fill)
        await asyncio.sleep(fault.seconds)
        self._installation.disk.empty()
        return await self._refused() - before

    async def _refused(self) -> int:
        async def count() -> int:
            async with self._installation.connection() as connection:
                return int(await connection.fetchval("SELECT count(*) FROM failure WHERE code = 'disk_full'"))

        return await until_answered(count, within=_PATIENCE)
