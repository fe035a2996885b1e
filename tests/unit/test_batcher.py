"""Group commit: who asks while a round trip runs shares the next one, and nobody pays for another's mistake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from leasehold.db import batcher as batcher_module
from leasehold.db.batcher import Batcher
from leasehold.domain.errors import BadSetting
from leasehold.runtime.transient import may_try_again
from leasehold.telemetry.outages import Outage


class Wire:
    """Stands for a connection: the batcher asks whether it lives, and terminates it. `waited`: somebody has waited for
    the server while the connection was closed.
    """

    closed = False
    waited = False

    def __init__(self, in_hot_standby: str = "off") -> None:
        self.in_hot_standby = in_hot_standby

    def get_settings(self) -> Any:
        return self

    def is_closed(self) -> bool:
        return self.closed

    def terminate(self) -> None:
        self.closed = True

    async def close(self) -> None:
        self.closed = self.waited = True


@asynccontextmanager
async def batcher(
    statement: Any, wires: Sequence[Wire] = (), *, pause: float = 0.001, **options: Any
) -> AsyncIterator[Batcher[int, int]]:
    """`wires`: the first connections."""
    first = iter(wires)

    async def connect() -> Any:
        return next(first, None) or Wire()

    opened: Batcher[int, int] = Batcher(connect, statement, pause=pause, **options)
    opened.start()
    yield opened
    await opened.close()


def pauses_of_timers(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each timer of the event loop that is set from now on."""
    loop = asyncio.get_running_loop()
    call_later = loop.call_later
    pauses: list[float] = []

    def record(delay: float, *arguments: Any) -> asyncio.TimerHandle:
        pauses.append(delay)
        return call_later(delay, *arguments)

    monkeypatch.setattr(loop, "call_later", record)
    return pauses


async def test_a_standby_is_never_asked_although_it_answers() -> None:
    """It may lack the newest rows. A workflow that read its journal there took a valid lease for a lost one."""
    asked: list[Any] = []

    async def statement(connection: Any, items: Sequence[int], _repeated: bool) -> list[int]:
        asked.append(connection)
        return list(items)

    standby, primary = Wire("on"), Wire()
    async with batcher(statement, [standby, primary]) as opened:
        assert await opened.ask(1) == 1
        primary.in_hot_standby = "on"  # an address that leads to another server now
        assert await opened.ask(2) == 2
    assert (standby.closed, asked[0], standby in asked) == (True, primary, False)
    assert asked[1] is not primary


async def test_what_gathers_during_a_round_trip_goes_into_the_next_one() -> None:
    batches: list[list[int]] = []
    release = asyncio.Event()

    async def statement(_connection: Any, items: Sequence[int], _repeated: bool) -> list[int]:
        batches.append(list(items))
        await release.wait()
        return [item * 10 for item in items]

    async with batcher(statement) as opened:
        first = asyncio.create_task(opened.ask(1))
        while not batches:
            await asyncio.sleep(0)
        rest = [asyncio.create_task(opened.ask(n)) for n in (2, 3, 4)]
        await asyncio.sleep(0)
        release.set()
        assert await asyncio.gather(first, *rest) == [10, 20, 30, 40]
    assert batches == [[1], [2, 3, 4]]


async def test_a_statement_takes_no_more_than_its_share() -> None:
    sizes: list[int] = []

    async def statement(_connection: Any, items: Sequence[int], _repeated: bool) -> list[int]:
        sizes.append(len(items))
        return list(items)

    async with batcher(statement, at_most=4) as opened:
        assert await asyncio.gather(*(opened.ask(n) for n in range(10))) == list(range(10))
    assert sizes == [4, 4, 2]


class NotEncodable(asyncpg.InterfaceError, ValueError):
    """As asyncpg raises it for a value that it cannot encode. Other errors of this family come from a lost
    connection.
    """


