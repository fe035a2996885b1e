"""What a worker does first with hints, for tests: collects them and lets a test wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from uuid import UUID

from leasehold.broker import Delivery


class Inbox:
    """Pass `inbox.put` as on_delivery and `inbox.wake` as on_wake."""

    def __init__(self) -> None:
        self._deliveries: asyncio.Queue[Delivery] = asyncio.Queue()
        self._wakes: asyncio.Queue[str] = asyncio.Queue()

    def put(self, delivery: Delivery) -> None:
        self._deliveries.put_nowait(delivery)

    def wake(self, queue: str) -> None:
        self._wakes.put_nowait(queue)

    @property
    def is_empty(self) -> bool:
        return self._deliveries.empty()

    @property
    def waiting_wakes(self) -> int:
        return self._wakes.qsize()

    async def next(self) -> Delivery:
        return await self._deliveries.get()

    async def next_wake(self) -> str:
        return await self._wakes.get()

    async def take(self, count: int) -> list[Delivery]:
        """Collect and ack `count` deliveries."""
        taken = []
        for _ in range(count):
            taken.append(await self.next())
            await taken[-1].ack()
        return taken

    async def until_seen(self, tasks: Collection[UUID]) -> list[Delivery]:
        """Collect and ack until every one of `tasks` has come, with whatever comes between."""
        missing, taken = set(tasks), []
        while missing:
            taken += await self.take(1)
            missing.discard(taken[-1].hint.task_id)
        return taken
