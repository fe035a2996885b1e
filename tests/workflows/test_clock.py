"""`ctx.now()`: no earlier than the newest result of the branch, however it has ended, and the same at each replay."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from leasehold import Cancelled, Context, TaskFailed
from leasehold.transitions import jobs
from leasehold.transitions.workflows.reading import Entry, Journal, StoredSignal
from leasehold.transitions.workflows.records import Call
from leasehold.workflows.driver import Driver
from tests.workflows import shop
from tests.workflows.conftest import Runs, Start
from tests.workflows.test_running import MEMORY

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
LATER = BEGAN + timedelta(hours=1)
Code = Callable[[Context], Coroutine[Any, Any, Any]]
Place = tuple[str, int]


@dataclass
class Ledger:
    """The journal of a run, as PostgreSQL keeps it. `clock`: PostgreSQL's."""

    rows: dict[Place, Entry] = field(default_factory=dict)
    signals: list[StoredSignal] = field(default_factory=list)
    clock: datetime = BEGAN
    is_last: bool = True

    async def read(self, places: Sequence[Place] | None) -> Journal:
        entries = [row for place, row in sorted(self.rows.items()) if places is None or place in places]
        return Journal(
            news=0, started_at=BEGAN, version=1, entries=entries, signals=list(self.signals), read_at=self.clock
        )

    async def signal(self, name: str, after: int) -> StoredSignal | None:
        raise NotImplementedError

    async def record(self, calls: Sequence[Call], *, cancelling: bool) -> bool:
        for call in calls:
            place = call.branch, call.number
            row = self.rows.get(place)
            if row is None:
                at = self.clock + timedelta(seconds=call.delay or 0)
                self.rows[place] = Entry(
                    *place, call.kind, call.name, call.state, call.value, call.child,
                    "running" if call.kind in ("run", "result") else None, None, None, call.delay, at,
                )  # fmt: skip
            elif row.state == "open" and call.state != "open":
                self.rows[place] = replace(row, state=call.state, value=call.value)
            self.signals = [signal for signal in self.signals if signal.id != call.signal]
        return True

    async def start(self, call: Any, record: Call, wait: Call | None = None, *, again: bool = False) -> bool:
        return await self.record([record] if wait is None else [record, wait], cancelling=False)

    async def fetch(self, child: UUID, output: str, *, is_run: bool) -> bytes:
        raise NotImplementedError

    async def call(self, function: Callable[[], Any]) -> Any:
        return await function()

    def cancelled(self) -> bool:
        return False

    def is_last_attempt(self) -> bool:
        return self.is_last

    def check(self) -> None: ...

    def change(self, number: int, branch: str = "", **fields: Any) -> None:
        self.rows[branch, number] = replace(self.rows[branch, number], **fields)


async def advance(ledger: Ledger, driver: Driver) -> Any:
    """The workflow's result; None: it waits."""
    outcome = await driver.advance(ledger)
    await ledger.record(driver.calls, cancelling=False)
    driver.calls_taken()
    return outcome.result


def driver_of(code: Code) -> Driver:
    return Driver(uuid4(), lambda it: code(Context(it)), 100)


async def note() -> None: ...


async def breaks() -> None:
    raise ValueError("it is broken")


def step_fails(ledger: Ledger) -> None:
    ledger.change(1, status="failed", code="broken", message="m", at=LATER)


def result_is_unreadable(ledger: Ledger) -> None:
    ledger.change(1, status="succeeded", value={"value": "no number"}, at=LATER)


def run_fails(ledger: Ledger) -> None:
    ledger.change(2, status="failed", code="broken", message="m", at=LATER)


def run_is_deleted(ledger: Ledger) -> None:
    ledger.clock = LATER
    ledger.change(2, status=None)


def time_passes(ledger: Ledger) -> None:
    ledger.change(1, seconds=0.0, at=LATER)


def bad_signal_comes(ledger: Ledger) -> None:
    ledger.signals = [StoredSignal(1, "go", "no number", LATER)]


def it_is_later(ledger: Ledger) -> None:
    ledger.clock = LATER


async def runs_a_step(ctx: Context) -> None:
    await ctx.run(shop.double, 1)


