"""Lets tenants take turns at the scarce resources of an API process. tenant_pool.py has one turnstile for connections
to PostgreSQL, and one for bulk writes. replica_reads.py has one for connections to the standby. services.py has one for
checks of URLs, and console/state.py has one for requests to the OpenID provider.

Bulk writes are a batch, a backfill, a bulk replay and a bulk settlement. They have a turnstile of their own, because
each of them uses a connection and a core for as long as hundreds of other requests together.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf


class Turnstile:
    """Admits at most `at_most` requests at once, and at most `per_tenant` of one tenant. Up to `waiting` further
    requests of a tenant wait, for at most `patience` seconds. If a request may not wait, or has waited too long,
    `refusal` makes its error.
    """

    def __init__(
        self, *, at_most: int, per_tenant: int, patience: float, refusal: Callable[[], Exception], waiting: float = inf
    ) -> None:
        self._at_most, self._per_tenant = at_most, per_tenant
        self._max_waiting, self._patience = waiting, patience
        self._refusal = refusal
        self._inside: Counter[str] = Counter()  # tenant -> its requests that hold a place
        # The waiting requests of each tenant, with the tenants in the order of their turns. No queue here is empty.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def inside(self) -> int:
        """How many requests hold a place."""
        return self._inside.total()

    @asynccontextmanager
    async def turn(self, tenant_id: str) -> AsyncIterator[None]:
        """Hold a place during the block. Raises the error that `refusal` makes."""
        await self._enter(tenant_id)
        try:
            yield
        finally:
            self._leave(tenant_id)

    async def _enter(self, tenant_id: str) -> None:
        # If there is room for this request, admit it before all waiting requests. No waiting request can use the room,
        # because `_serve` has admitted all that fit.
        if self._has_room(tenant_id):
            self._inside[tenant_id] += 1
            return
        if len(self._waiting.get(tenant_id, ())) >= self._max_waiting:
            raise self._refusal()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant_id, deque()).append(waiter)
        try:
            async with asyncio.timeout(self._patience):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled():  # `_serve` has admitted this request just before
                self._leave(tenant_id)
            else:
                self._forget(tenant_id, waiter)
            if isinstance(error, TimeoutError):
                raise self._refusal() from None
            raise

    def _has_room(self, tenant_id: str) -> bool:
        return self.inside < self._at_most and self._inside[tenant_id] < self._per_tenant

    def _serve(self) -> None:
        """Admit waiting requests while there is room. Each place goes to the first tenant in line that is below its own
        bound. The tenant's oldest request is admitted, and the tenant goes to the end of the line.
        """
        while (tenant_id := next(filter(self._has_room, self._waiting), None)) is not None:
            queue = self._waiting.pop(tenant_id)
            waiter = queue.popleft()
            if queue:
                self._waiting[tenant_id] = queue
            if not waiter.done():
                self._inside[tenant_id] += 1
                waiter.set_result(None)

    def _leave(self, tenant_id: str) -> None:
        self._inside[tenant_id] -= 1
        if not self._inside[tenant_id]:
            del self._inside[tenant_id]
        self._serve()

    def _forget(self, tenant_id: str, waiter: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant_id)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._waiting[tenant_id]
