"""A server before the real API that fails as it is instructed, once each: so a client meets what a network does."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import httpx2

from leasehold.runtime.gather import cancel_and_wait

#: "lose": the API does the request, and its answer is lost. "break": the connection ends before the API has it.
#: "silent": the connection stays, the API does not get the request, and no answer comes. "hasty": a proxy drops the
#: parameter `wait`, so that the answer comes at once.
QUIET_SECONDS = 0.8
REFUSALS = {
    "503": (503, b'{"code":"database_unavailable","detail":"away"}', "0"),
    "429": (429, b'{"code":"rate_limited","detail":"too many"}', "1"),
    "in flight": (409, b'{"code":"idempotency_key_in_flight","detail":"wait"}', "0"),
    "forbidden": (403, b'{"code":"missing_scope","detail":"no"}', None),
    "refuse": (422, b"<html>a firewall</html>", None),
    "502": (502, b"<html>a proxy</html>", None),
    "moved": (307, b'{"runs":[]}', None),
    "page": (200, b"<html>a sign-in page</html>", None),
    "empty": (200, b"", None),
    "list": (200, b'["another server"]', None),
    "another object": (200, b'{"message":"another server"}', None),
    "refusing list": (400, b'["another server"]', None),
    "no errors": (422, b'{"code":"invalid_request","detail":"no","errors":null}', None),
}


class Front:
    def __init__(self, target: str) -> None:
        self._http = httpx2.AsyncClient(base_url=target, timeout=30)
        self.url = ""
        self.failures: list[str] = []
        self.seen: list[tuple[str, str, str | None]] = []  # method, path, idempotency key
        self.bodies: list[bytes] = []  # of the requests of `seen`
        self.sent_bytes = 0
        self._answering: set[asyncio.Task[None]] = set()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._answer(reader, writer))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, httpx2.TransportError, asyncio.CancelledError):
                await task
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if headers.get("transfer-encoding") == "chunked":
            body = await _chunked(reader)
        self.seen.append((method, path, headers.get("idempotency-key")))
        self.bodies.append(body)
        failure = self.failures.pop(0) if self.failures else None
        if failure == "break":
            return
        if failure == "silent":
            await reader.read()  # until the client closes the connection
            return
        if failure in REFUSALS:
            status, content, retry_after = REFUSALS[failure]
            more = "" if retry_after is None else f"Retry-After: {retry_after}\r\n"
            more += f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
            writer.write(f"HTTP/1.1 {status} x\r\n{more}".encode() + content)
            await writer.drain()
            return
        for name in ("host", "content-length", "transfer-encoding", "connection"):
            headers.pop(name, None)
        path_sent = re.sub(r"(?<=[?&])wait=[^&]*", "", path) if failure == "hasty" else path
        async with self._http.stream(method, path_sent, headers=headers, content=body) as answer:
            if failure == "lose":
                await answer.aread()
                return
            own = ("content-length", "connection", "transfer-encoding")
            lines = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items() if name not in own)
            writer.write(f"HTTP/1.1 {answer.status_code} x\r\n{lines}Connection: close\r\n\r\n".encode())
            if failure == "quiet":  # a stream without items, for longer than a client tries again
                await writer.drain()
                await asyncio.sleep(QUIET_SECONDS)
                writer.transport.abort()
                return
            async for piece in answer.aiter_raw():
                writer.write(piece)
                await writer.drain()
                if failure == "cut":  # in the middle of a stream
                    writer.transport.abort()
                    return

    async def close(self) -> None:
        await cancel_and_wait(*self._answering)  # else one would go on in a later test, with a client that is closed
        await self._http.aclose()


async def _chunked(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    await reader.readline()
    return body


@asynccontextmanager
async def fronting(target: str) -> AsyncIterator[Front]:
    front = Front(target)
    server = await asyncio.start_server(front.answer, "127.0.0.1", 0)
    front.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield front
    finally:
        server.close()
        await front.close()