async def runs_a_step_in_a_gather(ctx: Context) -> None:
    await ctx.gather(ctx.run(shop.double, 1), ctx.call(note))


async def runs_a_step_in_nested_gathers(ctx: Context) -> None:
    await ctx.gather(ctx.gather(ctx.run(shop.double, 1)), ctx.call(note))


async def runs_a_limited_task(ctx: Context) -> None:
    await ctx.run(shop.alone, 1)


async def awaits_a_run(ctx: Context) -> None:
    child = await ctx.start(shop.double, 1)
    await child.result()


async def waits(ctx: Context) -> None:
    await ctx.wait_for("go", int, timeout=3600)


async def calls(ctx: Context) -> None:
    await ctx.wait_for("begin")
    await ctx.call(note)


async def calls_what_breaks(ctx: Context) -> None:
    await ctx.wait_for("begin")
    await ctx.call(breaks)


def it_begins(ledger: Ledger) -> None:
    ledger.clock = LATER
    ledger.signals = [StoredSignal(1, "begin", None, BEGAN)]


#: How a call ends: the code that makes it, and what happens to it at LATER.
ENDS = {
    "a step fails": (runs_a_step, step_fails),
    "a step of a gather fails": (runs_a_step_in_a_gather, step_fails),
    "a step of a gather in a gather fails": (runs_a_step_in_nested_gathers, step_fails),
    "a step's result is unreadable": (runs_a_step, result_is_unreadable),
    "a run fails": (awaits_a_run, run_fails),
    "a run is deleted": (awaits_a_run, run_is_deleted),
    "a wait times out": (waits, time_passes),
    "a signal does not fit": (waits, bad_signal_comes),
    "a function returns": (calls, it_begins),
    "a function raises": (calls_what_breaks, it_begins),
}
#: An earlier release had no such call: there a limited task is a step.
NEW_ENDS = {"the run of a limited task fails": (runs_a_limited_task, step_fails)}
PASSES = pytest.mark.parametrize(("part", "happens"), ENDS.values(), ids=ENDS)
PASSES_NOW = pytest.mark.parametrize(("part", "happens"), (ENDS | NEW_ENDS).values(), ids=ENDS | NEW_ENDS)
WHERE = pytest.mark.parametrize("where", ["alone", "in a branch", "in a branch of a branch"])


def seen_by(times: list[datetime], part: Code, where: str = "alone") -> Code:
    """Code that meets the end of `part`, and then waits twice. `times`: what it reads of the clock."""

    async def meets(ctx: Context) -> None:
        with suppress(TaskFailed, TimeoutError):
            await part(ctx)
        times.append(ctx.now())

    async def meets_in_branches(ctx: Context) -> None:
        await ctx.gather(meets(ctx))

    async def code(ctx: Context) -> str:
        times.clear()
        match where:
            case "alone":
                await meets(ctx)
            case "in a branch":
                await ctx.gather(meets(ctx))
            case _:
                await ctx.gather(meets_in_branches(ctx))
        times.append(ctx.now())
        await ctx.wait_for("first", timeout=None)
        times.append(ctx.now())
        await ctx.wait_for("second")
        return "ended"

    return code


class Branched(Ledger):
    """A ledger whose calls of `part` are in the first branch, wherever that is."""

    def change(self, number: int, branch: str = "", **fields: Any) -> None:
        super().change(number, branch or max(branch for branch, _ in self.rows), **fields)


@PASSES_NOW
@WHERE
async def test_the_time_is_no_earlier_than_a_result_and_the_same_at_each_replay(
    part: Code, happens: Callable[[Ledger], None], where: str
) -> None:
    """A loop that waits with a timeout until a deadline never came to it: the time stood still."""
    ledger, times = Branched(), list[datetime]()
    kept = driver_of(seen_by(times, part, where))
    await advance(ledger, kept)
    assert times == []
    happens(ledger)

    lost = replace(ledger, rows=dict(ledger.rows))  # what follows is undone: its worker dies
    await advance(lost, driver_of(seen_by(times, part, where)))
    assert len(times) == 2
    assert all(LATER <= time <= LATER + timedelta(minutes=1) for time in times)

    times.clear()
    await advance(ledger, kept)
    seen = list(times)
    assert len(seen) == 2
    assert all(LATER <= time <= LATER + timedelta(minutes=1) for time in seen)
    ledger.clock = LATER + timedelta(hours=5)
    await advance(ledger, driver_of(seen_by(times, part, where)))
    assert times == seen
    ledger.signals = [StoredSignal(2, "first", None, BEGAN)]
    await advance(ledger, driver_of(seen_by(times, part, where)))
    assert (times[:2], times[2]) == (seen, seen[1])  # an older signal does not set the clock back
    ledger.signals = [StoredSignal(3, "second", None, BEGAN)]
    assert await advance(ledger, driver_of(seen_by(times, part, where))) == "ended"
    assert times[:2] == seen


