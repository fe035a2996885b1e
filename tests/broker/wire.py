"""A cable between a client and a broker or PostgreSQL that a test can cut or freeze, or that loses confirms."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from leasehold.broker.amqp.wire import METHOD, Sieve

_ACK = b"\x00\x3c\x00\x50"
#: The channels of a connection have the numbers from 1 on; a connection of these tests has fewer than this.
_CHANNELS = 100


class Wire:
    """Forwards TCP; `cut` resets what is connected, `freeze` swallows nothing but delivers nothing either. While
    `loses_confirms`, the broker's confirms are left out, and everything else arrives.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "", parts.port or 5672)
        self._url = url
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._port = 0
        self.accepted = 0
        self.loses_confirms = False

    @property
    def url(self) -> str:
        """The server's URL by way of this wire."""
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        parts = urlsplit(self._url)
        credentials = parts.netloc.rpartition("@")[0]
        return parts._replace(netloc=f"{credentials}@127.0.0.1:{port}").geturl()

    async def open(self) -> None:
        """Listen. A wire that was closed listens on the same port again."""
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self._flowing.set()
        self.cut()
        await self._server.wait_closed()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def freeze(self) -> None:
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()
            return
        ends = {writer, far_writer}
        self._writers |= ends
        # Only AMQP has frames of which some can be left out.
        sift = self._sieve().sift if self._url.startswith("amqp") else bytes
        await asyncio.gather(self._pump(reader, far_writer, bytes), self._pump(far_reader, writer, sift))
        self._writers -= ends

    def _sieve(self) -> Sieve:
        sieve = Sieve()
        for channel in range(1, _CHANNELS):
            sieve.attach(channel, self._is_lost)
        return sieve

    def _is_lost(self, kind: int, payload: bytes) -> bool:
        return self.loses_confirms and kind == METHOD and payload.startswith(_ACK)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sift: Callable[[bytes], bytes]
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await self._flowing.wait()
                writer.write(sift(data))
                await writer.drain()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
