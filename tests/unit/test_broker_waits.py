"""Waiting on the broker: whose end it was, and that ours is never lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from leasehold.broker.amqp import connection, topology
from leasehold.broker.amqp.connection import Link, answered_within
from leasehold.broker.amqp.subscription import Subscription
from leasehold.broker.amqp.topology import Topology
from leasehold.broker.amqp.wire import Wire
from leasehold.broker.announcer import Announcer
from leasehold.broker.postgres import _Session
from leasehold.domain.errors import BrokerUnavailable
from leasehold.runtime.periodic import Periodic
from leasehold.settings import Settings


async def test_a_cancellation_that_came_with_the_brokers_answer_is_not_lost() -> None:
    waiting = asyncio.Event()

    async def client_that_swallows_it() -> None:
        waiting.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return

    async def work() -> None:
        async with answered_within(60):
            await client_that_swallows_it()
        raise AssertionError("went on although it was cancelled")

    task = asyncio.create_task(work())
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_connection_that_dies_under_us_is_not_our_end() -> None:
    async def work() -> str:
        try:
            async with answered_within(60):
                raise asyncio.CancelledError  # what the client raises in everybody who waits on a dying connection
        except BrokerUnavailable:
            return "goes on"

    assert await asyncio.create_task(work()) == "goes on"


async def test_while_we_are_being_cancelled_a_dying_connection_is_still_told_apart() -> None:
    told: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            try:
                async with answered_within(60):
                    raise asyncio.CancelledError
            except BrokerUnavailable:
                told.append("the farewell failed")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert told == ["the farewell failed"]


@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_cancellation_that_the_client_turned_into_an_error_is_not_lost(cancelled: bool) -> None:
    """The client does so when the connection breaks while it ends."""

    async def client_that_turns_it_into_an_error() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise ConnectionResetError from None

    async def work() -> None:
        async with answered_within(60 if cancelled else 0.01):
            await client_that_turns_it_into_an_error()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    if cancelled:
        task.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else TimeoutError):
        await task


async def test_an_error_of_the_client_stays_what_it_is() -> None:
    with pytest.raises(ConnectionResetError):
        async with answered_within(60):
            raise ConnectionResetError


class _Breaks:
    """What a loop waits for: it turns a cancellation into an error, as the client does on a connection that breaks."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()

    async def __call__(self, *_arguments: object) -> None:
        self.waits.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise ConnectionResetError from None

    async def declare(self, *_arguments: object) -> None:
        await self()

    def name_of(self, queue: str, _band: int) -> str:
        return queue


def _settings() -> Settings:
    return Settings(
        _env_file=None, database_url=SecretStr("postgresql://127.0.0.1/none"), amqp_url=SecretStr("amqp://127.0.0.1/")
    )


def _loop_of(name: str, breaks: _Breaks, monkeypatch: pytest.MonkeyPatch) -> Coroutine[Any, Any, None]:
    match name:
        case "link":
            link = Link(_settings(), "test", breaks)
            monkeypatch.setattr(link, "_connect_and_serve", breaks)
            return link._run()
        case "postgres":
            session = _Session(SecretStr(""), "test", breaks)
            monkeypatch.setattr(session, "_connect_and_serve", breaks)
            return session._run()
        case "subscription":
            open_connection: Any = SimpleNamespace(is_opened=True)
            topology: Any = breaks
            return Subscription(topology, "q", 0, 1).serve(open_connection, Wire(), lambda *_: None, lambda _: None)
        case "announcer":
            unused: Any = None
            announcer = Announcer(unused, unused)
            monkeypatch.setattr(announcer, "publish", breaks)
            announcer._has_waiting.set()
            return announcer._run()
    return Periodic("test", breaks, every=60).run()


@pytest.mark.parametrize("name", ["link", "postgres", "subscription", "announcer", "periodic"])
async def test_a_loop_that_goes_on_after_every_error_ends_when_it_is_cancelled(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks = _Breaks()
    task = asyncio.ensure_future(_loop_of(name, breaks, monkeypatch))
    await breaks.waits.wait()
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=60)
    assert done, "the loop goes on"
    assert task.cancelled()


async def test_a_declare_that_is_stuck_is_given_up_although_its_channel_does_not_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RabbitMQ answers a close after the declare, and may not answer a declare of a queue without a leader."""

    async def unanswered(*_arguments: object, **_more: object) -> None:
        await asyncio.Event().wait()

    async def channel(**_arguments: object) -> Any:
        return SimpleNamespace(queue_declare=unanswered, close=unanswered)

    stuck: Any = SimpleNamespace(channel=channel)
    monkeypatch.setattr(topology, "RPC_SECONDS", 0.01)
    monkeypatch.setattr(connection, "CLOSE_SECONDS", 0.01)
    declaring = asyncio.ensure_future(Topology("test", "quorum").declare(stuck, "q"))
    done, _ = await asyncio.wait({declaring}, timeout=60)
    declaring.cancel()
    assert done, "the declare waits for its channel"
    assert isinstance(declaring.exception(), TimeoutError)


async def test_a_link_closes_whenever_it_is_closed() -> None:
    """The client turns a cancellation that comes while a peer hangs up into an error of its own."""

    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        settings = _settings().model_copy(update={"amqp_url": SecretStr(f"amqp://127.0.0.1:{port}/")})
        for turns in range(40):
            link = Link(settings, "test", _Breaks())
            link.start()
            for _ in range(turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(60):
                await link.close()


async def test_waits_grow_although_each_attempt_takes_long_and_begin_anew_after_one_that_worked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A connection attempt to a node that is cut off takes all of its time."""
    now, waits = [0.0], []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(connection, "delay_after", lambda failures, _ladder: timedelta(seconds=failures))
    ladder = connection.Ladder()

    async def attempt(seconds: float, *, opens: bool) -> None:
        if opens:
            ladder.record_opened()
        now[0] += seconds
        await ladder.wait()

    for _ in range(3):
        await attempt(connection.CONNECT_SECONDS, opens=False)
    assert waits == [1, 2, 3]
    await attempt(connection.SETTLED_SECONDS - 1, opens=True)
    assert waits[3:] == [4]
    await attempt(connection.SETTLED_SECONDS + 1, opens=True)
    assert waits[4:] == [1]
    await attempt(connection.CONNECT_SECONDS, opens=False)
    assert waits[5:] == [2], "an earlier connection does not count"
