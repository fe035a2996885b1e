"""What an attack has: the API's address, a hostile tenant's key, and a server that never answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import httpx2
from pydantic import BaseModel


class Told(BaseModel):
    """What the bench tells the process that attacks. `silent_port`: nobody listens there yet."""

    port: int
    key: str
    database_url: str
    silent_port: int
    seconds: float


@dataclass
class Arena:
    """`answers`: how many of each status the platform gave."""

    told: Told
    http: httpx2.AsyncClient
    answers: Counter[str] = field(default_factory=Counter)
    until: float = 0.0

    @property
    def open(self) -> bool:
        """Whether the attack may go on."""
        return monotonic() < self.until

    async def ask(self, method: str, path: str, body: object = None, **more: Any) -> httpx2.Response | None:
        """None when there was no answer."""
        try:
            answer = await self.http.request(method, path, json=body, **more)
        except httpx2.TransportError as error:
            self.answers[type(error).__name__] += 1
            return None
        code = answer.json().get("code", "") if answer.is_error and "json" in answer.headers["content-type"] else ""
        self.answers[f"{answer.status_code} {code}".strip()] += 1
        return answer

    async def repeat(self, work: Callable[[int], Awaitable[object]], *, at_once: int, at_most: int) -> None:
        """`work` with 0, 1, ... until the time is over or it was done `at_most` times; `at_once` of them together."""
        numbers = iter(range(at_most))

        async def one() -> None:
            for number in numbers:
                if not self.open:
                    return
                await work(number)

        await asyncio.gather(*(one() for _ in range(at_once)))

    async def rest(self) -> None:
        """What is held stays held until the time is over."""
        await asyncio.sleep(max(0.0, self.until - monotonic()))


@asynccontextmanager
async def arena(told: Told) -> AsyncIterator[Arena]:
    headers = {"Authorization": f"Bearer {told.key}"}
    limits = httpx2.Limits(max_connections=64)
    async with httpx2.AsyncClient(
        base_url=f"http://127.0.0.1:{told.port}", headers=headers, timeout=told.seconds + 5, limits=limits
    ) as http:
        yield Arena(told, http, until=monotonic() + told.seconds)


@asynccontextmanager
async def silent_server(port: int) -> AsyncIterator[Counter[str]]:
    """Accepts, reads, and sends a byte a second, for ever. Counts its connections."""
    seen: Counter[str] = Counter()
    dripping: set[asyncio.Task[None]] = set()
    over = asyncio.Event()

    async def drip(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen["connections"] += 1
        seen["open"] += 1
        seen["most open"] = max(seen["most open"], seen["open"])
        try:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 60000\r\n\r\n")
            while not over.is_set() and not writer.is_closing():
                writer.write(b".")
                await writer.drain()
                with suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), 1)
        except ConnectionError:
            return  # whoever asked has left
        finally:
            seen["open"] -= 1
            writer.close()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(drip(reader, writer))
        dripping.add(task)
        task.add_done_callback(dripping.discard)

    server = await asyncio.start_server(begin, "127.0.0.1", port, backlog=1000)
    try:
        yield seen
    finally:
        server.close()
        over.set()
        await asyncio.gather(*dripping)
