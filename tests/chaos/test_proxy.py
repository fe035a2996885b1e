from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from chaos.proxy import Carried, Link, Slowdown
from tests.support.now import now


@dataclass
class Echo:
    """A server that remembers what it got and sends it back."""

    got: bytearray = field(default_factory=bytearray)
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1024):
                self.got += data
                self.heard.set()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            self.heard.set()
        finally:
            writer.close()


class Named:
    """A tap that takes the first line for its label."""

    def __init__(self) -> None:
        self.label = ""

    def request(self, data: bytes) -> None:
        self.label = self.label or data.decode().strip()

    def reply(self, data: bytes) -> None: ...

    def closed(self) -> None: ...


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    echo.port = server.sockets[0].getsockname()[1]
    yield echo
    server.close()


@pytest.fixture
async def link(echo: Echo) -> AsyncIterator[Link]:
    link = Link(("127.0.0.1", echo.port), Named)
    await link.open()
    yield link
    await link.close()


async def opened(link: Link, name: bytes = b"a") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    writer.write(name + b"\n")
    assert await reader.readexactly(len(name) + 1) == name + b"\n"
    return reader, writer


async def nothing_comes(reader: asyncio.StreamReader) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.2)


async def test_a_healthy_link_passes_everything_both_ways(link: Link) -> None:
    reader, writer = await opened(link)
    writer.write(b"x" * 300_000)
    assert await reader.readexactly(300_000) == b"x" * 300_000
    writer.close()


async def test_a_reset_reaches_both_ends_of_every_connection(link: Link) -> None:
    connections = [await opened(link) for _ in range(3)]
    assert link.reset() == 3
    for reader, writer in connections:
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()


async def test_what_a_stuck_link_kept_arrives_late(link: Link, echo: Echo) -> None:
    reader, writer = await opened(link)
    link.hold()
    writer.write(b"late")
    await nothing_comes(reader)
    assert b"late" not in echo.got
    link.heal()
    assert await reader.readexactly(4) == b"late"
    writer.close()


async def test_a_stuck_link_accepts_new_connections_and_answers_none(link: Link) -> None:
    link.hold()
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    writer.write(b"anybody?")
    await nothing_comes(reader)
    writer.close()


async def test_a_hold_can_be_for_connections_of_one_name(link: Link) -> None:
    held_reader, held_writer = await opened(link, b"held")
    free_reader, free_writer = await opened(link, b"free")
    link.hold(["held"])
    held_writer.write(b"1")
    free_writer.write(b"2")
    assert await free_reader.readexactly(1) == b"2"
    await nothing_comes(held_reader)
    held_writer.close()
    free_writer.close()


async def test_a_hold_can_begin_with_a_request_of_one_kind(link: Link, echo: Echo) -> None:
    reader, writer = await opened(link, b"held")
    link.hold_from(lambda label, request: label == "held" and request == b"second", ["held"])
    writer.write(b"first")
    assert await reader.readexactly(5) == b"first"
    assert now(link.hold_pending)
    writer.write(b"second")
    await nothing_comes(reader)
    assert not link.hold_pending
    assert b"second" not in echo.got
    link.heal()
    assert await reader.readexactly(6) == b"second"
    writer.close()


async def test_the_request_that_began_a_hold_can_be_passed_before_the_others(link: Link, echo: Echo) -> None:
    (reader, writer), (later_reader, later_writer) = await opened(link, b"held"), await opened(link, b"held")
    link.hold_from(lambda _, request: request == b"first", ["held"])
    writer.write(b"first")
    while link.hold_pending:
        await asyncio.sleep(0.01)
    later_writer.write(b"later")
    await nothing_comes(reader)
    link.pass_first()
    assert await reader.readexactly(5) == b"first"
    await nothing_comes(later_reader)
    link.heal()
    assert await later_reader.readexactly(5) == b"later"
    for one in (writer, later_writer):
        one.close()


async def test_a_one_way_link_delivers_requests_and_loses_the_answers(link: Link, echo: Echo) -> None:
    reader, writer = await opened(link)
    link.drop_replies()
    echo.heard.clear()
    writer.write(b"heard")
    await asyncio.wait_for(echo.heard.wait(), 60)
    await nothing_comes(reader)
    link.heal()  # no stream goes on after a hole
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()


