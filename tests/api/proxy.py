"""A TCP proxy before a real server, so that a test can take the server away from one client and give it back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Proxy:
    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def open(self) -> None:
        """Listen, on the same port as before."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def lead_to(self, host: str, port: int) -> None:
        """New connections go there, as when a virtual IP address moves. Those that are open stay where they are."""
        self._target = (host, port)

    async def cut(self) -> None:
        """Break every connection and refuse new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in list(self._writers):
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        to_reader, to_writer = await asyncio.open_connection(*self._target)
        if self._server is None:  # cut meanwhile: nobody would break these two later
            writer.transport.abort()
            to_writer.transport.abort()
            return
        self._writers.add(to_writer)
        for source, sink in ((reader, to_writer), (to_reader, writer)):
            task = asyncio.create_task(_pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    except ConnectionError:
        sink.transport.abort()
    else:
        sink.close()


@asynccontextmanager
async def proxy_to(host: str, port: int) -> AsyncIterator[Proxy]:
    proxy = Proxy(host, port)
    await proxy.open()
    yield proxy
    await proxy.cut()
