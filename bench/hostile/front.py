"""A TCP proxy before the store, which can stop to forward bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class Front:
    """The proxy. `url`: its own address."""

    def __init__(self, endpoint: str) -> None:
        self._behind = urlsplit(endpoint)
        self._forwards = asyncio.Event()
        self._forwards.set()
        self._serving: set[asyncio.Task[None]] = set()
        self.url = ""

    def hang(self) -> None:
        """From now on, accept connections and forward nothing."""
        self._forwards.clear()

    def begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def end(self) -> None:
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection(self._behind.hostname, self._behind.port)
        try:
            await asyncio.gather(self._pass(reader, back_writer), self._pass(back_reader, writer))
        except ConnectionError:
            return  # one side has closed the connection
        finally:
            writer.close()
            back_writer.close()

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            await self._forwards.wait()
            target.write(data)
            await target.drain()
        target.close()


@asynccontextmanager
async def before(endpoint: str) -> AsyncIterator[Front]:
    """A proxy before the server at `endpoint`."""
    front = Front(endpoint)
    server = await asyncio.start_server(front.begin, "127.0.0.1", 0)
    front.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield front
    finally:
        server.close()
        await front.end()