async def test_a_mirrored_link_delivers_what_the_server_says_and_loses_what_it_is_told() -> None:
    asked = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"told")
        while data := await reader.read(100):
            asked.extend(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    link = Link(("127.0.0.1", server.sockets[0].getsockname()[1]))
    await link.open()
    link.drop_requests()
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    writer.write(b"never heard")
    assert await reader.readexactly(4) == b"told"
    await nothing_comes(reader)
    assert not asked
    assert link.carried.lost == 11
    link.heal()  # no stream goes on after a hole
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()
    await link.close()
    server.close()


async def test_a_link_counts_what_it_did_and_not_that_it_was_switched(link: Link) -> None:
    link.hold()
    link.heal()
    link.drop_replies()
    link.heal()
    link.slowdown = Slowdown(latency=0.01)
    link.heal()
    link.reset()
    assert link.carried == Carried()
    reader, writer = await opened(link)
    assert (link.carried.sent, link.carried.passed_back) == (2, 2)
    link.slowdown = Slowdown(latency=0.01)
    writer.write(b"slow")
    assert await reader.readexactly(4) == b"slow"
    assert link.carried.slowed == 8
    link.slowdown = Slowdown()
    link.hold()
    writer.write(b"held")
    await nothing_comes(reader)
    assert link.carried.held == 4
    link.heal()
    assert await reader.readexactly(4) == b"held"
    link.drop_replies()
    writer.write(b"lost")
    while link.carried.lost < 4:
        await asyncio.sleep(0.01)
    await nothing_comes(reader)
    assert link.carried.lost == 4
    link.reset()
    assert link.carried == Carried(sent=14, passed_back=10, held=4, lost=4, slowed=8, reset=1)
    writer.close()


async def test_a_connection_that_the_server_does_not_take_is_counted() -> None:
    with socket.socket() as nobody:  # else another program may listen there
        nobody.bind(("127.0.0.1", 0))
        link = Link(nobody.getsockname())
        await link.open()
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        with pytest.raises(ConnectionResetError):
            await reader.read()
    assert link.carried.refused == 1
    writer.close()
    await link.close()


async def test_a_request_can_arrive_whose_answer_nobody_hears(link: Link, echo: Echo) -> None:
    reader, writer = await opened(link, b"commit")
    other_reader, other_writer = await opened(link, b"other")
    link.cut_next_request("commit")
    other_writer.write(b"1")
    assert await other_reader.readexactly(1) == b"1"
    was_pending = link.cut_pending
    echo.heard.clear()
    writer.write(b"COMMIT")
    with pytest.raises(ConnectionResetError):
        await reader.read()
    await asyncio.wait_for(echo.heard.wait(), 60)
    assert echo.got.endswith(b"COMMIT")
    assert (was_pending, link.cut_pending) == (True, False)
    writer.close()
    other_writer.close()


@pytest.mark.parametrize(
    ("slowdown", "size", "least", "most"),
    [(Slowdown(), 10**6, 0, 0), (Slowdown(0.5, 0.2), 1, 0.3, 0.7), (Slowdown(bytes_per_second=1000), 500, 0.5, 0.5)],
)
def test_a_slowdown_delays_by_latency_and_by_size(slowdown: Slowdown, size: int, least: float, most: float) -> None:
    import random  # noqa: PLC0415 - only here

    delays = [slowdown.delay(size, random.Random(seed)) for seed in range(20)]
    assert least <= min(delays) <= max(delays) <= most


async def test_that_a_server_has_gone_is_known_though_its_last_words_are_held() -> None:
    told, gone = asyncio.Event(), asyncio.Event()

    class Listening(Named):
        def closed(self) -> None:
            gone.set()

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await told.wait()
        writer.write(b"last words")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    link = Link(("127.0.0.1", server.sockets[0].getsockname()[1]), Listening)
    await link.open()
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    link.hold()
    told.set()
    await asyncio.wait_for(gone.wait(), 60)
    await nothing_comes(reader)
    link.heal()
    assert await reader.readexactly(10) == b"last words"
    writer.close()
    await link.close()
    server.close()
