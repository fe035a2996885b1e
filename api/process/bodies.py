"""Request bodies in memory: each bounded in bytes and time, and all together by one budget of the process.

By bytes that came, not by what was announced. Who asks is known before the first byte is read.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from leasehold.api.process.metrics import BODY_BYTES
from leasehold.domain.errors import BodyTooLarge, BodyTooSlow, Unavailable

MOST_BYTES = 64 * 1024
#: Of the runs door, whose bodies carry payloads and schemas (leasehold.domain.template says how large those may be).
MOST_BYTES_OF_RUNS = 512 * 1024
_RUNS = "/v1/"
#: What is read and thrown away of a body that is too large: a connection closed on a client that still sends is
#: reset, and the client never sees the answer.
_THROWN_AWAY_BYTES = 1024 * 1024
MOST_SECONDS = 20.0
#: For so long a request waits for its share of the budget.
_PATIENCE_SECONDS = 10.0
_RETRY_SECONDS = 2.0


class Bodies:
    """`budget`: bytes of bodies under way at once. A tenant has at most half of it, so that others always find room."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._most = budget // 2
        self._used = 0
        self._of: Counter[str] = Counter()
        self._waiting: deque[tuple[str, int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def room(self, tenant_id: str, size: int) -> AsyncIterator[None]:
        """Room for `size` bytes, or for as many as a tenant may have. Raises Unavailable `busy` when there is none."""
        size = min(size, self._most)
        await self._take(tenant_id, size)
        try:
            yield
        finally:
            self._give_back(tenant_id, size)

    @asynccontextmanager
    async def received(self, request: Request, tenant_id: str) -> AsyncIterator[Request]:
        """The request with its body read. Raises BodyTooLarge, BodyTooSlow, Unavailable, ClientDisconnect."""
        most = MOST_BYTES_OF_RUNS if request.scope["path"].startswith(_RUNS) else MOST_BYTES
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > _THROWN_AWAY_BYTES:
            raise _too_large(most)
        size = min(int(announced), most) if announced.isdecimal() else most
        async with self.room(tenant_id, size):
            try:
                async with asyncio.timeout(MOST_SECONDS):
                    body = await _read(request.receive, most)
            except TimeoutError:
                raise BodyTooSlow("body_too_slow", "The request body did not arrive in time.") from None
            yield Request(request.scope, _replay(body, request.receive))

    async def _take(self, tenant_id: str, size: int) -> None:
        if not self._waiting and self._fits(tenant_id, size):
            self._grant(tenant_id, size)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (tenant_id, size, turn)
        self._waiting.append(place)
        self._serve()
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await turn
        except BaseException as error:
            if place in self._waiting:
                self._waiting.remove(place)
            elif turn.done() and not turn.cancelled():
                self._give_back(tenant_id, size)
            if isinstance(error, TimeoutError):
                said = "Too many request bodies are under way. Try again soon."
                raise Unavailable("busy", said, retry_after=_RETRY_SECONDS) from None
            raise

    def _fits(self, tenant_id: str, size: int) -> bool:
        return self._used + size <= self._budget and self._of[tenant_id] + size <= self._most

    def _grant(self, tenant_id: str, size: int) -> None:
        self._used += size
        self._of[tenant_id] += size
        BODY_BYTES.set(self._used)

    def _give_back(self, tenant_id: str, size: int) -> None:
        self._used -= size
        self._of[tenant_id] -= size
        if not self._of[tenant_id]:
            del self._of[tenant_id]
        BODY_BYTES.set(self._used)
        self._serve()

    def _serve(self) -> None:
        """In the order of their coming; who waits for its own tenant's share does not hold up the others."""
        for place in list(self._waiting):
            tenant_id, size, turn = place
            if self._fits(tenant_id, size):
                self._waiting.remove(place)
                if not turn.done():
                    self._grant(tenant_id, size)
                    turn.set_result(None)


def _too_large(most: int) -> BodyTooLarge:
    said = f"A request body has at most {most} bytes here; pictures go to the upload URL."
    return BodyTooLarge("body_too_large", said)


async def _read(receive: Receive, most: int) -> bytes:
    body = bytearray()
    came = 0
    while came <= _THROWN_AWAY_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece = message.get("body", b"")
        came += len(piece)
        if came <= most:
            body += piece
        if not message.get("more_body", False):
            if came > most:
                break
            return bytes(body)
    raise _too_large(most)


def _replay(body: bytes, receive: Receive) -> Receive:
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay
