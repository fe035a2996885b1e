"""What the checker makes of a database whose clock has jumped: leases end early, and nothing else is excused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from chaos.amqp_tap import HintEvent
from chaos.faults.clock import JUMP_SECONDS, ClockFaults
from chaos.history import History
from chaos.plan import Fault
from tests.chaos.histories import ME, OTHER, T0, at, sound
from tests.chaos.test_checker import DONE_FIRST, a_lease_taken_from_the_living, an_ack_before_the_claim, found


@pytest.mark.parametrize(("ahead", "violated"), [(60.0, False), (0.0, True), (-60.0, True)])
def test_a_lease_has_passed_by_the_clock_that_it_was_given_by(ahead: float, violated: bool) -> None:
    history = sound()
    a_lease_taken_from_the_living(history)
    history.changes[DONE_FIRST] = replace(history.changes[DONE_FIRST], ahead=ahead)
    assert ("I8" in found(history)) is violated


def acked_while_it_ran(history: History) -> None:
    """The first hint comes, and is acknowledged, in the middle of the run that it would have begun."""
    for index, record in enumerate(history.hint_records):
        if record.task == "task-first" and record.event in (HintEvent.DELIVERED, HintEvent.ACKED):
            history.hint_records[index] = replace(record, since=T0 + 1.2, at=T0 + 1.4)


def test_who_holds_a_lease_cannot_know_that_a_jump_has_ended_it() -> None:
    history = sound()
    acked_while_it_ran(history)
    history.jumps = [(T0 + 1.1, 60.0), (T0 + 1.8, 0.0)]
    assert "I9" not in found(history)


def test_a_jump_excuses_no_ack_of_what_was_due_all_the_time() -> None:
    history = sound()
    an_ack_before_the_claim(history)
    history.jumps = [(T0 - 10, 60.0)]
    assert "I9" in found(history)


BACK_AGAIN = [(T0 + 0.5, -20.0), (T0 + 1.9, 0.0)]


@pytest.mark.parametrize(
    ("process", "acked", "jumps", "excused"),
    [
        (ME, 2.3, BACK_AGAIN, True),
        (ME, 2.9, BACK_AGAIN, True),
        (ME, 3.1, BACK_AGAIN, False),  # its trust has ended
        (OTHER, 2.3, BACK_AGAIN, False),
        (ME, 2.3, [], False),
        (ME, 2.3, [(T0 - 9, -20.0), (T0 - 3, 0.0)], False),  # no lease of that time is left
        (ME, 2.3, [(T0 + 2.05, -20.0), (T0 + 2.08, 0.0)], False),  # after the lease was ended
    ],
)
def test_who_held_a_lease_that_a_jump_has_ended_may_believe_in_it_as_long_as_a_lease_is_trusted(
    process: str, acked: float, jumps: list[tuple[float, float]], excused: bool
) -> None:
    """A hint of the task then is a duplicate for the former holder. The task waits for the next poll."""
    history = sound()
    history.terms = replace(history.terms, lease_seconds=4.0, trust_margin_seconds=3.0)
    a_lease_taken_from_the_living(history)
    history.hint_records = [
        replace(record, process=process, since=T0 + 2.1, at=T0 + acked)
        if record.task == "task-first" and record.event is HintEvent.ACKED
        else record
        for record in history.hint_records
    ]
    history.jumps = jumps
    assert ("I9" not in found(history)) is excused


@pytest.mark.parametrize("ahead", [60.0, -60.0])
def test_a_confirm_is_compared_with_the_true_time_of_the_row(ahead: float) -> None:
    """A row that was written while the clock was wrong says a wrong time itself."""
    history = sound()
    said = {
        change.row["id"]: at(change.at - T0 + ahead)
        for change in history.changes
        if change.kind == "outbox" and change.after
    }
    for index, change in enumerate(history.changes):
        if change.kind == "outbox":
            row = change.row | {"created_at": said[change.row["id"]]}
            history.changes[index] = (
                replace(change, after=row, ahead=ahead) if change.after else replace(change, before=row)
            )
    assert "I10" not in found(history)
    history.hint_records = [
        replace(record, since=record.since - 30) if record.event is HintEvent.CONFIRMED else record
        for record in history.hint_records
    ]
    assert "I10" in found(history)


def test_the_database_says_what_its_last_jump_made_it_say() -> None:
    history = sound()
    assert history.database_time(T0) == T0
    history.jumps = [(T0 + 1, 20.0), (T0 + 2, 0.0)]
    assert [history.database_time(T0 + after) - T0 for after in (0.5, 1.0, 1.5, 2.5)] == [0.5, 21.0, 21.5, 2.5]
    assert history.claims["task-first"][0].process == ME


async def test_the_recorded_jump_includes_the_whole_time_of_the_wrong_clock() -> None:
    recorded_at_jump: list[tuple[int, list[float]]] = []
    faults: ClockFaults

    class Clock:
        ahead = 0

        def jump(self, seconds: int) -> None:
            self.ahead = seconds
            recorded_at_jump.append((seconds, [ahead for _, ahead in faults.jumps]))

        async def fetchval(self, _query: str) -> datetime:
            return datetime.now(UTC) + timedelta(seconds=self.ahead)

    clock = Clock()

    @asynccontextmanager
    async def connection() -> AsyncIterator[Clock]:
        yield clock

    installation = SimpleNamespace(servers=SimpleNamespace(clock=clock), connection=connection)
    faults = ClockFaults(installation, asyncio.Lock())  # type: ignore[arg-type]  # all that it uses of one
    assert await faults.makers["F38"](Fault("F38 database clock behind")) == JUMP_SECONDS
    # It is recorded before the clock jumps, and as over after the clock is back.
    assert recorded_at_jump == [(-JUMP_SECONDS, [-JUMP_SECONDS]), (0, [-JUMP_SECONDS])]
    assert [ahead for _, ahead in faults.jumps] == [-JUMP_SECONDS, 0]
