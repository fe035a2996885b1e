"""A TCP proxy before the store. It can stop forwarding bytes: then clients see a store that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class StoreProxy:
    """The proxy. `url`: its address. `endpoint`: the address of the store."""

    def __init__(self, endpoint: str) -> None:
        self._store = urlsplit(endpoint)
        self._forwards = asyncio.Event()
        self._forwards.set()
        self._serving: set[asyncio.Task[None]] = set()
        self.url = ""

    def hang(self) -> None:
        """From now on, accept connections and forward nothing."""
        self._forwards.clear()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def end(self) -> None:
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            store_reader, store_writer = await asyncio.open_connection(self._store.hostname, self._store.port)
        except OSError:  # the store is away: then a client must see a closed connection, not a store that hangs
            writer.close()
            return
        try:
            await asyncio.gather(self._pass(reader, store_writer), self._pass(store_reader, writer))
        except ConnectionError:
            return  # one side has closed the connection
        finally:
            writer.close()
            store_writer.close()

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            await self._forwards.wait()
            target.write(data)
            await target.drain()
        target.close()


@asynccontextmanager
async def store_proxy(endpoint: str) -> AsyncIterator[StoreProxy]:
    """A proxy before the store at `endpoint`."""
    proxy = StoreProxy(endpoint)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.end()
