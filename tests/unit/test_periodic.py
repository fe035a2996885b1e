"""A loop goes on, whatever a turn of it meets, and says so once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import asyncpg
import pytest
from structlog.testing import capture_logs

from leasehold.domain.errors import StoreUnavailable
from leasehold.runtime.duty_cycle import Pauses
from leasehold.runtime.periodic import LONGEST_PAUSE, Periodic
from leasehold.telemetry.duties import ERRORS
from leasehold.telemetry.outages import Outage
from tests.support.clock import Clock
from tests.support.now import now


def turns(*outcomes: BaseException | float | None) -> Callable[[], Awaitable[float | None]]:
    waiting = list(outcomes)

    async def turn() -> float | None:
        outcome = waiting.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return turn


def duty(clock: Clock, outcomes: Sequence[BaseException | float | None], every: float = 0.5) -> Periodic:
    return Periodic("test", turns(*outcomes), every=every, clock=clock)


async def test_a_turn_says_when_the_next_one_comes(clock: Clock) -> None:
    periodic = duty(clock, [None, 0.0, 7.0])
    assert [await periodic.once() for _ in range(3)] == [0.5, 0.0, 7.0]


async def test_what_nobody_foresaw_is_told_with_its_traceback_once_and_counted(clock: Clock) -> None:
    before = ERRORS.labels("test")._value.get()
    with capture_logs() as lines:
        periodic = duty(clock, [RuntimeError("a bug")] * 4 + [None])
        pauses = [await periodic.once() for _ in range(5)]
    assert ERRORS.labels("test")._value.get() - before == 4
    assert [line["log_level"] for line in lines] == ["error", "info"]
    assert [("exc_info" in line) for line in lines] == [True, False]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 0.5]


async def test_pauses_grow_to_a_minute(clock: Clock) -> None:
    periodic = duty(clock, [RuntimeError("a bug")] * 30)
    assert [await periodic.once() for _ in range(30)][-1] == LONGEST_PAUSE


async def test_another_error_is_told_too_and_one_that_goes_on_once_a_minute(clock: Clock) -> None:
    with capture_logs() as lines:
        periodic = duty(clock, [RuntimeError("a bug"), ValueError("another"), RuntimeError("a bug"), ValueError("x")])
        for seconds in (0, 1, 61, 1):
            clock.now += seconds
            await periodic.once()
    assert [line["error"] for line in lines] == ["RuntimeError", "ValueError", "RuntimeError"]


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (ConnectionError(), "database"),
        (asyncpg.InterfaceError("closed"), "database"),
        (StoreUnavailable("k"), "object store"),
        (asyncio.CancelledError(), "broker"),
    ],
)
async def test_what_is_away_is_waited_for_without_an_error(
    clock: Clock, error: BaseException, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a library says so by a cancellation that nobody asked for. It is one line for all duties."""
    for name, fresh in (("DATABASE", "database"), ("STORE", "object store"), ("BROKER", "broker")):
        monkeypatch.setattr(f"leasehold.runtime.periodic.{name}", Outage(fresh))
    before = ERRORS.labels("test")._value.get()
    with capture_logs() as lines:
        for _ in range(2):
            periodic = duty(clock, [error] * 3 + [None])
            pauses = [await periodic.once() for _ in range(4)]
            assert pauses == [0.5] * 4
    assert [line["event"] for line in lines] == [f"the {part} is away; trying again until it is back"]
    assert ERRORS.labels("test")._value.get() == before