@pytest.mark.parametrize("asked", [(11, 12, 13, 14), (12, 13)])
@pytest.mark.parametrize("error", [ValueError("13 cannot be stored"), NotEncodable("13 cannot be encoded")])
async def test_one_bad_item_costs_the_others_nothing(asked: Sequence[int], error: Exception) -> None:
    """They do not wait until `patience` ends, because the same statement would fail again."""
    tried: list[tuple[list[int], bool]] = []

    async def statement(_connection: Any, items: Sequence[int], repeated: bool) -> list[int]:
        tried.append((list(items), repeated))
        if 13 in items:
            raise error
        return list(items)

    async with batcher(statement, patience=1.0) as opened:
        answers = await asyncio.gather(*(opened.ask(n) for n in asked), return_exceptions=True)
    assert answers == [error if n == 13 else n for n in asked]
    # What stands before the bad item in the statement may have committed.
    assert tried == [(list(asked), False), *(([n], True) for n in asked)]


async def test_an_item_of_a_refused_batch_may_take_long_where_nothing_is_set_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A limit would only make its caller wait: each further try would have the same limit."""
    monkeypatch.setattr(batcher_module, "_ALONE_SECONDS", 0.001)
    tried: list[list[int]] = []

    async def statement(_connection: Any, items: Sequence[int], _repeated: bool) -> list[int]:
        tried.append(list(items))
        if len(items) > 1:
            raise ValueError("one of these cannot be stored")
        await asyncio.sleep(0.02)
        return list(items)

    async with batcher(statement, patience=0.0) as opened:
        assert await asyncio.gather(*(opened.ask(n) for n in (1, 2))) == [1, 2]
    assert tried == [[1, 2], [1], [2]]


async def test_an_item_that_a_statement_forgets_costs_its_asker_an_error_and_no_endless_wait() -> None:
    async def statement(_connection: Any, items: Sequence[int], _repeated: bool) -> Sequence[int]:
        return items[:-1]

    async with batcher(statement) as opened:
        asked = [asyncio.create_task(opened.ask(n)) for n in (1, 2)]
        await asyncio.wait(asked, timeout=10)
        assert [ask.done() for ask in asked] == [True, True]
        assert asked[0].result() == 1
        assert isinstance(asked[1].exception(), ValueError)


@pytest.mark.parametrize(
    "error", [TimeoutError(), asyncpg.QueryCanceledError("cancelled"), asyncpg.LockNotAvailableError("locked")]
)
async def test_an_item_that_takes_too_long_is_tried_again_alone_and_the_others_do_not_wait_for_it(
    error: Exception,
) -> None:
    """Somebody has locked its row, for any time."""
    tried: list[tuple[list[int], bool]] = []
    is_locked = True

    async def statement(_connection: Any, items: Sequence[int], repeated: bool) -> list[int]:
        tried.append((list(items), repeated))
        if 13 in items and is_locked:
            raise error
        return list(items)

    async with batcher(statement, sets_aside=True, patience=float("inf")) as opened:
        locked = asyncio.create_task(opened.ask(13))
        assert await asyncio.gather(*(opened.ask(n) for n in (11, 12))) == [11, 12]
        while tried.count(([13], True)) < 3:
            assert await opened.ask(14) == 14
        assert not locked.done()
        is_locked = False
        assert await locked == 13
    assert tried[:4] == [([13, 11, 12], False), ([13], True), ([11], True), ([12], True)]
    assert all(items == [13] for items, _ in tried[1:] if 13 in items)


async def test_many_items_that_take_too_long_do_not_delay_a_newer_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has locked the rows of a whole tenant. A try of one of them ends early, although nothing answers it."""
    monkeypatch.setattr(batcher_module, "_ALONE_SECONDS", 0.001)
    tried: list[list[int]] = []

    async def statement(_connection: Any, items: Sequence[int], _repeated: bool) -> list[int]:
        tried.append(list(items))
        if len(items) > 1:
            raise TimeoutError
        if items[0] <= 5:
            await asyncio.Event().wait()
        return list(items)

    async with batcher(statement, sets_aside=True, patience=float("inf")) as opened:
        locked = [asyncio.create_task(opened.ask(n)) for n in range(1, 6)]
        while not tried:
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            assert await opened.ask(6) == 6
            assert tried[:3] == [[1, 2, 3, 4, 5], [1], [6]]
            while len(opened._aside) < 5:
                assert await opened.ask(7) == 7
        assert not any(asked.done() for asked in locked)


