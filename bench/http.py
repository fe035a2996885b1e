"""The leanest HTTP/1.1 client that does: a measuring client must not be what is measured."""

from __future__ import annotations

import asyncio
from typing import Self

import orjson

_START_SECONDS = 60.0
_OK = 200


class Connection:
    """One kept-alive connection; `send` repeats ready-made bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def send(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the answer."""
        self._writer.write(request)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        _, _, length = head.partition(b"\r\ncontent-length:")
        body = await self._reader.readexactly(int(length.partition(b"\r\n")[0])) if length else b""
        return int(head.split(b" ", 2)[1]), body

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


def request(method: str, path: str, *, key: str = "", body: object = None) -> bytes:
    content = b"" if body is None else orjson.dumps(body)
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(content)}"]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    if body is not None:
        lines.append("Content-Type: application/json")
    return "\r\n".join([*lines, "", ""]).encode() + content


async def until_ready(port: int) -> None:
    """Return when the API on `port` says that it can serve."""
    async with asyncio.timeout(_START_SECONDS):
        while True:
            try:
                connection = await Connection.open(port)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            status, _ = await connection.send(request("GET", "/readyz"))
            await connection.close()
            if status == _OK:
                return
            await asyncio.sleep(0.05)
