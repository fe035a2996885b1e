"""As little of an HTTP/1.1 server as the simulator needs, with its hands on the connection: it can hang up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

import orjson


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


@dataclass(frozen=True)
class Reply:
    status: int = 200
    said: Any = None
    body: bytes | None = None  # in place of JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    repeat: int = 1  # the body this often


class HangUp(Exception):
    """Close the connection without an answer."""


Handler = Callable[[Request], Awaitable[Reply]]


class HttpServer:
    """`async with HttpServer(handler) as server`; it listens on 127.0.0.1."""

    def __init__(self, handler: Handler, port: int = 0) -> None:
        self._handler = handler
        self._port = port
        self._open: set[asyncio.StreamWriter] = set()
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port, backlog=1024)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._server.close()
        for writer in self._open:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            with suppress(HangUp, ConnectionError, asyncio.IncompleteReadError):
                while True:
                    await _write(writer, await self._handler(await _read(reader)))
        finally:
            self._open.discard(writer)
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:]) if name}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    parts = urlsplit(target)
    return Request(method, parts.path, dict(parse_qsl(parts.query)), headers, body)


async def _write(writer: asyncio.StreamWriter, reply: Reply) -> None:
    body = orjson.dumps(reply.said) if reply.body is None else reply.body
    kind = "application/json" if reply.body is None else "application/octet-stream"
    headers = {"content-type": kind, "content-length": str(len(body) * reply.repeat), **reply.headers}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    writer.write(f"HTTP/1.1 {reply.status} X\r\n{lines}\r\n".encode())
    for _ in range(reply.repeat):
        writer.write(body)
        await writer.drain()