async def test_an_item_that_was_beside_one_that_takes_too_long_waits_for_one_newer_batch_at_most() -> None:
    """Newer batches may take too long, too."""
    tried: list[list[int]] = []
    newer: list[asyncio.Task[int]] = []

    async def statement(_connection: Any, items: Sequence[int], _repeated: bool) -> list[int]:
        tried.append(list(items))
        newer.append(asyncio.create_task(opened.ask(20 + len(newer))))
        await asyncio.sleep(0)
        if 13 in items:
            raise TimeoutError
        return list(items)

    async with batcher(statement, sets_aside=True, patience=float("inf")) as opened:
        locked = asyncio.create_task(opened.ask(13))
        assert await asyncio.gather(*(opened.ask(n) for n in (11, 12))) == [11, 12]
        assert not locked.done()
    assert tried[:5] == [[13, 11, 12], [13], [20, 21], [11], [12]]


async def test_what_waited_for_one_lock_is_answered_as_soon_as_one_of_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause for each of a hundred would cost them their leases."""
    tried: list[int] = []
    is_locked = True

    async def statement(_connection: Any, items: Sequence[int], _repeated: bool) -> list[int]:
        tried.extend(items)
        if is_locked:
            raise TimeoutError
        return list(items)

    async with batcher(statement, sets_aside=True, patience=float("inf")) as opened:
        asked = [asyncio.create_task(opened.ask(n)) for n in range(5)]
        while len(opened._aside) < 5:
            await asyncio.sleep(0)
        is_locked = False
        tried.clear()
        monkeypatch.setattr(batcher_module, "DATABASE", Outage("database"))  # no outage lasts: it sets no timer
        pauses = pauses_of_timers(monkeypatch)
        async with asyncio.timeout(60):
            assert await asyncio.gather(*asked) == list(range(5))
        monkeypatch.undo()
    assert sorted(tried) == list(range(5))
    assert pauses == [0.0] * 4  # the timer of the first item ran already, and no item follows the last one


async def test_items_that_are_set_aside_leave_most_of_the_time_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are: after one of them has taken too long again, all of them pause."""
    seconds = 0.0
    tried: list[list[int]] = []

    async def statement(_connection: Any, items: Sequence[int], _repeated: bool) -> list[int]:
        nonlocal seconds
        tried.append(list(items))
        if 7 in items:
            return list(items)
        seconds += 100.0
        raise TimeoutError

    monkeypatch.setattr(batcher_module, "monotonic", lambda: seconds)
    async with batcher(statement, sets_aside=True, patience=float("inf")) as opened:
        pauses = pauses_of_timers(monkeypatch)
        locked = [asyncio.create_task(opened.ask(n)) for n in (1, 2)]
        while len(opened._aside) < 2:
            await asyncio.sleep(0)
        for _ in range(3):
            assert await opened.ask(7) == 7
        assert not any(asked.done() for asked in locked)
    assert [pause for pause in pauses if pause > 1.0] == [200.0]
    assert tried == [[1, 2], [1], [2], [7], [7], [7]]


