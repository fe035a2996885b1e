"""Publishing hints right after the commit that wrote them, so that no poll stands between commit and start."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import structlog

from leasehold.broker import outbox
from leasehold.broker.base import Broker
from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection
from leasehold.runtime import failpoints
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.telemetry import outages, traces

log = structlog.get_logger(__name__)

#: Hints kept in memory while the broker is slow; past this the relay sends them from the table.
_MOST_WAITING = 10_000
_BATCH = 256


class Waiting:
    """Announcements by tenant, so that a tenant's flood stands before nobody else's hint."""

    def __init__(self) -> None:
        self._of: dict[str, deque[Announcement]] = {}  # in the order of the tenants' turns; none is empty
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._of)

    def add(self, announcements: Sequence[Announcement]) -> None:
        """Past `_MOST_WAITING` a tenant adds only up to an equal share of them: the latest hint of the tenant that has
        the most is then left to the relay.
        """
        for announcement in announcements:
            tenant = announcement.hint.tenant
            mine = self._of.setdefault(tenant, deque())
            if self._count < _MOST_WAITING:
                self._count += 1
            elif len(mine) < _MOST_WAITING // len(self._of):
                self._of[max(self._of, key=lambda one: len(self._of[one]))].pop()
            else:
                if not mine:
                    del self._of[tenant]
                continue
            mine.append(announcement)

    def take(self, most: int) -> list[Announcement]:
        """The next ones, one of each tenant in turn."""
        taken: list[Announcement] = []
        while self._of and len(taken) < most:
            tenant = next(iter(self._of))
            mine = self._of.pop(tenant)
            taken.append(mine.popleft())
            if mine:
                self._of[tenant] = mine
        self._count -= len(taken)
        return taken


class Announcer:
    """Best effort by design: what it cannot send stays in the outbox for the relay.

    `on_connection` runs a coroutine function on a database connection of the owner's choice.
    """

    def __init__(
        self,
        broker: Broker,
        on_connection: Callable[[Callable[[Connection], Awaitable[None]]], Awaitable[None]],
    ) -> None:
        self._broker = broker
        self._on_connection = on_connection
        self._waiting = Waiting()
        self._gathered = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def announce(self, announcements: Sequence[Announcement]) -> None:
        """Publish soon, tenants in turn; returns at once."""
        self._waiting.add(announcements)
        if self._waiting:
            self._gathered.set()

    async def _run(self) -> None:
        while True:
            await self._gathered.wait()
            batch = self._waiting.take(_BATCH)
            if not self._waiting:
                self._gathered.clear()
            try:
                await self.publish(batch)
            except Exception:  # whatever it is: the rows are still there, and the relay takes them
                log.exception("hints are left to the relay")

    async def publish(self, batch: Sequence[Announcement]) -> int:
        """Publish now, and forget the rows that the broker confirmed; returns how many.

        Without a broker the rows come first: a worker that is woken passes over jobs that are locked at that
        moment, and would find these only when it looks again.
        """
        hints = [announcement.hint for announcement in batch]
        if self._broker.name == "postgres":
            await self._forget(batch)
            await self._broker.publish(hints)
            return len(batch)
        with traces.announced([hint.headers for hint in hints]) as headers:
            told = [replace(hint, headers=own) for hint, own in zip(hints, headers, strict=True)]
            confirmed = await self._broker.publish(told)
        failpoints.reach("after_publish")
        sent = [announcement for announcement, ok in zip(batch, confirmed, strict=True) if ok]
        await self._forget(sent)
        return len(sent)

    async def _forget(self, sent: Sequence[Announcement]) -> None:
        if not sent:
            return
        ids = [announcement.outbox_id for announcement in sent]
        try:
            await self._on_connection(lambda connection: outbox.announced(connection, ids))
        except TRY_AGAIN as error:
            outages.DATABASE.met(error, "hints that were sent and not marked: the relay repeats them")
