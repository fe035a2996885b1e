"""Faults that end in a failover: the primary of PostgreSQL dies, stops, freezes or is cut off, and its standby is
promoted.

Afterwards the old primary becomes a standby of the new one, so that the next failover has a standby.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Mapping

from chaos.faults.effects import FaultMaker, TrafficWatch
from chaos.history import Failover
from chaos.plan import Fault
from chaos.proxy import Link
from chaos.stack import Installation

#: How long a primary is silent before its standby is promoted. Patroni waits 30 s by default.
_SILENT_SECONDS = 6.0
#: How long a primary that was silent serves again, and takes writes, before the fault ends it.
_BACK_SECONDS = 1.0
#: The processes that are cut off with the old primary: they do not reach the new one.
_CUT_OFF = ("api-1", "worker-2")


class FailoverFaults:
    """Each fault returns the number of connections that it ended, or of bytes that a silent primary got.

    `failovers`: those that have ended, in order.
    """

    def __init__(self, installation: Installation, server_lock: asyncio.Lock) -> None:
        self._installation = installation
        self._server_lock = server_lock
        self.failovers: list[Failover] = []

    @property
    def makers(self) -> Mapping[str, FaultMaker]:
        return {
            "F45": self._kill,
            "F46": self._switch_over,
            "F47": self._freeze,
            "F48": self._cut_off,
        }

    async def _fail_over(self, silent_since: float | None) -> None:
        """Promote the standby. `silent_since`: since when the primary is silent; None: it has ended."""
        old_port = self._installation.servers.postgres.port
        await self._installation.promote()
        self.failovers.append(Failover(silent_since, time.time(), math.inf, old_port))

    async def _copy_anew(self) -> None:
        """End the old primary, and make it a standby of the new one."""
        ended_at = await self._installation.servers.copy_anew()
        self.failovers[-1] = self.failovers[-1]._replace(ended_at=ended_at)

    async def _kill(self, _fault: Fault) -> int:
        async with self._server_lock:
            hit = self._connections
            await self._installation.servers.postgres.kill()
            await self._fail_over(silent_since=None)
            await self._copy_anew()
        return hit

    async def _switch_over(self, _fault: Fault) -> int:
        """Stop the primary in order: first it sends its standby everything."""
        async with self._server_lock:
            hit = self._connections
            await self._installation.servers.postgres.stop("fast")
            await self._fail_over(silent_since=None)
            await self._copy_anew()
        return hit

    @property
    def _connections(self) -> int:
        return sum(link.open_connections for link in self._installation.links_to("postgres"))

    async def _freeze(self, fault: Fault) -> int:
        """Freeze the primary until after the promotion: then it wakes up, and goes on with what it was doing."""
        servers = self._installation.servers
        async with self._server_lock:
            name = f"postgres/{servers.postgres.directory.name}"
            traffic = TrafficWatch(self._installation.links_to("postgres"))
            silent_since = time.time()
            try:
                for _ in range(2):  # the second signal is for processes that were being forked at the first
                    servers.signal(name, signal.SIGSTOP)
                    await asyncio.sleep(0.1)
                await asyncio.sleep(_SILENT_SECONDS)
                await self._fail_over(silent_since=silent_since)
                await asyncio.sleep(fault.seconds)
                hit = traffic.since.sent
            finally:  # a run that ends early must still be able to stop this server
                servers.signal(name, signal.SIGCONT)
            await asyncio.sleep(_BACK_SECONDS)
            await self._copy_anew()
        return hit

    async def _cut_off(self, fault: Fault) -> int:
        """Cut the primary off from its standby and from most processes. It serves the other processes, and none of
        their commits ends. At last all processes reach the old primary again, and it gets the bytes that were held.
        """
        servers, links = self._installation.servers, self._installation.links
        async with self._server_lock:
            to_old = [link for (slot, to), link in links.items() if to == "postgres" and slot not in _CUT_OFF]
            to_new = [link for (slot, to), link in links.items() if to == "standby" and slot in _CUT_OFF]
            traffic = TrafficWatch([*to_old, *to_new])
            servers.cut_replication()
            silent_since = time.time()
            _hold([*to_old, *to_new])
            await asyncio.sleep(_SILENT_SECONDS)
            await self._fail_over(silent_since=silent_since)
            await asyncio.sleep(fault.seconds)
            hit = traffic.since.held
            _heal(to_old)
            await asyncio.sleep(_BACK_SECONDS)
            await self._copy_anew()
            _heal(to_new)
            self.failovers[-1] = self.failovers[-1]._replace(cut_off=_CUT_OFF, reached_at=time.time())
        return hit


def _hold(links: list[Link]) -> None:
    for link in links:
        link.hold()


def _heal(links: list[Link]) -> None:
    for link in links:
        link.heal()
