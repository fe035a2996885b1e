"""Publishing hints right after the commit that wrote them, so that no poll stands between commit and start."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import structlog

from leasehold import failpoints, outages, outbox
from leasehold.broker.base import Broker
from leasehold.database import TRY_AGAIN, Connection
from leasehold.outbox import Announcement
from leasehold.telemetry import traces

log = structlog.get_logger(__name__)

#: Hints kept in memory while the broker is slow; past this the relay sends them from the table.
_MOST_WAITING = 10_000
_BATCH = 256


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
        self._waiting: deque[Announcement] = deque()
        self._gathered = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def announce(self, announcements: Sequence[Announcement]) -> None:
        """Publish soon; returns at once."""
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.extend(announcements)
            self._gathered.set()

    async def _run(self) -> None:
        while True:
            await self._gathered.wait()
            batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
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