def _without_instants(row: Entry, release: str) -> Entry:
    """The row as an earlier release wrote it. 0.1.0 recorded no failure of an awaited run."""
    if (row.kind == "run" and row.status == "failed") or (release == "0.1.0" and row.kind == "result"):
        return replace(row, state="open", value=None)
    if row.kind == "signal" and row.state == "done":
        return replace(row, value={name: row.value[name] for name in ("value", "at")})
    if row.value is None:
        return row
    value = {name: value for name, value in row.value.items() if name != "at"}
    return replace(row, value=value or None)


async def _old(part: Code, happens: Callable[[Ledger], None], where: str, release: str) -> Ledger:
    """The journal of a run that an earlier release has brought to its wait for `first`."""
    ledger, times = Branched(), list[datetime]()
    driver = driver_of(seen_by(times, part, where))
    await advance(ledger, driver)
    happens(ledger)
    await advance(ledger, driver)
    ledger.rows = {place: _without_instants(row, release) for place, row in ledger.rows.items()}
    return ledger


@PASSES
@WHERE
@pytest.mark.parametrize("release", ["0.1.0", "after 0.1.0"])
async def test_a_run_that_an_earlier_release_began_keeps_its_way(
    part: Code, happens: Callable[[Ledger], None], where: str, release: str
) -> None:
    """Its code has gone on by the time that the earlier release gave."""
    ledger, times = await _old(part, happens, where, release), list[datetime]()
    before = dict(ledger.rows)
    kept = driver_of(seen_by(times, part, where))
    await advance(ledger, kept)
    assert times == [BEGAN, BEGAN]
    assert ledger.rows == before
    ledger.signals = [StoredSignal(2, "first", None, BEGAN)]
    await advance(ledger, kept)
    assert times == [BEGAN, BEGAN, BEGAN]
    await advance(ledger, driver_of(seen_by(times, part, where)))
    assert times == [BEGAN, BEGAN, BEGAN]


async def test_a_failure_that_the_earlier_release_had_not_met_moves_the_time() -> None:
    """In a run that it began, after a failure that it had met."""
    times: list[datetime] = []

    async def code(ctx: Context) -> None:
        for number in range(2):
            try:
                await ctx.run(shop.double, number)
            except TaskFailed:
                times.append(ctx.now())
        await ctx.wait_for("go")

    ledger = Ledger()
    failed: dict[str, Any] = {"status": "failed", "code": "broken", "message": "m", "at": LATER}
    await ledger.record(
        [
            Call("", 1, "run", "double", child=uuid4()),
            Call("", 2, "run", "double", child=uuid4()),
        ],
        cancelling=False,
    )
    ledger.change(1, **failed)
    kept = driver_of(code)
    await advance(ledger, kept)
    assert times == [BEGAN]
    ledger.change(2, **failed | {"at": LATER + timedelta(hours=1)})
    await advance(ledger, kept)
    assert times == [BEGAN, LATER + timedelta(hours=1)]
    await advance(ledger, driver_of(code))
    assert times == [BEGAN, LATER + timedelta(hours=1)] * 2


async def test_the_calls_of_other_branches_do_not_hide_that_a_failure_is_new() -> None:
    """Only the calls that the code makes after the failure show that an earlier release has met it."""
    times: list[datetime] = []

    async def fails(ctx: Context) -> None:
        try:
            await ctx.run(shop.double, 1)
        except TaskFailed:
            times.append(ctx.now())

    async def beside(ctx: Context) -> None:
        await ctx.gather(ctx.sleep(5), ctx.wait_for("other"))

    async def code(ctx: Context) -> None:
        times.clear()
        await ctx.gather(ctx.gather(fails(ctx), ctx.wait_for("beside")), beside(ctx))

    ledger = Ledger()
    await advance(ledger, driver_of(code))
    ledger.change(1, "2.0/", status="failed", code="broken", message="m", at=LATER)
    await advance(ledger, driver_of(code))
    assert times == [LATER]


