"""Stores that answer every request in one way, for clients that read an object by its URL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

_PIECE = b"0" * 65_536


def store_of(head: str, body: bytes, *, status: str = "200 OK") -> AbstractAsyncContextManager[str]:
    """The URL of an object. `head`: more lines of the answer's head."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status}\r\n{head}Connection: close\r\n\r\n".encode() + body)
        await writer.drain()

    return _answering(answer)


def endless_store() -> AbstractAsyncContextManager[str]:
    """The URL of an object that begins with zeros and has no end: what reads it must stop by itself."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        while True:
            writer.write(_PIECE)
            await writer.drain()

    return _answering(answer)


@asynccontextmanager
async def _answering(answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/object"
    finally:
        server.close()
