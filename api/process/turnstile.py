"""Tenants take turns at what an API process has little of: its connections to PostgreSQL, and its bulk writes (batches,
backfills, replays of many), each of which keeps a connection and a core busy for as long as hundreds of other requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf

from leasehold.domain.errors import RequestError


class Turnstile:
    """`most` are inside at once, `each` of one tenant. `waiting` more of one tenant wait, `patience` seconds at most.
    `refusal` makes the error of those who may not wait, and of those who have waited for too long.
    """

    def __init__(
        self, *, most: int, each: int, patience: float, refusal: Callable[[], RequestError], waiting: float = inf
    ) -> None:
        self._most, self._each = most, each
        self._most_waiting, self._patience = waiting, patience
        self._refusal = refusal
        self._inside: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order of the tenants' turns; none is empty

    @property
    def inside(self) -> int:
        return self._inside.total()

    @asynccontextmanager
    async def turn(self, tenant_id: str) -> AsyncIterator[None]:
        """Raises what `refusal` makes."""
        await self._enter(tenant_id)
        try:
            yield
        finally:
            self._leave(tenant_id)

    async def _enter(self, tenant_id: str) -> None:
        if self._has_room(tenant_id):  # then nobody waits who might come in
            self._inside[tenant_id] += 1
            return
        if len(self._waiting.get(tenant_id, ())) >= self._most_waiting:
            raise self._refusal()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant_id, deque()).append(turn)
        try:
            async with asyncio.timeout(self._patience):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._leave(tenant_id)
            else:
                self._forget(tenant_id, turn)
            if isinstance(error, TimeoutError):
                raise self._refusal() from None
            raise

    def _has_room(self, tenant_id: str) -> bool:
        return self.inside < self._most and self._inside[tenant_id] < self._each

    def _serve(self) -> None:
        """The next of the tenant whose turn it is, of those that may have one more inside."""
        while (tenant_id := next(filter(self._has_room, self._waiting), None)) is not None:
            mine = self._waiting.pop(tenant_id)
            turn = mine.popleft()
            if mine:
                self._waiting[tenant_id] = mine
            if not turn.done():
                self._inside[tenant_id] += 1
                turn.set_result(None)

    def _leave(self, tenant_id: str) -> None:
        self._inside[tenant_id] -= 1
        if not self._inside[tenant_id]:
            del self._inside[tenant_id]
        self._serve()

    def _forget(self, tenant_id: str, turn: asyncio.Future[None]) -> None:
        mine = self._waiting.get(tenant_id)
        if mine is not None and turn in mine:
            mine.remove(turn)
            if not mine:
                del self._waiting[tenant_id]