async def test_an_item_that_is_new_among_those_set_aside_pauses_by_its_own_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock may have gone already, while that of an old item stays for minutes."""
    seconds = pause = 0.0
    tries: list[tuple[int, float]] = []  # each item, and the pause before its try
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    async def statement(_connection: Any, items: Sequence[int], _repeated: bool) -> list[int]:
        nonlocal seconds
        tries.append((items[0], pause))
        seconds += {1: 100.0, 2: 1.0}[items[0]]
        raise TimeoutError

    def at_once(delay: float, *arguments: Any) -> asyncio.TimerHandle:
        nonlocal pause
        pause = delay
        return call_later(0.0, *arguments)

    monkeypatch.setattr(batcher_module, "monotonic", lambda: seconds)
    async with batcher(statement, sets_aside=True, patience=float("inf")) as opened:
        monkeypatch.setattr(loop, "call_later", at_once)
        asking = [asyncio.create_task(opened.ask(n)) for n in (1, 2)]
        while len(tries) < 12:
            await asyncio.sleep(0)
        monkeypatch.undo()
        assert not any(asked.done() for asked in asking)
    assert set(tries[-6:]) == {(1, 200.0), (2, 2.0)}


async def test_an_item_that_is_only_slow_is_answered_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets more time with each try."""
    monkeypatch.setattr(batcher_module, "_ALONE_SECONDS", 0.001)

    async def statement(_connection: Any, items: Sequence[int], _repeated: bool) -> list[int]:
        if len(items) > 1:
            raise TimeoutError
        if items == [1]:
            await asyncio.sleep(0.02)
        return list(items)

    async with batcher(statement, sets_aside=True, patience=float("inf")) as opened:
        async with asyncio.timeout(60):
            assert await asyncio.gather(*(opened.ask(n) for n in (1, 2, 3))) == [1, 2, 3]


