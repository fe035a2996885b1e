"""What the runner settles for each way in which an attempt ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from leasehold.domain.errors import Cancelled, LeaseLost, ObjectExists, Permanent, Retryable, StepError, Unforeseen
from leasehold.domain.ids import id_of_instant, new_id
from leasehold.domain.lease import Lease
from leasehold.domain.pipeline import Step
from leasehold.transitions import workers
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Completion, Failure, Snoozing, Suspending, Verdict, fail
from leasehold.transitions.workflows.records import Call
from leasehold.worker.attempts import runner as runner_module
from leasehold.worker.attempts.runner import Runner
from leasehold.worker.leases.held_lease import HeldLease
from leasehold.worker.leases.settlement_batcher import Answer, CancelAcknowledged, Release, Settlement
from leasehold.worker.sandbox.children import NoChild, NoneForked
from tests.factories import Rows
from tests.worker.conftest import SECONDS

Handler = Callable[..., Awaitable[Settlement]]
NOTHING: Any = SimpleNamespace()
HAS_ROOM: Any = SimpleNamespace(may_continue=lambda: True)
IS_FULL: Any = SimpleNamespace(may_continue=lambda: False)


def claimed(**changes: Any) -> Claimed:
    made = Claimed(
        Lease(new_id(), uuid4(), 1, 1, monotonic() + 600), new_id(), "t", "p", 1, "s", "default", 1, 0, 0, "pending",
        0.0, params={}, inputs={}, output_prefix="", trace=None, handler=None, timeout_seconds=None, gated=False,
        grace_seconds=0, cancelling=False,
    )  # fmt: skip
    return replace(made, **changes)


class Attempt:
    """An attempt at an inline step that does what `handler` does."""

    def __init__(self, handler: Handler, **changes: Any) -> None:
        self.asked_to_stop: list[Lease] = []
        self.told: list[str] = []
        self.began = asyncio.Event()
        self.claimed = claimed(**changes)
        self.held = HeldLease(self.claimed.lease, monotonic() + 600)

        async def perform(*arguments: Any) -> Settlement:
            self.began.set()
            return await handler(*arguments)

        inline: Any = SimpleNamespace(perform=perform)
        directories: Any = SimpleNamespace(request_stop=self.asked_to_stop.append)
        self.runner = Runner(
            NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, directories, inline, NOTHING, NOTHING
        )

    async def settlement(self) -> Settlement | None:
        recorder = SimpleNamespace(add_final=lambda _level, text, **_: self.told.append(text))
        log: Any = SimpleNamespace(recorder=recorder, current=lambda: None)
        declaration: Any = (SimpleNamespace(), Step("s"))
        return await self.runner._attempt(self.claimed, declaration, 60.0, self.held, log, HAS_ROOM)

    async def stopped(self, stop: Callable[[], object]) -> Settlement | None:
        """The settlement, if `stop` happens while the handler runs."""
        running = asyncio.create_task(self.settlement())
        await self.began.wait()
        stop()
        return await asyncio.wait_for(running, SECONDS)


async def for_ever(*_: Any) -> Settlement:
    await asyncio.Event().wait()
    raise AssertionError


async def test_an_attempt_whose_lease_is_lost_settles_nothing_even_if_it_was_cancelled_too() -> None:
    attempt = Attempt(for_ever)

    def lose() -> None:
        attempt.held.cancelled = attempt.held.lost = True
        attempt.held.notify_stop()

    assert await attempt.stopped(lose) is None
    assert not attempt.runner._running


@pytest.mark.parametrize("error", [LeaseLost("lost"), ObjectExists("k")])
async def test_an_attempt_that_finds_the_task_to_be_anothers_settles_nothing(error: Exception) -> None:
    async def finds(*_: Any) -> Settlement:
        raise error

    assert await Attempt(finds).settlement() is None


@pytest.mark.parametrize("was_known", [False, True])
async def test_an_attempt_that_a_client_cancelled_acknowledges_it_after_it_was_asked_to_stop(
    *, was_known: bool
) -> None:
    attempt = Attempt(for_ever, cancelling=was_known)

    def cancel() -> None:
        attempt.held.cancelled = True
        attempt.held.notify_cancelled()

    if was_known:
        settlement = await asyncio.wait_for(attempt.settlement(), SECONDS)
    else:
        settlement = await attempt.stopped(cancel)
    assert settlement == CancelAcknowledged(attempt.claimed.lease)
    assert attempt.asked_to_stop == [attempt.claimed.lease]


async def test_an_attempt_has_its_time_to_stop_and_what_it_returns_meanwhile_counts() -> None:
    go_on = asyncio.Event()

    async def finishes(of: Claimed, *_: Any) -> Settlement:
        await go_on.wait()
        return Completion(of.lease)

    attempt = Attempt(finishes, grace_seconds=600)

    def cancel() -> None:
        attempt.held.cancelled = True
        attempt.held.notify_cancelled()
        go_on.set()

    assert await attempt.stopped(cancel) == Completion(attempt.claimed.lease)


@pytest.mark.parametrize("before", [False, True])
async def test_an_attempt_of_a_worker_that_ends_gives_its_lease_back(*, before: bool) -> None:
    attempt = Attempt(for_ever)
    if before:
        attempt.runner.release()
        settlement = await asyncio.wait_for(attempt.settlement(), SECONDS)
    else:
        settlement = await attempt.stopped(attempt.runner.release)
    assert settlement == Release(attempt.claimed.lease)


@pytest.mark.parametrize(
    ("stop", "code", "retryable"),
    [(Cancelled(), "handler_cancelled", False), (asyncio.CancelledError(), "handler_error", True)],
)
async def test_a_handler_that_stops_without_being_asked_has_failed(
    stop: BaseException, code: str, *, retryable: bool
) -> None:
    async def stops(*_: Any) -> Settlement:
        raise stop

    attempt = Attempt(stops)
    settlement = await attempt.settlement()
    assert isinstance(settlement, Failure)
    assert (settlement.code, settlement.retryable) == (code, retryable)
    assert attempt.told == [settlement.message]


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
async def test_a_handler_that_exits_fails_its_attempt_and_ends_no_worker(error: BaseException) -> None:
    async def exits(*_: Any) -> Settlement:
        raise error

    settlement = await Attempt(exits).settlement()
    assert isinstance(settlement, Failure)
    assert (settlement.code, settlement.retryable) == ("handler_error", True)


async def test_whoever_cancels_an_attempt_from_outside_sees_it_cancelled() -> None:
    attempt = Attempt(for_ever)
    running = asyncio.create_task(attempt.settlement())
    await attempt.began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, SECONDS)
    assert not attempt.runner._running


@pytest.mark.parametrize(
    ("error", "was_unforeseen", "retryable"),
    [
        (Unforeseen("m"), False, True),
        (Unforeseen("m"), True, False),
        (Retryable("m"), True, True),
        (Permanent("c", "m"), False, False),
    ],
)
async def test_only_a_second_unforeseen_error_in_a_row_is_tried_no_more(
    error: StepError, *, was_unforeseen: bool, retryable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def raises(*_: Any) -> Settlement:
        raise error

    async def was_unforeseen_before(_claimed: Claimed) -> bool:
        return was_unforeseen

    attempt = Attempt(raises)
    monkeypatch.setattr(attempt.runner, "_was_unforeseen_before", was_unforeseen_before)
    settlement = await attempt.settlement()
    assert isinstance(settlement, Failure)
    assert (settlement.code, settlement.retryable) == (error.code, retryable)
    assert attempt.told == [f"{error.code}: m"]


@pytest.mark.parametrize("kind", [Cancelled, asyncio.CancelledError])
@pytest.mark.parametrize("cause", [None, ValueError("no such card")])
async def test_the_log_of_a_cancelled_workflow_has_the_error_of_its_cleanup(
    kind: type[BaseException], cause: Exception | None
) -> None:
    async def stops(*_: Any) -> Settlement:
        raise kind from cause

    attempt = Attempt(stops)
    attempt.held.cancelled = True
    assert await attempt.settlement() == CancelAcknowledged(attempt.claimed.lease)
    assert bool(attempt.told) == (kind is Cancelled and cause is not None)
    assert all("no such card" in line for line in attempt.told)


async def test_the_log_of_an_attempt_says_that_its_lease_is_lost_and_is_written_in_any_case() -> None:
    attempt, finished = Attempt(for_ever), []

    async def finish(log: Any) -> None:
        finished.append(log)

    writers: Any = SimpleNamespace(finish=finish)
    attempt.runner._log_and_stream_writers = writers
    log: Any = SimpleNamespace(recorder=SimpleNamespace(add_final=lambda _level, text: attempt.told.append(text)))
    await attempt.runner._finish_log_and_stream(log, Release(attempt.claimed.lease))
    assert attempt.told == []
    await attempt.runner._finish_log_and_stream(log, None)
    assert len(attempt.told) == 1
    assert finished == [log, log]


async def test_while_the_database_is_away_a_task_loses_neither_an_attempt_nor_a_day() -> None:
    def acquire() -> Any:
        raise ConnectionError

    away: Any = SimpleNamespace(acquire=acquire)
    runner = Attempt(for_ever).runner
    runner._pool = away
    assert not await runner._was_unforeseen_before(claimed(errors=1))
    old = claimed(job_id=id_of_instant(datetime.now(UTC) - timedelta(days=3)))
    assert await runner._put_off(old) == Snoozing(old.lease, 30.0, missing_handler="p.s")


def test_a_settlement_goes_on_with_the_job_only_where_a_step_follows_and_the_slot_has_room() -> None:
    of = claimed()
    done, call = Completion(of.lease, value={"n": 1}), new_id()
    calls = (Call("", 1, "run", "child", child=call, step="child#1", queue="default", max_attempts=1),)
    suspending = Suspending(of.lease, calls, 0)
    snoozing = Snoozing(of.lease, 60.0)
    last = replace(of, is_last=True)
    goes_on = runner_module._with_next_step
    assert goes_on(done, of, HAS_ROOM) == done.claiming_next()
    assert goes_on(done, of, IS_FULL) == done
    assert goes_on(done, last, HAS_ROOM) == goes_on(done, last, IS_FULL) == done.of_last_step()
    suspended = goes_on(suspending, of, HAS_ROOM)
    assert isinstance(suspended, Suspending)
    assert suspended.step_to_claim == call
    assert goes_on(suspending, last, HAS_ROOM) == suspended
    assert goes_on(suspending, of, IS_FULL) == suspending
    assert goes_on(snoozing, of, HAS_ROOM) == goes_on(snoozing, last, HAS_ROOM) == snoozing


def test_an_outcome_says_what_became_of_the_task() -> None:
    lease = claimed().lease
    failure = Failure(lease, "error", "c", "m", retryable=True, delay=0.0)
    outcomes: list[tuple[Settlement, str, str]] = [
        (failure, "retry", "retried"),
        (failure, "failed", "failed"),
        (failure, "waiting", "parked"),
        (failure, "cancelled", "cancelled"),
        (Completion(lease), "succeeded", "succeeded"),
        (Completion(lease), "cancelled", "cancelled"),
        (Snoozing(lease, 1.0), "waiting", "parked"),
        (Suspending(lease, (), 0), "waiting", "suspended"),
        (Suspending(lease, (), 0), "pending", "released"),
        (Release(lease), "pending", "released"),
    ]
    for settlement, state, outcome in outcomes:
        assert runner_module._outcome(settlement, Answer(Verdict.SETTLED, state)) == outcome
        assert runner_module._outcome(settlement, Answer(Verdict.LOST, None)) == "lost"
    assert runner_module._outcome(Completion(lease), Answer(Verdict.SETTLED, None)) == "succeeded"


def test_a_time_limit_is_that_of_the_template_or_else_of_the_step() -> None:
    step = Step("s", timeout=timedelta(minutes=5))
    assert runner_module._time_limit(claimed(timeout_seconds=7), step) == 7.0
    assert runner_module._time_limit(claimed(), step) == 300.0


@pytest.mark.parametrize(("grace", "seconds"), [(0, 1.0), (1, 1.0), (7, 7.0), (10, 10.0), (3600, 10.0)])
def test_a_cancelled_attempt_has_the_grace_of_its_job_to_end_within_bounds(grace: int, seconds: float) -> None:
    assert runner_module._seconds_to_stop(claimed(grace_seconds=grace)) == seconds


def test_a_task_is_run_only_by_the_code_that_it_names_and_that_this_worker_has() -> None:
    steps = {"s": Step("s"), "without_code": Step("without_code")}
    loaded: Any = SimpleNamespace(by_name=steps, has_code_of=lambda step, _with_children: step.name == "s")
    runner = Attempt(for_ever).runner
    pipelines: Any = {"p": loaded}
    runner._pipelines, runner._isolated = pipelines, cast("Any", SimpleNamespace(pipelines=()))
    assert runner._declaration(claimed()) == (loaded, steps["s"])
    assert runner._declaration(claimed(pipeline="of a template", step="x", handler="p.s")) == (loaded, steps["s"])
    unknown = [{"step": "without_code"}, {"step": "unknown"}, {"pipeline": "unknown"}, {"handler": "p.unknown"}]
    assert [runner._declaration(claimed(**changes)) for changes in unknown] == [None] * 4


def on(rows: Rows) -> Runner:
    @asynccontextmanager
    async def acquire() -> Any:
        yield rows.connection

    pool: Any = SimpleNamespace(acquire=acquire)
    return Runner(NOTHING, pool, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING)


@pytest.mark.parametrize(
    ("age", "able", "seconds"),
    [(0, False, 30), (3600, False, 3600), (30 * 86_400, False, 86_400), (3600, True, 30)],
)
async def test_a_task_whose_code_no_worker_has_is_put_off_for_longer_as_its_job_ages(
    rows: Rows, age: int, seconds: int, *, able: bool
) -> None:
    """Each pause adds events to the job's history. A worker that has the code ends the wait."""
    await workers.register(
        rows.connection, uuid4(), host="h", pid=1, version="v", queues=["default"], handlers=["p.s" if able else "p.t"]
    )
    of = claimed(job_id=id_of_instant(datetime.now(UTC) - timedelta(seconds=age)))
    snoozing = await on(rows)._put_off(of)
    assert (snoozing.lease, snoozing.missing_handler) == (of.lease, "p.s")
    assert snoozing.delay == pytest.approx(seconds, abs=60 if seconds == 3600 else 0)
    assert (await on(rows)._put_off(replace(of, handler="p.x"))).missing_handler == "p.x"
    assert (await on(rows)._put_off(replace(of, job_id=uuid4()))).delay >= 30  # an id that tells no time


