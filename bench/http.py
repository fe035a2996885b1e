"""A minimal HTTP/1.1 client. It is cheap, so that its own cost does not show in the figures."""

from __future__ import annotations

import asyncio
from typing import Self

import orjson

_START_SECONDS = 60.0
_OK = 200


class Connection(asyncio.Protocol):
    """One kept-alive connection. `send` sends bytes from `request`. asyncio's streams would cost too much."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._closed = asyncio.get_running_loop().create_future()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._head = b""
        self._received = b""

    @classmethod
    async def open(cls, port: int) -> Self:
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    def send(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """Send the request. The result: status and body of the answer."""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    async def send_for_head(self, request: bytes) -> tuple[int, bytes, bytes]:
        """Send the request. Returns status, body and head of the answer."""
        status, body = await self.send(request)
        return status, body, self._head

    async def close(self) -> None:
        self._transport.close()
        await self._closed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        _, _, length = head.lower().partition(b"\r\ncontent-length:")
        missing = int(length.partition(b"\r\n")[0] or 0) - len(body)
        if missing <= 0 and self._answer is not None:
            self._received = b""
            self._head = head
            self._answer.set_result((int(head.split(b" ", 2)[1]), body))

    def connection_lost(self, error: Exception | None) -> None:
        self._closed.set_result(None)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError("the server hung up"))


def request(method: str, path: str, *, key: str = "", body: object = None) -> bytes:
    content = b"" if body is None else orjson.dumps(body)
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(content)}"]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    if body is not None:
        lines.append("Content-Type: application/json")
    return "\r\n".join([*lines, "", ""]).encode() + content


async def until_ready(port: int) -> None:
    """Wait until /readyz of the API on `port` answers 200."""
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
