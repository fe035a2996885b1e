"""Reads request bodies into memory. Each body is bounded in bytes and time, and all bodies of the process together have
one budget.

The bounds apply to the bytes that arrive, because the Content-Length may be wrong. `AuthenticatedFirst` calls
`Bodies.received` after it has checked the key, so the API never reads the body of a caller without a valid key.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from leasehold.api.process.metrics import BODY_BYTES
from leasehold.domain.errors import BodyTooLarge, BodyTooSlow, Unavailable

#: The most bytes of a body of a request outside of /v1/.
MAX_BYTES = 64 * 1024
#: The most bytes of a body of a request under /v1/, where bodies contain payloads and schemas.
#: (leasehold.domain.template also bounds each payload and each schema.)
MAX_BYTES_OF_V1 = 512 * 1024
_V1_PREFIX = "/v1/"
#: If a body is too large, the API reads and discards up to this many bytes of it before it answers. If the API closed
#: the connection while the client still sends, TCP would reset the connection, and the client would never see the
#: answer.
_DISCARDED_BYTES = 1024 * 1024
#: Seconds within which a whole body must arrive.
MAX_SECONDS = 20.0
#: Seconds for which a request waits until the budget has room for its body.
_PATIENCE_SECONDS = 10.0
#: The Retry-After of a request that found no room.
_RETRY_SECONDS = 2.0


class Bodies:
    """Reads bodies within `budget`, the number of bytes that all bodies in memory may have at once. A tenant gets at
    most half of the budget, so that the rest stays free for other tenants.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._tenant_budget = budget // 2
        self._used_bytes = 0
        self._used_bytes_by_tenant: Counter[str] = Counter()
        # For each body that waits for room: its tenant, its size, and the future that ends the wait.
        self._waiting: deque[tuple[str, int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def room(self, tenant_id: str, size: int) -> AsyncIterator[Callable[[int], None]]:
        """Reserve `size` bytes of the budget for the block, but at most half of the budget. Yields a function that
        lowers the reservation. Its argument is the number of bytes that stay reserved.

        Raises Unavailable `busy` if the budget has no room within _PATIENCE_SECONDS.
        """
        size = min(size, self._tenant_budget)

        def keep(kept_bytes: int) -> None:
            nonlocal size
            spare_bytes, size = size - kept_bytes, kept_bytes
            self._release(tenant_id, spare_bytes)

        await self._reserve(tenant_id, size)
        try:
            yield keep
        finally:
            self._release(tenant_id, size)

    @asynccontextmanager
    async def received(self, request: Request, tenant_id: str) -> AsyncIterator[Request]:
        """Read the whole body. Yields a request whose body is in memory. During the block, only the actual size of the
        body stays reserved. The block may last long, for example during a long poll. Raises BodyTooLarge, BodyTooSlow,
        Unavailable, ClientDisconnect.
        """
        max_bytes = MAX_BYTES_OF_V1 if request.scope["path"].startswith(_V1_PREFIX) else MAX_BYTES
        content_length = request.headers.get("content-length", "")
        if content_length.isdecimal() and int(content_length) > _DISCARDED_BYTES:  # too much to read and discard
            raise _too_large(max_bytes)
        size = min(int(content_length), max_bytes) if content_length.isdecimal() else max_bytes
        async with self.room(tenant_id, size) as keep:
            try:
                async with asyncio.timeout(MAX_SECONDS):
                    body = await _read(request.receive, max_bytes)
            except TimeoutError:
                raise BodyTooSlow("body_too_slow", "The request body did not arrive in time.") from None
            keep(len(body))
            yield Request(request.scope, _replay(body, request.receive))

    async def _reserve(self, tenant_id: str, size: int) -> None:
        """Wait until the budget has room, and reserve it. Raises Unavailable `busy`."""
        if not self._waiting and self._fits(tenant_id, size):
            self._grant(tenant_id, size)
            return
        grant: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (tenant_id, size, grant)
        self._waiting.append(waiter)
        self._serve()  # this body may fit, although larger bodies wait before it
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await grant
        except BaseException as error:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif grant.done() and not grant.cancelled():  # `_serve` has granted the room just before
                self._release(tenant_id, size)
            if isinstance(error, TimeoutError):
                message = "The server is reading too many request bodies. Try again soon."
                raise Unavailable("busy", message, retry_after=_RETRY_SECONDS) from None
            raise

    def _fits(self, tenant_id: str, size: int) -> bool:
        return (
            self._used_bytes + size <= self._budget
            and self._used_bytes_by_tenant[tenant_id] + size <= self._tenant_budget
        )

    def _grant(self, tenant_id: str, size: int) -> None:
        self._used_bytes += size
        self._used_bytes_by_tenant[tenant_id] += size
        BODY_BYTES.set(self._used_bytes)

    def _release(self, tenant_id: str, size: int) -> None:
        self._used_bytes -= size
        self._used_bytes_by_tenant[tenant_id] -= size
        if not self._used_bytes_by_tenant[tenant_id]:
            del self._used_bytes_by_tenant[tenant_id]
        BODY_BYTES.set(self._used_bytes)
        self._serve()

    def _serve(self) -> None:
        """Grant room in the order of arrival. A body that does not fit now stays in the queue, and smaller bodies
        behind it get room first.
        """
        for waiter in list(self._waiting):
            tenant_id, size, grant = waiter
            if self._fits(tenant_id, size):
                self._waiting.remove(waiter)
                if not grant.done():
                    self._grant(tenant_id, size)
                    grant.set_result(None)


def _too_large(max_bytes: int) -> BodyTooLarge:
    message = f"A request body has at most {max_bytes} bytes here. Upload pictures to the upload URL."
    return BodyTooLarge("body_too_large", message)


async def _read(receive: Receive, max_bytes: int) -> bytes:
    """Read the whole body. If the body is too large, read on and discard the rest, until the body ends, or until more
    than _DISCARDED_BYTES have arrived in total. Then raise BodyTooLarge.
    """
    body = bytearray()
    received_bytes = 0
    while received_bytes <= _DISCARDED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece = message.get("body", b"")
        received_bytes += len(piece)
        if received_bytes <= max_bytes:
            body += piece
        if not message.get("more_body", False):
            if received_bytes > max_bytes:
                break
            return bytes(body)
    raise _too_large(max_bytes)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` whose first message is the body that was read already. Later messages come from the old `receive`."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return unread.pop() if unread else await receive()

    return replay
