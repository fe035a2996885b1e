"""The standby of PostgreSQL is promoted: the primary died, was stopped, stands still, or is cut off and goes on.

Afterwards the old primary is made a standby of the new one, so that the next failover has one.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping

from chaos.faults.effects import Deal, Watched
from chaos.plan import Fault
from chaos.proxy import Link
from chaos.stack import Installation

#: How long a primary is silent until somebody promotes its standby. Patroni waits 30 s by default.
_SILENT_SECONDS = 6.0
#: A primary that was silent is heard again for so long, and takes writes, until somebody ends it.
_BACK_SECONDS = 1.0
#: Who stays with a primary that is cut off, and does not reach the new one.
_CUT_OFF = ("api-1", "worker-2")


class FailoverFaults:
    """Each returns the connections that it ended, or the bytes that met a silent primary.

    `promotions`: when a standby had become the primary, in seconds of the epoch.
    """

    def __init__(self, installation: Installation, broken: asyncio.Lock) -> None:
        self._installation = installation
        self._broken = broken
        self.promotions: list[float] = []

    @property
    def deals(self) -> Mapping[str, Deal]:
        return {
            "F45": self._kill,
            "F46": self._switch_over,
            "F47": self._freeze,
            "F48": self._cut_off,
        }

    async def _promote(self) -> None:
        await self._installation.promote()
        self.promotions.append(time.time())

    async def _kill(self, _fault: Fault) -> int:
        async with self._broken:
            hit = self._connections
            await self._installation.servers.postgres.kill()
            await self._promote()
            await self._installation.servers.copy_anew()
        return hit

    async def _switch_over(self, _fault: Fault) -> int:
        """In order: a primary that is stopped sends its standby everything first."""
        async with self._broken:
            hit = self._connections
            await self._installation.servers.postgres.stop("fast")
            await self._promote()
            await self._installation.servers.copy_anew()
        return hit

    @property
    def _connections(self) -> int:
        return sum(link.open_connections for link in self._installation.links_to("postgres"))

    async def _freeze(self, fault: Fault) -> int:
        """The old primary wakes up after the promotion, and goes on with what it was doing."""
        servers = self._installation.servers
        name = f"postgres/{servers.postgres.directory.name}"
        async with self._broken:
            watched = Watched(self._installation.links_to("postgres"))
            for _ in range(2):  # once more: who was being forked meanwhile
                servers.signal(name, signal.SIGSTOP)
                await asyncio.sleep(0.1)
            await asyncio.sleep(_SILENT_SECONDS)
            await self._promote()
            await asyncio.sleep(fault.seconds)
            hit = watched.since.sent
            servers.signal(name, signal.SIGCONT)
            await asyncio.sleep(_BACK_SECONDS)
            await servers.copy_anew()
        return hit

    async def _cut_off(self, fault: Fault) -> int:
        """The primary reaches neither its standby nor most of the processes. It goes on for the others, and none of
        their commits ends. At last all reach it again, and what was held arrives.
        """
        servers, links = self._installation.servers, self._installation.links
        to_old = [link for (slot, to), link in links.items() if to == "postgres" and slot not in _CUT_OFF]
        to_new = [link for (slot, to), link in links.items() if to == "standby" and slot in _CUT_OFF]
        async with self._broken:
            watched = Watched([*to_old, *to_new])
            servers.cut_replication()
            _hold([*to_old, *to_new])
            await asyncio.sleep(_SILENT_SECONDS)
            await self._promote()
            await asyncio.sleep(fault.seconds)
            hit = watched.since.held
            _heal(to_old)
            await asyncio.sleep(_BACK_SECONDS)
            await servers.copy_anew()
            _heal(to_new)
        return hit


def _hold(links: list[Link]) -> None:
    for link in links:
        link.hold()


def _heal(links: list[Link]) -> None:
    for link in links:
        link.heal()