async def test_what_a_branch_has_met_beside_its_gather_stays_as_it_was() -> None:
    """A branch has gone on by the failure of a run, for which its gather waits, too. Then somebody retries the run."""
    results: list[Any] = []

    async def goes_on(ctx: Context, result: Any) -> None:
        try:
            results.append(await result)
        except TaskFailed as failed:
            results.append(failed.code)
        await ctx.wait_for("never")

    async def code(ctx: Context) -> None:
        result = (await ctx.start(shop.double, 1)).result()
        await ctx.gather(result, goes_on(ctx, result))

    ledger = Ledger()
    await advance(ledger, driver_of(code))
    ledger.change(2, status="failed", code="broken", message="m", at=LATER)
    await advance(ledger, driver_of(code))
    ledger.change(2, status="succeeded", code=None, message=None)
    await advance(ledger, driver_of(code))
    assert results == ["broken", "broken"]


async def test_a_step_that_failed_keeps_its_failure_in_the_journal_once_the_code_has_gone_on() -> None:
    errors: list[tuple[str, str]] = []

    async def code(ctx: Context) -> None:
        errors.clear()
        try:
            await ctx.run(shop.double, 1)
        except TaskFailed as failed:
            errors.append((failed.code, failed.message))
        await ctx.wait_for("go")

    ledger = Ledger()
    await advance(ledger, driver_of(code))
    ledger.change(1, status="failed", code="broken", message="é" * 5000, at=LATER)
    await advance(ledger, driver_of(code))
    assert ledger.rows["", 1].state == "failed"
    first = list(errors)
    await advance(ledger, driver_of(code))
    assert first == errors == [("broken", "é" * 5000)]


async def test_a_step_whose_failure_is_recorded_has_failed_also_for_a_cancelled_run() -> None:
    """The recorded failure stands, whatever the cancel of the run has made of the step."""
    met: list[str] = []

    async def code(ctx: Context) -> None:
        try:
            await ctx.run(shop.double, 1)
        except TaskFailed:
            met.append("failure")
        try:
            await ctx.wait_for("go")
        except Cancelled:
            met.append("cancel")
            raise

    class Cancelling(Ledger):
        async def read(self, places: Sequence[Place] | None) -> Journal:
            return replace(await super().read(places), cancelled_at=LATER)

    ledger = Ledger()
    await advance(ledger, driver_of(code))
    ledger.change(1, status="cancelled", at=LATER)
    await advance(ledger, driver_of(code))
    met.clear()
    with pytest.raises(Cancelled):
        await advance(Cancelling(ledger.rows), driver_of(code))
    assert met == ["failure", "cancel"]


async def test_a_retry_runs_no_step_again_whose_failure_the_journal_has(runs: Runs, worker_of: Start) -> None:
    """A function that followed the failure was called, although its result is not recorded."""
    await worker_of()
    run = await runs.submit(shop.ends_by_what_follows_a_failure)
    for _ in range(2):
        status, error = await runs.ended(run)
        assert (status, error["code"]) == ("failed", "result_too_large")
        assert await runs.steps(run) == {"unready#1": "failed"}
        assert [(number, state) for _, number, _, _, state in await runs.journal(run)] == [(1, "failed")]
        assert await runs.connection.fetchval("SELECT attempt FROM task WHERE job_id = $1 AND contained", run) == 1
        await jobs.replay(runs.connection, run, "t")


@MEMORY
@pytest.mark.parametrize("how", ["wait", "step", "call"])
async def test_a_loop_that_polls_until_a_deadline_ends(runs: Runs, worker_of: Start, memory: int, how: str) -> None:
    await worker_of(workflow_memory=memory)
    run = await runs.submit(shop.polls_until_a_deadline, how)
    status, (seconds, rounds) = await runs.ended(run)
    assert status == "succeeded"
    assert 1 <= seconds < 30
    assert 1 <= rounds < 50
