"""A TCP proxy for one link of one process. Faults make the link slow, hold it, drop one direction, or reset it.

A held link accepts bytes and keeps them. When it is freed, it passes them all on. So a write arrives late, from a
process that others took for dead long ago.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, Protocol

_CHUNK = 64 * 1024
_POLL_SECONDS = 0.1
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: closing sends RST


class Tap(Protocol):
    """Listens to one connection. `label`: the part of the platform that connected; "" until it is known."""

    label: str

    def request(self, data: bytes) -> None:
        """Bytes that went to the server."""

    def reply(self, data: bytes) -> None:
        """Bytes that came back."""

    def closed(self) -> None:
        """One side has closed the connection, or it was cut."""


class SilentTap:
    """A tap that records nothing."""

    label = ""

    def request(self, data: bytes) -> None: ...

    def reply(self, data: bytes) -> None: ...

    def closed(self) -> None: ...


@dataclass
class Slowdown:
    """How much a link slows its bytes. Times are in seconds. `bytes_per_second`: 0 is no limit."""

    latency: float = 0.0
    jitter: float = 0.0
    bytes_per_second: float = 0.0

    def delay(self, size: int, rng: random.Random) -> float:
        waiting = self.latency + rng.uniform(-self.jitter, self.jitter)
        if self.bytes_per_second:
            waiting += size / self.bytes_per_second
        return max(0.0, waiting)


@dataclass
class Carried:
    """What a link did since it was made, in bytes. A fault counts only if one of these numbers has grown."""

    sent: int = 0  # to the server
    passed_back: int = 0  # to the client
    held: int = 0  # while the link was held; they are passed on later
    lost: int = 0
    slowed: int = 0
    refused: int = 0  # connections that the server did not accept
    reset: int = 0  # connections


class Link:
    """A proxy that listens on `port` and connects to `target`. Faults hold for open and for new connections."""

    def __init__(self, target: tuple[str, int], tap: Callable[[], Tap] = SilentTap, seed: int = 0) -> None:
        self.slowdown = Slowdown()
        self.carried = Carried()
        self.port = 0
        self._target = target
        self._tap = tap
        self._rng = random.Random(seed)  # noqa: S311 - jitter
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._held: Collection[str] | None = ()  # labels; None: all
        self._freed = asyncio.Event()
        self._drops: Literal["", "requests", "replies"] = ""
        self._cut_label = ""
        self._hold_at: Callable[[str, bytes], bool] | None = None
        self._held_next: Collection[str] = ()
        self._held_first: _Connection | None = None
        self._passes_first = False

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.reset()
        self._freed.set()
        await asyncio.gather(*(connection.ended.wait() for connection in self._connections))

    # --- faults

    def reset(self) -> int:
        """Send RST to both ends of every connection. Returns the number of connections."""
        victims = list(self._connections)
        for connection in victims:
            connection.reset()
        self.carried.reset += len(victims)
        return len(victims)

    def hold(self, labels: Collection[str] | None = None) -> None:
        """Pass nothing more in either direction. `labels`: only for connections whose tap has one of these labels;
        None: for all.
        """
        self._freed.clear()
        self._held = labels

    def hold_from(self, is_first: Callable[[str, bytes], bool], labels: Collection[str]) -> None:
        """Hold `labels` once `is_first` is true of a request, from this request on. `is_first` gets the connection's
        label and the request's bytes.
        """
        self._hold_at, self._held_next = is_first, labels

    @property
    def hold_pending(self) -> bool:
        return self._hold_at is not None

    def pass_first(self) -> None:
        """Pass the request that `hold_from` waited for, with its connection, and go on holding the others."""
        self._passes_first = True
        self._freed.set()

    def drop_replies(self) -> None:
        """Drop the answers, and pass the requests. `heal` ends this, and resets all connections because their streams
        have gaps.
        """
        self._drops = "replies"

    def drop_requests(self) -> None:
        """Drop the requests, and pass the answers. `heal` ends this as it ends `drop_replies`."""
        self._drops = "requests"

    def cut_next_request(self, label: str) -> None:
        """Pass the next bytes of a connection with `label` to the server, then cut the connection: the server does the
        request, and the client gets no answer.
        """
        self._cut_label = label

    @property
    def cut_pending(self) -> bool:
        return bool(self._cut_label)

    def heal(self) -> None:
        """End every fault of the link."""
        self.slowdown = Slowdown()
        self._held = ()
        self._cut_label = ""
        self._hold_at = None
        self._passes_first = False
        if self._drops:
            self._drops = ""
            self.reset()
        self._freed.set()

    # --- carrying

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_connection(*self._target)
        except OSError:
            self.carried.refused += 1
            _reset(writer)
            return
        connection = _Connection(self._tap(), (writer, to_writer))
        self._connections.add(connection)
        pumps = [
            asyncio.create_task(self._pump(connection, reader, to_writer, from_client=True)),
            asyncio.create_task(self._pump(connection, to_reader, writer, from_client=False)),
        ]
        connection.pumps = pumps
        await asyncio.gather(*pumps, return_exceptions=True)
        self._connections.discard(connection)
        connection.end()

    async def _pump(
        self, connection: _Connection, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, from_client: bool
    ) -> None:
        try:
            while data := await source.read(_CHUNK):
                if from_client and self._hold_at is not None and self._hold_at(connection.tap.label, data):
                    self._hold_at, self._held_first = None, connection
                    self.hold(self._held_next)
                await self._wait_while_held(connection, source, len(data))
                await self._pass_on(connection, data, sink, from_client=from_client)
        except ConnectionError:
            connection.reset()
        else:
            sink.close()
        finally:
            connection.report_closed()

    async def _wait_while_held(self, connection: _Connection, source: asyncio.StreamReader, size: int) -> None:
        """Wait while the link is held. If the sender closes its connection meanwhile, only the tap learns it."""
        if self._holds(connection):
            self.carried.held += size
        while self._holds(connection):
            if source.at_eof():
                connection.report_closed()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):
                    await self._freed.wait()
                self._freed.clear()

    def _holds(self, connection: _Connection) -> bool:
        if self._passes_first and connection is self._held_first:
            return False
        return self._held is None or connection.tap.label in self._held

    async def _pass_on(
        self, connection: _Connection, data: bytes, sink: asyncio.StreamWriter, *, from_client: bool
    ) -> None:
        if waiting := self.slowdown.delay(len(data), self._rng):
            self.carried.slowed += len(data)
            await asyncio.sleep(waiting)
        if self._drops == ("requests" if from_client else "replies"):
            self.carried.lost += len(data)
            return
        (connection.tap.request if from_client else connection.tap.reply)(data)
        sink.write(data)
        if from_client:
            self.carried.sent += len(data)
        else:
            self.carried.passed_back += len(data)
        await sink.drain()
        if from_client and self._cut_label and connection.tap.label == self._cut_label:
            self._cut_label = ""
            connection.reset(to_server=False)


class _Connection:
    def __init__(self, tap: Tap, writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        self.tap = tap
        self.pumps: list[asyncio.Task[None]] = []
        self.ended = asyncio.Event()
        self._writers = writers
        self._is_over = False

    def reset(self, *, to_server: bool = True) -> None:
        """Cut the connection. `to_server`: if False, only the client gets an RST, and the server can still do what its
        bytes say.
        """
        client, server = self._writers
        _reset(client)
        if to_server:
            _reset(server)
        else:
            server.close()
        for pump in self.pumps:
            if pump is not asyncio.current_task():
                pump.cancel()

    def report_closed(self) -> None:
        """One side has closed the connection. Bytes of the other side may be held here for a while."""
        if not self._is_over:
            self._is_over = True
            self.tap.closed()

    def end(self) -> None:
        for writer in self._writers:
            writer.close()
        self.report_closed()
        self.ended.set()


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # closed by the other side meanwhile
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