async def test_a_slow_database_has_time_for_an_item_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as long as it took for its last answer. Else each item that shared a batch with a locked one would be set
    aside, too.
    """
    seconds = 0.0
    limits: list[float | None] = []
    timeout = asyncio.timeout

    def record(limit: float | None) -> asyncio.Timeout:
        limits.append(limit)
        return timeout(limit)

    async def statement(_connection: Any, items: Sequence[int], _repeated: bool) -> list[int]:
        nonlocal seconds
        if len(items) > 1:
            raise TimeoutError
        seconds += 2.0
        return list(items)

    monkeypatch.setattr(batcher_module, "monotonic", lambda: seconds)
    monkeypatch.setattr(asyncio, "timeout", record)
    monkeypatch.setattr(batcher_module, "end_timed_out", lambda connection: connection.close())
    async with batcher(statement, sets_aside=True, patience=float("inf")) as opened:
        assert await opened.ask(1) == 1
        assert await asyncio.gather(*(opened.ask(n) for n in (2, 3))) == [2, 3]
    assert limits == [None, None, 4.0, 4.0]


async def test_an_end_leaves_no_asker_waiting_whose_item_is_set_aside() -> None:
    async def statement(_connection: Any, items: Sequence[int], _repeated: bool) -> Sequence[int]:
        if 13 in items:
            raise TimeoutError
        return items

    async with batcher(statement, sets_aside=True) as opened:
        asked = asyncio.create_task(opened.ask(13))
        while not opened._aside:
            await asyncio.sleep(0)
    await asyncio.wait([asked], timeout=60)
    assert asked.cancelled()
    assert opened._timer is None or opened._timer.cancelled()


async def test_a_connection_that_takes_too_long_sets_nothing_aside() -> None:
    """PostgreSQL is away: all items wait for it together."""
    refusals: list[Exception] = [TimeoutError()] * 3
    batches: list[list[int]] = []

    async def connect() -> Any:
        if refusals:
            raise refusals.pop()
        return Wire()

    async def statement(_connection: Any, items: Sequence[int], _repeated: bool) -> Sequence[int]:
        batches.append(list(items))
        return items

    opened: Batcher[int, int] = Batcher(connect, statement, pause=0.001, sets_aside=True)
    opened.start()
    assert await asyncio.gather(*(opened.ask(n) for n in (1, 2))) == [1, 2]
    await opened.close()
    assert batches == [[1, 2]]


@pytest.mark.parametrize("sets_aside", [False, True])
async def test_a_lost_connection_is_made_anew_and_the_statement_told_that_it_repeats(sets_aside: bool) -> None:
    """No item is at fault, so the batch stays together. The batcher does not wait for the lost server, which may be
    silent.
    """
    told: list[tuple[list[int], bool]] = []
    wires = [Wire(), Wire()]

    async def statement(_connection: Any, items: Sequence[int], repeated: bool) -> list[int]:
        told.append((list(items), repeated))
        if len(told) < 3:
            raise ConnectionError
        return list(items)

    async with batcher(statement, wires, sets_aside=sets_aside) as opened:
        assert await asyncio.gather(*(opened.ask(n) for n in (7, 8))) == [7, 8]
    assert told == [([7, 8], False), ([7, 8], True), ([7, 8], True)]
    assert [(wire.closed, wire.waited) for wire in wires] == [(True, False)] * 2


async def test_a_server_that_is_away_is_not_asked_without_a_pause() -> None:
    tries = 0

    async def statement(_connection: Any, _items: Sequence[int], _repeated: bool) -> list[int]:
        nonlocal tries
        tries += 1
        raise ConnectionError

    async with batcher(statement, pause=0.05, patience=0.12) as opened:
        with pytest.raises(ConnectionError):
            await opened.ask(1)
    assert tries <= 3


@pytest.mark.parametrize("refusal", [asyncpg.InvalidPasswordError("wrong password"), ConnectionRefusedError()])
async def test_the_log_and_the_asker_learn_why_no_connection_can_be_opened(
    refusal: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batcher_module, "DATABASE", Outage("database"))

    async def connect() -> Any:
        raise refusal

    async def statement(_connection: Any, items: Sequence[int], _repeated: bool) -> Sequence[int]:
        return items

    opened: Batcher[int, int] = Batcher(connect, statement, pause=0.001, patience=0.0)
    opened.start()
    with capture_logs() as lines:
        (answer,) = await asyncio.gather(opened.ask(1), return_exceptions=True)
    await opened.close()
    assert [line["error"] for line in lines] == [type(refusal).__name__]
    assert isinstance(answer, Exception)
    # The asker gets an error after which it may try again, so a wrong password is only the cause.
    assert refusal is (answer if may_try_again(refusal) else answer.__cause__)


@pytest.mark.parametrize(
    "refusal", [asyncpg.InvalidPasswordError("wrong password"), BadSetting("LEASEHOLD_DATABASE_URL", "is no URL")]
)
async def test_no_item_fails_because_a_password_is_being_changed(refusal: Exception) -> None:
    """A worker has done its work: it keeps the result, as while PostgreSQL is away."""
    refusals = [refusal] * 3

    async def connect() -> Any:
        if refusals:
            raise refusals.pop()
        return Wire()

    async def statement(_connection: Any, items: Sequence[int], _repeated: bool) -> Sequence[int]:
        return items

    opened: Batcher[int, int] = Batcher(connect, statement, pause=0.001)
    opened.start()
    assert await asyncio.gather(*(opened.ask(n) for n in (1, 2))) == [1, 2]
    await opened.close()
    refusals += [refusal] * 3
    hasty: Batcher[int, int] = Batcher(connect, statement, pause=0.001, patience=0.0)
    hasty.start()
    answers = await asyncio.gather(*(hasty.ask(n) for n in (1, 2)), return_exceptions=True)
    await hasty.close()
    assert [may_try_again(answer) for answer in answers if isinstance(answer, BaseException)] == [True, True]
    assert len(refusals) == 2  # one try for the whole batch


async def test_a_batcher_that_sets_nothing_aside_tries_a_batch_that_takes_too_long_again_as_a_whole() -> None:
    """It was not told that its items do not depend on each other."""
    batches: list[list[int]] = []

    async def statement(_connection: Any, items: Sequence[int], _repeated: bool) -> Sequence[int]:
        batches.append(list(items))
        if len(batches) < 3:
            raise TimeoutError
        return items

    async with batcher(statement) as opened:
        assert await asyncio.gather(*(opened.ask(n) for n in (1, 2))) == [1, 2]
    assert batches == [[1, 2]] * 3


async def test_an_end_closes_the_connection() -> None:
    async def statement(_connection: Any, items: Sequence[int], _repeated: bool) -> Sequence[int]:
        return items

    wire = Wire()
    async with batcher(statement, [wire]) as opened:
        await opened.ask(1)
        assert not wire.closed
    assert wire.closed


async def test_an_asker_gets_the_error_when_patience_ends() -> None:
    async def statement(_connection: Any, _items: Sequence[int], _repeated: bool) -> list[int]:
        raise ConnectionError

    async with batcher(statement, patience=0.0) as opened:
        with pytest.raises(ConnectionError):
            await opened.ask(1)
        with pytest.raises(ConnectionError):
            await opened.ask(2)  # and the batcher goes on


async def test_a_connection_that_the_server_closed_while_nobody_asked_is_replaced_and_costs_no_error() -> None:
    used: list[Any] = []

    async def statement(connection: Any, items: Sequence[int], _repeated: bool) -> list[int]:
        used.append(connection)
        return list(items)

    async with batcher(statement, patience=0.0) as opened:
        await opened.ask(1)
        used[0].closed = True
        await opened.ask(2)
    assert used[0] is not used[1]


async def test_who_asks_after_the_end_does_not_wait_for_ever() -> None:
    async def statement(_connection: Any, items: Sequence[int], _repeated: bool) -> Sequence[int]:
        return items

    async with batcher(statement) as opened:
        assert await opened.ask(1) == 1
    late = asyncio.create_task(opened.ask(2))
    await asyncio.wait([late], timeout=60)
    assert late.cancelled()


@pytest.mark.parametrize("error", [asyncpg.InterfaceError("closed"), TimeoutError(), ValueError("no")])
async def test_an_end_whose_cancel_a_statement_turns_into_an_error_ends_nevertheless(error: Exception) -> None:
    """The cancel meets a transaction while PostgreSQL freezes: its rollback fails, and asyncpg raises that error. The
    batcher tried again, for ever, and the worker never ended.
    """
    tries: list[int] = []

    async def statement(_connection: Any, items: Sequence[int], _repeated: bool) -> Sequence[int]:
        tries.extend(items)
        if len(tries) > 1:
            return items
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise error from None
        return items

    async with batcher(statement) as opened:
        asked = asyncio.create_task(opened.ask(1))
        while not tries:
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await opened.close()
    assert asked.done()
    assert tries == [1]


@pytest.mark.parametrize("hangs_alone", [False, True], ids=["together", "one by one"])
async def test_an_end_during_a_round_trip_leaves_no_asker_waiting(hangs_alone: bool) -> None:
    """Also while the items of a refused batch are tried one by one: some have their answers by then, others wait."""
    hangs = asyncio.Event()

    async def statement(_connection: Any, items: Sequence[int], _repeated: bool) -> Sequence[int]:
        if hangs_alone and len(items) > 1:
            raise ValueError("one of these cannot be stored")
        if 2 in items:
            hangs.set()
            await asyncio.Event().wait()
        return items

    async with batcher(statement) as opened:
        asked = [asyncio.create_task(opened.ask(n)) for n in (1, 2, 3, 4)]
        await hangs.wait()
    await asyncio.wait(asked, timeout=60)
    assert [ask.cancelled() for ask in asked] == [not hangs_alone, True, True, True]
    assert not hangs_alone or asked[0].result() == 1
