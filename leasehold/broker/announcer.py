"""The announcer publishes hints right after the commit that wrote them, so that no task waits for a poll. Hints are
messages that tell workers of due tasks. Each API process, each worker and each program that writes runs into the
database has an announcer. If an announcer fails, its hints stay in the outbox, the table of hints that the broker has
not confirmed. From there the relay, a loop of each worker, publishes them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import structlog

from leasehold.broker import outbox
from leasehold.broker.base import Broker
from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection, ConnectionSource
from leasehold.runtime import failpoints
from leasehold.runtime.gather import cancel_and_wait, check_not_cancelled
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.telemetry import outages, traces

log = structlog.get_logger(__name__)

#: The most hints that wait in memory while the broker is slow. If there are more, the relay sends them from the outbox.
_MAX_WAITING = 10_000
#: The most hints that are published at once.
_BATCH = 256


@asynccontextmanager
async def announcing(broker: Broker, pool: ConnectionSource) -> AsyncIterator[Announcer]:
    """An announcer for the block. With connections of `pool`, the announcer deletes the outbox rows of sent hints."""
    announcer = Announcer(broker, on_pool(pool))
    announcer.start()
    try:
        yield announcer
    finally:
        await announcer.close()


class WaitingAnnouncements:
    """Announcements (hints with the ids of their outbox rows) that wait to be published. Tenants take turns, so that
    many hints of one tenant delay no other tenant.
    """

    def __init__(self) -> None:
        self._by_tenant: dict[str, deque[Announcement]] = {}  # the first tenant has the next turn; no deque is empty
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._by_tenant)

    def add(self, announcements: Sequence[Announcement]) -> None:
        """Add announcements. If `_MAX_WAITING` announcements wait already, `_make_room` drops one of them for each new
        announcement. If `_make_room` refuses, the new announcement is dropped. The relay publishes the dropped hints.
        """
        for announcement in announcements:
            tenant = announcement.hint.tenant
            if self._count >= _MAX_WAITING and not self._make_room(tenant):
                continue
            self._by_tenant.setdefault(tenant, deque()).append(announcement)
            self._count += 1

    def _make_room(self, tenant: str) -> bool:
        """Drop the newest announcement of the tenant that has the most. Returns False, and drops nothing, if `tenant`
        already has its share: `_MAX_WAITING` divided by the number of tenants.
        """
        tenants = len(self._by_tenant) + (tenant not in self._by_tenant)
        if len(self._by_tenant.get(tenant, ())) >= _MAX_WAITING // tenants:
            return False
        max(self._by_tenant.values(), key=len).pop()
        self._count -= 1
        return True

    def take(self, at_most: int) -> list[Announcement]:
        """Remove and return at most `at_most` announcements, one from each tenant in turn."""
        batch: list[Announcement] = []
        while self._by_tenant and len(batch) < at_most:
            tenant = next(iter(self._by_tenant))
            tenant_queue = self._by_tenant.pop(tenant)
            batch.append(tenant_queue.popleft())
            if tenant_queue:
                self._by_tenant[tenant] = tenant_queue
        self._count -= len(batch)
        return batch


def on_pool(pool: ConnectionSource) -> Callable[[Callable[[Connection], Awaitable[None]]], Awaitable[None]]:
    """Makes the value of `on_connection` for an Announcer: a function that gets a coroutine function, and calls it with
    a connection of the pool.
    """

    async def run(work: Callable[[Connection], Awaitable[None]]) -> None:
        async with pool.acquire() as connection:
            await work(connection)

    return run


class Announcer:
    """Publishes the hints that `announce` gets, in batches. A hint that cannot be published stays in the outbox, for
    the relay.

    `on_connection`: a function that gets a coroutine function, and calls it with a database connection. So the owner of
    the announcer chooses the connection.
    """

    def __init__(
        self,
        broker: Broker,
        on_connection: Callable[[Callable[[Connection], Awaitable[None]]], Awaitable[None]],
    ) -> None:
        self._broker = broker
        self._on_connection = on_connection
        self._waiting = WaitingAnnouncements()
        self._has_waiting = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)

    def announce(self, announcements: Sequence[Announcement]) -> None:
        """Add the announcements to those that wait. The announcer soon publishes them, tenants in turn. Returns
        immediately.
        """
        self._waiting.add(announcements)
        if self._waiting:
            self._has_waiting.set()
            self._is_idle.clear()

    async def until_idle(self) -> None:
        """Wait until no hint waits in memory, because the announcer has sent each hint, or has left it to the relay."""
        await self._is_idle.wait()

    async def _run(self) -> None:
        while True:
            await self._has_waiting.wait()
            batch = self._waiting.take(_BATCH)
            if not self._waiting:
                self._has_waiting.clear()
            try:
                await self.publish(batch)
            except Exception:  # any error, because the rows are still in the outbox, and the relay publishes them
                check_not_cancelled()
                log.exception("hints are left to the relay")
            if not self._waiting:
                self._is_idle.set()

    async def publish(self, batch: Sequence[Announcement]) -> int:
        """Publish the batch, and delete the outbox rows of the hints that the broker confirmed. Returns the number of
        these hints.
        """
        hints = [announcement.hint for announcement in batch]
        with traces.publishing_spans([hint.headers for hint in hints]) as headers:
            traced_hints = [
                replace(hint, headers=hint_headers) for hint, hint_headers in zip(hints, headers, strict=True)
            ]
            confirmed = await self._broker.publish(traced_hints)
        failpoints.reach("after_publish")
        sent_announcements = [
            announcement for announcement, is_confirmed in zip(batch, confirmed, strict=True) if is_confirmed
        ]
        await self._delete_rows(sent_announcements)
        return len(sent_announcements)

    async def _delete_rows(self, sent_announcements: Sequence[Announcement]) -> None:
        if not sent_announcements:
            return
        try:
            await self._on_connection(lambda connection: outbox.delete_confirmed(connection, sent_announcements))
        except TRY_AGAIN as error:
            outages.DATABASE.record_error(
                error, "the outbox rows of sent hints were not deleted: the relay sends these hints again"
            )
