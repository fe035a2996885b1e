"""Which sessions and attempts end when a server answers that takes writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from leasehold.db import failover
from leasehold.db.failover import FailoverWatch, Host

OLD, NEW, OTHER = ("old", 1), ("new", 1), ("other", 1)


class Session:
    is_open = True

    def terminate(self) -> None:
        self.is_open = False


class Servers:
    """What each host answers: its timeline, or nothing that takes writes."""

    def __init__(self) -> None:
        self.timelines: dict[Host, int | None] = {OLD: 1, NEW: None}
        self.asked = 0
        self.chosen: list[Host] = []

    async def timeline_of(self, host: Host) -> int | None:
        self.asked += host == NEW
        if host not in self.timelines:
            await asyncio.sleep(3600)
        return self.timelines[host]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0.001)

    async def until_asked_again(self) -> None:
        """Two rounds more: the answers of the first have had their effect."""
        asked = self.asked
        await self.until(lambda: self.asked >= asked + 2)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Servers:
    for name in ("_PATIENCE_SECONDS", "_ROUND_SECONDS", "_PAUSE_SECONDS"):
        monkeypatch.setattr(failover, name, 0.005)
    return Servers()


@pytest.fixture
async def watch(servers: Servers) -> AsyncIterator[FailoverWatch]:
    watch = FailoverWatch(asyncio.get_running_loop(), (OLD, NEW, OTHER), servers.timeline_of, servers.chosen.append)
    yield watch
    watch._waiting.clear()
    await servers.until(lambda: watch._timer is None and watch._asking is None)


def added(watch: FailoverWatch, host: Host, timeline: int | None, *, waits: bool = False) -> Session:
    session = Session()
    watch.add(session, host, timeline)
    if waits:
        watch.begin(session)
    return session


async def test_once_one_waits_all_sessions_with_the_replaced_server_end(servers: Servers, watch: FailoverWatch) -> None:
    waits, silent = added(watch, OLD, 1, waits=True), added(watch, OLD, 1)
    new = added(watch, NEW, 2)
    await servers.until_asked_again()
    assert waits.is_open
    assert silent.is_open
    servers.timelines[NEW] = 2
    del servers.timelines[OLD]  # it is silent
    await servers.until(lambda: bool(servers.chosen))
    assert (waits.is_open, silent.is_open, new.is_open) == (False, False, True)
    assert servers.chosen == [NEW]


async def connects_to(watch: FailoverWatch, host: Host) -> None:
    async with asyncio.timeout(None) as limit:
        with watch.opening(host, limit):
            await asyncio.sleep(3600)


async def test_a_server_with_an_older_timeline_replaces_nobody(servers: Servers, watch: FailoverWatch) -> None:
    """An old primary may serve on. A process that knows the new one does not go back while that one is slow."""
    new, old = added(watch, NEW, 2, waits=True), added(watch, OLD, 1)
    opening = asyncio.create_task(connects_to(watch, NEW))
    servers.timelines[NEW] = None
    await servers.until_asked_again()
    assert (new.is_open, old.is_open, opening.done(), servers.chosen) == (True, True, False, [])
    opening.cancel()


async def test_two_addresses_of_one_server_end_no_session(servers: Servers, watch: FailoverWatch) -> None:
    servers.timelines[NEW] = 1
    session = added(watch, OLD, 1, waits=True)
    await servers.until_asked_again()
    assert (session.is_open, servers.chosen) == (True, [])


async def test_a_session_that_began_on_a_standby_ends_unless_this_standby_was_promoted(
    servers: Servers, watch: FailoverWatch
) -> None:
    """It may be idle, and be used first when its server has been promoted and replaced."""
    added(watch, OLD, 1, waits=True)
    elsewhere, new = added(watch, OTHER, None), added(watch, NEW, None)
    await servers.until_asked_again()
    assert elsewhere.is_open
    servers.timelines[NEW] = 2
    await servers.until(lambda: bool(servers.chosen))
    assert (elsewhere.is_open, new.is_open) == (False, True)


async def test_attempts_to_connect_to_other_hosts_are_given_up(servers: Servers, watch: FailoverWatch) -> None:
    added(watch, OLD, 1)
    to_old = asyncio.create_task(connects_to(watch, OLD))
    await servers.until_asked_again()
    assert not to_old.done()
    servers.timelines[NEW] = 2
    with pytest.raises(TimeoutError):
        await to_old
    to_new = asyncio.create_task(connects_to(watch, NEW))
    await servers.until_asked_again()
    assert not to_new.done()
    to_new.cancel()


async def test_nobody_is_asked_while_nothing_waits_or_no_server_tells_its_timeline(
    servers: Servers, watch: FailoverWatch
) -> None:
    session = added(watch, OLD, None, waits=True)
    await asyncio.sleep(0.05)
    assert servers.asked == 0
    watch.end(session)
    added(watch, OLD, 1)
    await asyncio.sleep(0.05)
    assert servers.asked == 0
    with watch.opening(OLD, asyncio.timeout(None)):
        await servers.until_asked_again()


async def test_an_attempt_that_is_slow_to_end_is_given_up_once_and_the_watch_goes_on(
    servers: Servers, watch: FailoverWatch
) -> None:
    """As where two names in the URL lead to the new primary: both answer before the attempt has ended."""
    may_end = asyncio.Event()

    async def connects_slowly() -> None:
        async with asyncio.timeout(None) as limit:
            with watch.opening(OLD, limit):
                try:
                    await asyncio.sleep(3600)
                finally:
                    await may_end.wait()

    added(watch, OLD, 1)
    to_old = asyncio.create_task(connects_slowly())
    servers.timelines |= {NEW: 2, OTHER: 2}
    await servers.until(lambda: bool(servers.chosen))
    chosen = list(servers.chosen)
    await servers.until_asked_again()
    assert (servers.chosen, to_old.done()) == (chosen, False)
    may_end.set()
    with pytest.raises(TimeoutError):
        await to_old


async def test_an_unforeseen_error_at_a_host_does_not_end_the_watch(servers: Servers, watch: FailoverWatch) -> None:
    failed = asyncio.Event()

    async def fails(_host: Host) -> int | None:
        failed.set()
        raise RuntimeError("unforeseen")

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # asyncio logs the error
    watch._timeline_of = fails
    waits = added(watch, OLD, 1, waits=True)
    await failed.wait()
    watch._timeline_of = servers.timeline_of
    servers.timelines[NEW] = 2
    await servers.until(lambda: not waits.is_open)