@pytest.mark.parametrize(
    ("error", "epoch", "seconds"),
    [
        (NoneForked("n"), 1, 5), (NoneForked("n"), 2, 10), (NoneForked("n"), 6, 160), (NoneForked("n"), 7, 300),
        (NoneForked("n"), 100_000, 300), (NoChild("n"), 1, 5), (NoChild("n"), 7, 5),
    ],
)  # fmt: skip
async def test_a_step_for_which_no_process_can_be_forked_is_put_off_for_longer_each_time(
    error: Exception, epoch: int, seconds: int
) -> None:
    """Each attempt fetches its inputs again, and adds events to the job's history. A full worker soon has room."""

    async def may_perform(_pipeline: object) -> bool:
        raise error

    rests: list[Callable[[], bool]] = []
    failing = ["p"]
    isolated: Any = SimpleNamespace(may_perform=may_perform, failing=failing.__contains__)
    slot: Any = SimpleNamespace(rest_while=rests.append)
    runner = Runner(NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, isolated, NOTHING)
    of = claimed()
    of = replace(of, lease=replace(of.lease, epoch=epoch))
    log: Any = SimpleNamespace(recorder=None)
    pipeline: Any = SimpleNamespace(name="p")
    held = HeldLease(of.lease, monotonic() + 600)
    settlement = await runner._perform(of, pipeline, Step("s", isolated=True), 60.0, held, log, slot)
    assert settlement == Snoozing(of.lease, seconds)
    assert len(rests) == isinstance(error, NoneForked), "its slot leaves the next such task to other workers"
    for rest in rests:
        assert rest()
        failing.clear()
        assert not rest()


async def test_only_an_unforeseen_error_right_after_another_of_the_same_task_is_its_last(rows: Rows) -> None:
    async def fails(of: Claimed, cause: str, code: str) -> Claimed:
        await fail(rows.connection, [Failure(of.lease, cause, code, "m", retryable=True, delay=0.0)])
        (again,) = await rows.claim_all()
        return again

    first = await rows.leased()
    assert not await on(rows)._was_unforeseen_before(first)
    unforeseen = await fails(first, "error", Unforeseen("").code)
    assert await on(rows)._was_unforeseen_before(unforeseen)
    crashed = await fails(unforeseen, "crash", "oom")
    assert await on(rows)._was_unforeseen_before(crashed)  # a crash between them says nothing of the code
    other = await fails(await rows.leased(), "error", "store_unavailable")
    assert not await on(rows)._was_unforeseen_before(other)
    assert await on(rows)._was_unforeseen_before(crashed)
    foreseen = await fails(crashed, "error", "store_unavailable")
    assert not await on(rows)._was_unforeseen_before(foreseen)
