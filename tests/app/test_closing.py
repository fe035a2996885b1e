"""A wait for a run ends when the app's connections are closed, and when the query for ends cannot be made."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast
from uuid import UUID

import asyncpg
import pytest

from leasehold import App
from leasehold.app import link as link_module
from leasehold.app.connection import Connections
from leasehold.app.endings import Endings
from leasehold.app.link import DatabaseLink
from leasehold.app.portal import Portal, PortalClosed
from leasehold.app.writing import Written
from leasehold.broker.announcer import Announcer
from leasehold.broker.base import Hint
from leasehold.broker.outbox import Announcement
from leasehold.domain.ids import new_id
from leasehold.settings import Settings
from leasehold.telemetry import attempt_logs
from tests.app.test_submitting import app, wait_long

SECONDS = 60.0


async def test_a_thread_and_a_coroutine_that_wait_for_a_run_end_when_the_app_is_closed(
    using: Callable[..., App], monkeypatch: pytest.MonkeyPatch
) -> None:
    using(app)
    run = await wait_long.asubmit()
    errors: list[BaseException] = []
    begun: list[UUID] = []
    wait_for_end = Endings.wait

    async def noted(endings: Endings, run_id: UUID, seconds: float | None) -> bool:
        begun.append(run_id)
        return await wait_for_end(endings, run_id, seconds)

    monkeypatch.setattr(Endings, "wait", noted)

    def wait() -> None:
        try:
            run.wait()
        except Exception as error:  # noqa: BLE001 - the test names its kind
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    waiting = asyncio.create_task(run.awaited())
    async with asyncio.timeout(60):
        while len(begun) < 2:
            await asyncio.sleep(0.01)
    await asyncio.to_thread(app.close)
    async with asyncio.timeout(SECONDS):
        with pytest.raises(PortalClosed, match="were closed"):
            await waiting
    await asyncio.to_thread(thread.join, SECONDS)
    assert [type(error) for error in errors] == [PortalClosed]
    assert await run.astatus() in ("pending", "queued")  # the next use opens the connections again


class FullBroker:
    """A broker that takes no hints until `go_on` is set: as RabbitMQ while it has too little memory or disk."""

    connected = True

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.published = 0

    async def publish(self, hints: list[Hint]) -> list[bool]:
        await self.go_on.wait()
        self.published += len(hints)
        return [False] * len(hints)


@asynccontextmanager
async def link_to(broker: FullBroker) -> AsyncIterator[DatabaseLink]:
    nothing: Any = None
    announcer = Announcer(cast("Any", broker), nothing)
    announcer.start()
    yield DatabaseLink(nothing, "acme", nothing, cast("Any", broker), announcer)
    await announcer.close()


def written() -> Written:
    return Written(hints=[Announcement(1, Hint(new_id(), "default", tenant="acme"))])


async def test_submissions_leave_no_task_behind_while_the_broker_takes_no_hints() -> None:
    async with link_to(FullBroker()) as link:
        before = len(asyncio.all_tasks())
        for _ in range(50):
            link.announce_soon(written())
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == before


async def test_a_close_waits_a_moment_until_the_broker_has_the_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_BROKER_SECONDS", SECONDS)
    broker = FullBroker()
    async with link_to(broker) as link:
        link.announce_soon(written())
        closing = asyncio.create_task(link._close())
        await asyncio.sleep(0.01)
        assert not closing.done()
        broker.go_on.set()
        await asyncio.wait_for(closing, SECONDS)
        assert broker.published == 1
        broker.go_on.clear()
        link.announce_soon(written())
        monkeypatch.setattr(link_module, "_BROKER_SECONDS", 0.01)
        await asyncio.wait_for(link._close(), SECONDS)  # the relay sends the hint


class Slow:
    """Stands for what closes slowly, or not at all: hints to send, a broker that is silent."""

    def __init__(self, connections: Connections, error: Exception | None = None) -> None:
        self.begun, self.release = threading.Event(), threading.Event()
        self._error = error

        async def register() -> None:
            assert connections._opened is not None
            connections._opened.stack.push_async_callback(self._close)

        connections.call(register())

    async def _close(self) -> None:
        self.begun.set()
        await asyncio.to_thread(self.release.wait, SECONDS)
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("held", ["by a close", "at the fork"])
def test_a_child_that_was_forked_during_a_close_opens_connections_of_its_own(held: str) -> None:
    connections = Connections("shop")
    slow = Slow(connections)
    thread = threading.Thread(target=connections.close)
    thread.start()
    assert slow.begun.wait(SECONDS)
    if held == "at the fork":
        connections._lock.acquire()
    child = os.fork()
    if child == 0:  # nothing here may reach pytest's own end
        signal.alarm(int(SECONDS))
        try:
            connections.call(asyncio.sleep(0))
            os._exit(0)
        finally:
            os._exit(1)
    if held == "at the fork":
        connections._lock.release()
    slow.release.set()
    thread.join(SECONDS)
    assert os.waitpid(child, 0)[1] == 0


def test_a_close_that_fails_leaves_no_thread() -> None:
    connections = Connections("that fails")
    slow = Slow(connections, OSError("gone"))
    slow.release.set()
    with pytest.raises(OSError, match="gone"):
        connections.close()
    assert "leasehold that fails" not in [thread.name for thread in threading.enumerate()]


def test_a_call_after_the_close_is_refused_and_not_left_to_wait() -> None:
    portal = Portal("tests")
    portal.close()

    async def work() -> None: ...

    with pytest.raises(PortalClosed):
        portal.call(work())


async def test_a_query_that_can_never_be_made_ends_the_waits() -> None:
    class Broken:
        def acquire(self) -> Any:
            raise LookupError("no such thing")

    endings: Any = Endings(Broken())  # type: ignore[arg-type]  # that is the test
    async with asyncio.timeout(SECONDS):
        with pytest.raises(LookupError, match="no such thing"):
            await endings.wait(new_id(), None)


async def test_a_close_whose_cancel_a_query_turns_into_an_error_ends_nevertheless() -> None:
    """PostgreSQL has just frozen: the connection cannot be given back, and asyncpg raises that instead."""
    queries: list[None] = []

    class Frozen:
        @asynccontextmanager
        async def acquire(self) -> AsyncIterator[Any]:
            queries.append(None)
            if len(queries) == 1:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    raise asyncpg.InterfaceError("closed") from None
            yield await asyncio.Event().wait()

    endings: Any = Endings(Frozen())  # type: ignore[arg-type]  # that is the test
    waiting = asyncio.create_task(endings.wait(new_id(), None))
    async with asyncio.timeout(SECONDS):
        while not queries:
            await asyncio.sleep(0.001)
        await endings.close()
    waiting.cancel()
    assert len(queries) == 1


async def test_a_submission_whose_cancel_a_statement_turns_into_an_error_ends_nevertheless(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[None] = []

    async def write(_link: DatabaseLink, _calls: Any) -> Any:
        tries.append(None)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise asyncpg.InterfaceError("closed") from None

    monkeypatch.setattr(DatabaseLink, "_write", write)
    nothing = cast("Any", None)
    submitting = asyncio.create_task(DatabaseLink(settings, "acme", nothing, nothing, nothing).submit([]))
    while not tries:
        await asyncio.sleep(0)
    submitting.cancel()
    await asyncio.wait([submitting], timeout=SECONDS)
    assert submitting.cancelled()
    assert len(tries) == 1


async def test_what_all_callers_share_logs_for_none_of_them(
    using: Callable[..., App], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first caller may be an attempt: its run would get the lines of later ones, maybe of other tenants."""
    using(app)
    sources: dict[str, object] = {}
    opened, watch = DatabaseLink.opened, Endings._watch

    @asynccontextmanager
    async def noting_opened(*arguments: Any) -> AsyncIterator[DatabaseLink]:
        sources["link"] = attempt_logs.source()
        async with opened(*arguments) as link:
            yield link

    async def noting_watch(endings: Endings) -> None:
        sources["endings"] = attempt_logs.source()
        await watch(endings)

    monkeypatch.setattr(DatabaseLink, "opened", noting_opened)
    monkeypatch.setattr(Endings, "_watch", noting_watch)
    attempt_logs.record_in(attempt_logs.Recorder(10, 10_000, threading.Lock()))
    try:
        run = await wait_long.asubmit()
        waiting = asyncio.create_task(run.awaited())
        async with asyncio.timeout(SECONDS):
            while "endings" not in sources:
                await asyncio.sleep(0.01)
        await asyncio.to_thread(app.close)
        with pytest.raises(PortalClosed):
            await waiting
    finally:
        attempt_logs.record_in(None)
    assert sources == {"link": None, "endings": None}
