"""The tools of an attack: an HTTP client with a hostile tenant's key, and a server that never ends its answers."""

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


class AttackSettings(BaseModel):
    """The settings of an attacking process. `silent_port`: a free port, for the silent server."""

    port: int
    key: str
    database_url: str
    silent_port: int
    seconds: float


@dataclass
class Arena:
    """One running attack. `answers`: the number of answers by status and code."""

    settings: AttackSettings
    http: httpx2.AsyncClient
    answers: Counter[str] = field(default_factory=Counter)
    until: float = 0.0

    @property
    def has_time(self) -> bool:
        """Whether the attack may go on."""
        return monotonic() < self.until

    async def ask(self, method: str, path: str, body: object = None, **options: Any) -> httpx2.Response | None:
        """Send a request and count its answer. None: there was no answer."""
        try:
            answer = await self.http.request(method, path, json=body, **options)
        except httpx2.TransportError as error:
            self.answers[type(error).__name__] += 1
            return None
        code = answer.json().get("code", "") if answer.is_error and "json" in answer.headers["content-type"] else ""
        self.answers[f"{answer.status_code} {code}".strip()] += 1
        return answer

    async def repeat(self, work: Callable[[int], Awaitable[object]], *, at_once: int, at_most: int) -> None:
        """Call `work` with 0, 1, ... until the time is over, at most `at_most` times, `at_once` calls at a time."""
        numbers = iter(range(at_most))

        async def work_on() -> None:
            for number in numbers:
                if not self.has_time:
                    return
                await work(number)

        await asyncio.gather(*(work_on() for _ in range(at_once)))

    async def hold(self) -> None:
        """Wait until the time is over. Until then the attack keeps what it has taken."""
        await asyncio.sleep(max(0.0, self.until - monotonic()))


@asynccontextmanager
async def arena(settings: AttackSettings) -> AsyncIterator[Arena]:
    headers = {"Authorization": f"Bearer {settings.key}"}
    limits = httpx2.Limits(max_connections=64)
    async with httpx2.AsyncClient(
        base_url=f"http://127.0.0.1:{settings.port}", headers=headers, timeout=settings.seconds + 5, limits=limits
    ) as http:
        yield Arena(settings, http, until=monotonic() + settings.seconds)


@asynccontextmanager
async def silent_server(port: int) -> AsyncIterator[Counter[str]]:
    """A server that accepts connections and sends one byte a second, without an end. Yields counts of connections."""
    counts: Counter[str] = Counter()
    dripping: set[asyncio.Task[None]] = set()
    is_over = asyncio.Event()

    async def drip(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        counts["connections"] += 1
        counts["open"] += 1
        counts["most open"] = max(counts["most open"], counts["open"])
        try:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 60000\r\n\r\n")
            while not is_over.is_set() and not writer.is_closing():
                writer.write(b".")
                await writer.drain()
                with suppress(TimeoutError):
                    await asyncio.wait_for(is_over.wait(), 1)
        except ConnectionError:
            return  # the client has closed the connection
        finally:
            counts["open"] -= 1
            writer.close()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(drip(reader, writer))
        dripping.add(task)
        task.add_done_callback(dripping.discard)

    server = await asyncio.start_server(begin, "127.0.0.1", port, backlog=1000)
    try:
        yield counts
    finally:
        server.close()
        is_over.set()
        await asyncio.gather(*dripping)
