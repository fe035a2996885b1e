"""Faults of disks: the workers' scratch disk is full; PostgreSQL's disk is full, or stalls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from chaos.faults.effects import FaultMaker, LogWatch, largest_value
from chaos.plan import Fault
from chaos.stack import Installation
from leasehold.runtime.transient import until_answered

_PATIENCE_SECONDS = 20.0


class DiskFaults:
    """Each fault returns the number of processes, statements or attempts that it hit."""

    def __init__(self, installation: Installation, server_lock: asyncio.Lock) -> None:
        self._installation = installation
        self._server_lock = server_lock

    @property
    def makers(self) -> Mapping[str, FaultMaker]:
        return {
            "F32": self._fill_scratch,
            "F36": self._stall_database,
            "F37": self._fill_database,
        }

    async def _stall_database(self, fault: Fault) -> int:
        """Make every write of PostgreSQL wait in the kernel. Returns how many of its processes waited at once."""
        servers = self._installation.servers
        async with self._server_lock:
            if not await servers.volume.freeze():
                return 0
            try:
                return await largest_value(lambda: len(servers.blocked("postgres")), fault.seconds)
            finally:
                await servers.volume.thaw()

    async def _fill_database(self, fault: Fault) -> int:
        """Fill PostgreSQL's disk, then empty it. A server without room for its WAL ends: once there is room, start it
        again. Returns how many statements or starts failed.
        """
        servers = self._installation.servers
        watch = LogWatch(servers.postgres_log)
        async with self._server_lock:
            await asyncio.to_thread(servers.volume.fill)
            try:
                await asyncio.sleep(fault.seconds)
            finally:
                servers.volume.empty()
            await servers.restart_postgres()
        return watch.count("No space left on device")

    async def _fill_scratch(self, fault: Fault) -> int:
        """Fill the disk of all workers' scratch files. Returns how many attempts failed because of it."""
        before = await self._failed_attempts()
        await asyncio.to_thread(self._installation.disk.fill)
        await asyncio.sleep(fault.seconds)
        self._installation.disk.empty()
        return await self._failed_attempts() - before

    async def _failed_attempts(self) -> int:
        async def count() -> int:
            async with self._installation.connection() as connection:
                return int(await connection.fetchval("SELECT count(*) FROM failure WHERE code = 'disk_full'"))

        return await until_answered(count, within=_PATIENCE_SECONDS)