@pytest.fixture
def away(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Outage:
    """The database, for all duties of a test."""
    away = Outage("database", clock=clock)
    monkeypatch.setattr("leasehold.runtime.periodic.DATABASE", away)
    return away


async def counted(periodic: Periodic, clock: Clock, times: int, each: Callable[[], None] = lambda: None) -> int:
    """How many of these turns were counted as errors of the duty. `each` is called after each turn."""
    before = ERRORS.labels("test")._value.get()
    for _ in range(times):
        assert await periodic.once() == 0.5, "an outage may end soon"
        clock.now += 0.5
        each()
        clock.now += 2
    return int(ERRORS.labels("test")._value.get() - before)


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        asyncpg.DeadlockDetectedError(),
        asyncpg.OutOfMemoryError("shared memory"),
        asyncpg.DiskFullError(),
    ],
)
async def test_a_turn_that_always_fails_while_others_have_answers_is_an_error_of_the_duty(
    clock: Clock, away: Outage, error: BaseException
) -> None:
    """As one whose statement takes too long: no alert told of it, and the log told of outages that were none."""
    periodic = duty(clock, [error] * 15 + [None] + [error] * 5)
    with capture_logs() as lines:
        assert await counted(periodic, clock, 15, away.record_answer) == 10
    assert [line["event"] for line in lines if line["log_level"] == "error"] == ["a duty failed; it goes on"]
    assert not away.lasts
    assert await counted(periodic, clock, 6, away.record_answer) == 0, "the duty has worked in between"


async def test_a_turn_that_always_fails_is_seen_although_the_outage_that_it_notices_never_ends(
    clock: Clock, away: Outage
) -> None:
    """It fails again in less than the second after which an outage counts as ended."""
    periodic = duty(clock, [TimeoutError()] * 20)
    before = ERRORS.labels("test")._value.get()
    for _ in range(20):
        await periodic.once()
        clock.now += 0.4
        away.record_answer()
        clock.now += 0.1
    assert ERRORS.labels("test")._value.get() - before == 15


async def test_an_outage_is_no_error_of_a_duty_however_long_it_lasts_and_although_the_duty_failed_before(
    clock: Clock, away: Outage
) -> None:
    periodic = duty(clock, [TimeoutError()] * 100)
    assert await counted(periodic, clock, 30) == 0
    assert await counted(periodic, clock, 10, away.record_answer) > 0
    away.record_error(TimeoutError(), "heartbeat")
    await counted(periodic, clock, 1)
    assert await counted(periodic, clock, 30) == 0


async def test_outages_of_two_servers_in_turns_are_no_error_of_the_duty(
    clock: Clock, away: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leasehold.runtime.periodic.STORE", Outage("object store", clock=clock))
    periodic = duty(clock, [TimeoutError(), StoreUnavailable("k")] * 10)
    assert await counted(periodic, clock, 20) == 0


async def test_a_value_that_no_statement_takes_is_no_absence_of_the_database(clock: Clock) -> None:
    class BadInput(asyncpg.InterfaceError, ValueError):
        """What asyncpg raises for it."""

    with capture_logs() as lines:
        await duty(clock, [BadInput("surrogates not allowed")]).once()
    assert [line["log_level"] for line in lines] == ["error"]


async def test_a_loop_that_is_cancelled_ends() -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(Periodic("test", hang, every=0.5).run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def took(pauses: Pauses, clock: Clock, seconds: float) -> float:
    """The pause after work of this time."""
    began = clock.now
    clock.now += seconds
    return pauses.done(began)


def test_a_clock_of_pauses_is_due_until_it_is_done_and_again_after_its_pause(clock: Clock) -> None:
    pauses = Pauses(share=0.1, at_least=1.0, at_most=50.0, clock=clock)
    assert now(pauses.due)
    assert (took(pauses, clock, 2), took(pauses, clock, 3)) == (1.0, 20.0)
    assert not now(pauses.due)
    clock.now += 20
    assert now(pauses.due)
    pauses.done(clock.now)
    assert not now(pauses.due)
    pauses.forget()
    assert pauses.due


def test_one_slow_turn_does_not_lengthen_the_pause_and_two_do(clock: Clock) -> None:
    """One may have waited for a lock or a processor."""
    pauses = Pauses(share=0.1, at_least=1.0, at_most=50.0, clock=clock)
    taken = [took(pauses, clock, seconds) for seconds in (3, 0.1, 3, 2, 4, 0.2)]
    assert taken == pytest.approx([1.0, 1.0, 1.0, 20.0, 20.0, 2.0])
