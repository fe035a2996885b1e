"""Faults of links, of one process or of the whole fleet: slow, cut, held, or without one direction.

Some make a write arrive when its worker has lost the lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from uuid import UUID

from chaos.faults.effects import FaultMaker, TrafficWatch, wait_until
from chaos.plan import Fault
from chaos.proxy import Link, Slowdown
from chaos.stack import Installation
from leasehold.runtime.transient import TRY_AGAIN

_HELD = ("leasehold settlements", "leasehold heartbeat")
_SETTLEMENTS = "leasehold settlements"
#: A worker settles in one request all attempts that end while it waits for an answer. In this time several end.
_GATHERING = 1.0
#: PostgreSQL's documentation, "Message Formats": a Bind message gives a prepared statement its parameters.
_BIND = b"B"
_RESULTS = 3
#: A lease of a run passes after four seconds, and a worker claims the task within one more. A busy machine is slower.
_NEWER_LEASE_SECONDS = 30.0
#: The newer leases pass, too, because the heartbeat is held: after four seconds.
_FURTHER_SECONDS = 2.5
_LOOK_SECONDS = 0.05
#: How long a settlement may take to arrive and to be carried out.
_ARRIVAL_SECONDS = 1.0


class NetworkFaults:
    """Each fault returns the number of bytes that it slowed, held or dropped, or of connections that it cut."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation

    @property
    def makers(self) -> Mapping[str, FaultMaker]:
        return {
            "F7": self._cut_settlement,
            "F9 hold a settlement": self._hold_settlement,
            "F27": self._slow,
            "F28": self._reset,
            "F29": self._half_open,
            "F30 one-way": self._drop_replies,
            "F30 mirrored": self._drop_requests,
            "F40 fleet half-open": self._half_open,
            "F40 fleet one-way": self._drop_replies,
            "F40 fleet mirrored": self._drop_requests,
        }

    def _links(self, fault: Fault) -> list[Link]:
        """The link of the fault's target; without a target, the links of all processes."""
        slots = [fault.target] if fault.target else list(self._installation.slots)
        return [self._installation.links[slot, fault.kind.link] for slot in slots]

    async def _cut_settlement(self, fault: Fault) -> int:
        [link] = self._links(fault)
        link.cut_next_request(_SETTLEMENTS)
        return int(await wait_until(lambda: not link.cut_pending))

    async def _hold_settlement(self, fault: Fault) -> int:
        """Hold the worker's settlements and its heartbeat until tasks of the first held settlement run again. The
        worker cannot renew its leases, so they pass, and the settlement arrives when the tasks have newer leases. The
        first settlement completes several attempts with results: if the platform accepted one without results by
        mistake, no invariant would show it.

        `fault.seconds`: how long to hold if there is no such settlement.
        """
        [link] = self._links(fault)
        traffic = TrafficWatch([link])
        link.hold((_SETTLEMENTS,))
        await asyncio.sleep(_GATHERING)
        link.heal()
        first = _FirstSettlement()
        link.hold_from(first, _HELD)
        if not await wait_until(lambda: not link.hold_pending):
            link.hold(_HELD)
        settled = {task: epoch for task, epoch in (await self._running()).items() if first.names(task)}
        if settled:
            await self._wait_for_newer_leases(settled)
            # The newer lease's own settlement is held, too. If it came first, there would be nothing left to settle.
            link.pass_first()
            await asyncio.sleep(_ARRIVAL_SECONDS)
        else:
            await asyncio.sleep(fault.seconds)
        held = traffic.since.held
        link.heal()
        return held

    async def _wait_for_newer_leases(self, epochs: Mapping[UUID, int]) -> None:
        """Wait until half of the tasks run with a newer epoch: not each of them has a result that names its run. After
        the first of them, wait for at most _FURTHER_SECONDS.
        """
        until = time.monotonic() + _NEWER_LEASE_SECONDS
        while time.monotonic() < until:
            newer = sum(epoch > epochs.get(task, epoch) for task, epoch in (await self._running()).items())
            if 2 * newer >= len(epochs):
                return
            if newer:
                until = min(until, time.monotonic() + _FURTHER_SECONDS)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _running(self) -> dict[UUID, int]:
        """The epoch of each running task. Empty while the database is away."""
        try:
            async with self._installation.connection() as connection:
                rows = await connection.fetch("SELECT id, epoch FROM task WHERE status = 'running'")
        except TRY_AGAIN:
            return {}
        return {row["id"]: row["epoch"] for row in rows}

    async def _slow(self, fault: Fault) -> int:
        links = self._links(fault)
        traffic = TrafficWatch(links)
        for link in links:
            link.slowdown = Slowdown(0.25, 0.2, 64_000 if fault.kind.link == "s3" else 0)
        await asyncio.sleep(fault.seconds)
        for link in links:
            link.heal()
        return traffic.since.slowed

    async def _reset(self, fault: Fault) -> int:
        links = self._links(fault)
        for _ in range(10):
            if hit := sum(link.reset() for link in links):
                return hit
            await asyncio.sleep(0.5)
        return 0

    async def _half_open(self, fault: Fault) -> int:
        links = self._links(fault)
        traffic = TrafficWatch(links)
        for link in links:
            link.hold()
        await asyncio.sleep(fault.seconds)
        held = traffic.since.held
        for link in links:
            link.reset()
            link.heal()
        return held

    async def _drop_replies(self, fault: Fault) -> int:
        for link in self._links(fault):
            link.drop_replies()
        return await self._count_dropped(fault)

    async def _drop_requests(self, fault: Fault) -> int:
        for link in self._links(fault):
            link.drop_requests()
        return await self._count_dropped(fault)

    async def _count_dropped(self, fault: Fault) -> int:
        links = self._links(fault)
        traffic = TrafficWatch(links)
        await asyncio.sleep(fault.seconds)
        for link in links:
            link.heal()
        return traffic.since.lost


class _FirstSettlement:
    """Recognises a request that completes at least `_RESULTS` attempts whose result names their run (chaos.steps), and
    remembers it.
    """

    def __init__(self) -> None:
        self._request = b""

    def __call__(self, label: str, request: bytes) -> bool:
        found = label == _SETTLEMENTS and request[:1] == _BIND and request.count(b'{"run":') >= _RESULTS
        if found:
            self._request = request
        return found

    def names(self, task: UUID) -> bool:
        """Whether the request settles the task: PostgreSQL's binary format of an id is its 16 bytes."""
        return task.bytes in self._request
