"""What the runner settles for each way in which an attempt ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import asyncpg
import pytest
import structlog
from prometheus_client import REGISTRY as METRICS

from leasehold.domain.errors import Cancelled, LeaseLost, ObjectExists, Permanent, Retryable, StepError, Unforeseen
from leasehold.domain.ids import id_of_instant, new_id
from leasehold.domain.lease import Lease
from leasehold.domain.pipeline import Step
from leasehold.telemetry import traces
from leasehold.telemetry.logs import is_fact
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


# --- what surrounds an attempt


DONE = Answer(Verdict.SETTLED, "succeeded")
LOST = Answer(Verdict.LOST, None)


class Surroundings:
    """A runner of `steps`, each of which does what `handler` does. `acts`: what the runner has asked of the parts of
    the worker around it, in order. `answers`: how PostgreSQL answers the settlements; once there are none, DONE.
    """

    def __init__(self, handler: Handler, *answers: Answer | Exception, steps: tuple[Step, ...] = (Step("s"),)) -> None:
        self.acts: list[tuple[Any, ...]] = []
        self.answers = [*answers]
        held: dict[UUID, HeldLease] = {}

        def noted(name: str) -> Callable[..., None]:
            return lambda *arguments: self.acts.append((name, *arguments))

        def hold(lease: Lease, seconds: float) -> HeldLease:
            self.acts.append(("hold", lease, seconds))
            held[lease.task_id] = HeldLease(lease, monotonic() + 600)
            return held[lease.task_id]

        async def perform(*arguments: Any) -> Settlement:
            return await handler(*arguments)

        async def finish(_log: object) -> None:
            self.acts.append(("write the log",))

        async def settle(settlement: Settlement) -> Answer:
            # From now on another worker may have the task.
            is_known = held[settlement.lease.task_id].settlement_sent
            self.acts.append(("settle", settlement) if is_known else ("settle too early",))
            answer = self.answers.pop(0) if self.answers else DONE
            if isinstance(answer, Exception):
                raise answer
            return answer

        def settled(lease: Lease, *, committed: bool) -> None:
            self.acts.append(("suspended", lease, committed))

        def acquire() -> Any:
            raise ConnectionError

        recorder = SimpleNamespace(add_final=lambda *_arguments, **_options: None)
        parts: Any = SimpleNamespace(
            pipelines={
                "p": SimpleNamespace(
                    name="p", by_name={step.name: step for step in steps}, has_code_of=lambda *_arguments: True
                )
            },
            pool=SimpleNamespace(acquire=acquire),
            heartbeat=SimpleNamespace(hold=hold, drop=lambda dropped: self.acts.append(("drop", dropped.lease))),
            starts=SimpleNamespace(count=noted("start")),
            settlements=SimpleNamespace(settle=settle),
            admitter=SimpleNamespace(may_have_ended=noted("may admit another")),
            inline=SimpleNamespace(perform=perform, workflows=SimpleNamespace(settled=settled)),
            isolated=SimpleNamespace(pipelines=(), discard_speculations=noted("discard")),
            log=SimpleNamespace(open=lambda _claimed: SimpleNamespace(recorder=recorder), finish=finish),
        )
        self.runner = Runner(
            parts.pipelines, parts.pool, parts.heartbeat, parts.starts, parts.settlements, NOTHING, parts.admitter,
            NOTHING, parts.inline, parts.isolated, parts.log,
        )  # fmt: skip

    async def run(self, of: Claimed, parent: Mapping[str, str] | None = None) -> Claimed | None:
        # In a context of its own, as each attempt of a worker.
        return await asyncio.create_task(self.runner.run(of, parent, HAS_ROOM))

    @property
    def settled(self) -> list[Settlement]:
        return [act[1] for act in self.acts if act[0] == "settle"]


async def completes(of: Claimed, *_: Any) -> Settlement:
    return Completion(of.lease)


async def loses(*_: Any) -> Settlement:
    raise LeaseLost


async def test_an_attempt_is_settled_under_its_lease_after_its_log_and_the_worker_then_drops_the_lease() -> None:
    """The heartbeat renews the lease for the step's time limit and two minutes. Afterwards, the worker goes on with the
    step that the settlement has claimed.
    """
    of, follows = claimed(), claimed()
    around = Surroundings(completes, replace(DONE, next=follows))
    assert await around.run(of) is follows
    assert around.acts == [
        ("start", "default"),
        ("hold", of.lease, 420.0),
        ("write the log",),
        ("settle", Completion(of.lease).claiming_next()),
        ("drop", of.lease),
        ("discard", of, follows),
    ]


async def test_an_attempt_without_its_lease_writes_its_log_and_settles_nothing() -> None:
    of = claimed(timeout_seconds=7)
    around = Surroundings(loses)
    assert await around.run(of) is None
    assert around.acts == [
        ("start", "default"),
        ("hold", of.lease, 127.0),
        ("write the log",),
        ("drop", of.lease),
        ("discard", of, None),
    ]


async def test_a_task_whose_code_this_worker_lacks_is_put_off_under_its_lease() -> None:
    of = claimed(step="unknown")
    around = Surroundings(completes, Answer(Verdict.SETTLED, "waiting"))
    around.runner.release()
    assert await around.run(of) is None
    assert around.acts == [
        ("start", "default"),
        ("hold", of.lease, 120.0),
        ("write the log",),
        ("settle", Snoozing(of.lease, 30.0, missing_handler="p.unknown")),
        ("drop", of.lease),
        ("discard", of, None),
    ]


async def test_the_end_of_an_attempt_may_admit_a_job_only_if_its_own_job_has_limits() -> None:
    with_limits, without = claimed(gated=True), claimed()
    around = Surroundings(completes)
    for of in (without, with_limits):
        await around.run(of)
    assert [act for act in around.acts if act[0] == "may admit another"] == [("may admit another", with_limits.job_id)]
    assert around.acts[-1][0] == "may admit another", "after the settlement"


@pytest.mark.parametrize(
    ("answer", "committed"),
    [(Answer(Verdict.SETTLED, "waiting"), True), (Answer(Verdict.SETTLED, "pending"), False), (LOST, False)],
    ids=["suspended", "due again, because its job is cancelled", "lost"],
)
async def test_the_code_of_a_workflow_stays_in_memory_only_if_its_suspension_is_committed(
    answer: Answer, *, committed: bool
) -> None:
    async def suspends(of: Claimed, *_: Any) -> Settlement:
        return Suspending(of.lease, (), 0)

    around = Surroundings(suspends, answer)
    await around.run(of := claimed())
    assert [act for act in around.acts if act[0] == "suspended"] == [("suspended", of.lease, committed)]
    around = Surroundings(completes)
    await around.run(claimed())
    assert not [act for act in around.acts if act[0] == "suspended"]


HINT, JOB = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}, {"traceparent": f"00-{'a' * 32}-{'c' * 16}-01"}


@pytest.mark.parametrize(
    ("hint", "trace", "parent"),
    [(HINT, JOB, HINT), (None, JOB, JOB), (None, None, {})],
    ids=["found by its hint", "found by a poll", "of a job without a trace"],
)
async def test_the_span_of_an_attempt_belongs_to_its_hint_or_else_to_its_job_and_tells_how_the_attempt_ended(
    monkeypatch: pytest.MonkeyPatch, hint: dict[str, str] | None, trace: dict[str, str] | None, parent: dict[str, str]
) -> None:
    spans: list[tuple[str, Any, dict[str, Any]]] = []

    class Recorded(traces.Span):
        def __init__(self, attributes: dict[str, Any]) -> None:
            self.attributes = attributes

        def set_attributes(self, **attributes: str | float) -> None:
            self.attributes |= attributes

        def mark_failed(self, code: str) -> None:
            self.attributes["failed"] = code

    @contextmanager
    def recorded(name: str, _kind: str = "INTERNAL", *, parent: Any = None, **attributes: Any) -> Iterator[traces.Span]:
        if name != "settle":
            spans.append((name, parent, attributes))
        yield Recorded(attributes)

    async def fails(*_: Any) -> Settlement:
        raise Permanent("hopeless", "m")

    monkeypatch.setattr(traces, "span", recorded)
    of = claimed(trace=trace)
    for handler, answer in ((completes, DONE), (fails, Answer(Verdict.SETTLED, "failed")), (loses, LOST)):
        await Surroundings(handler, answer).run(of, hint)
    ids = {"leasehold_job_id": str(of.job_id), "leasehold_step": "s", "leasehold_attempt": 1}
    assert spans == [
        ("p s", parent, ids | {"leasehold_outcome": "succeeded"}),
        ("p s", parent, ids | {"leasehold_outcome": "failed", "failed": "hopeless"}),
        ("p s", parent, ids | {"leasehold_outcome": "lost"}),
    ]


@pytest.mark.parametrize("names", [(), ("request_id",), ("media_id",), ("request_id", "media_id")])
async def test_each_line_of_an_attempt_tells_whose_it_is_and_leads_to_its_request(names: tuple[str, ...]) -> None:
    """The request's own ids only if its job has them."""
    of = claimed(trace=JOB | {name: f"the {name}" for name in names})
    facts = {
        "job_id": of.job_id, "task_id": of.lease.task_id, "step": "s", "epoch": 1, "trace_id": "a" * 32,
        "request_id": "the request_id", "media_id": "the media_id",
    }  # fmt: skip
    in_lines: set[str] = set()

    async def logs(of: Claimed, *_: Any) -> Settlement:
        in_lines.update(name for name, value in facts.items() if is_fact(name, value))
        return Completion(of.lease)

    await Surroundings(logs).run(of)
    assert in_lines == {"job_id", "task_id", "step", "epoch", "trace_id", *names}


async def turns() -> None:
    """Let all that is ready run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_worker_that_ends_lets_short_steps_that_are_not_cancelable_finish_and_stops_all_others() -> None:
    """An order at a provider may be under way. Three minutes are short; a step with a longer limit is stopped."""
    minutes = timedelta(minutes=3)
    steps = (
        Step("order", cancelable=False, timeout=minutes),
        Step("long", cancelable=False, timeout=minutes + timedelta(seconds=1)),
        Step("any", timeout=minutes),
    )
    began: list[str] = []
    answered = {name: asyncio.Event() for name in ("first", "second")}

    async def works(of: Claimed, *_: Any) -> Settlement:
        began.append(of.step)
        if of.step == "any" and of.params.get("at_once"):
            return Completion(of.lease)
        await (answered[of.params["order"]].wait() if of.step == "order" else asyncio.Event().wait())
        return Completion(of.lease)

    around = Surroundings(works, steps=steps)
    await around.run(claimed(step="any", params={"at_once": True}))  # an end before `release` changes nothing
    around.acts.clear()
    orders = [claimed(step="order", params={"order": name}) for name in answered]
    others = [claimed(step="long"), claimed(step="any")]
    running = {of.lease: asyncio.create_task(around.run(of)) for of in (*orders, *others)}
    await turns()
    assert sorted(began) == ["any", "any", "long", "order", "order"]
    around.runner.release()
    finishing = asyncio.create_task(around.runner.finish())
    await turns()
    assert around.settled == [Release(of.lease) for of in others]
    for of, event in zip(orders, answered.values(), strict=True):
        assert not finishing.done(), "an order is under way"
        event.set()
        await turns()
        assert running[of.lease].done()
    assert finishing.done()
    assert [type(settlement) for settlement in around.settled] == [Release, Release, Completion, Completion]


async def test_a_worker_that_ends_without_such_steps_waits_for_nothing() -> None:
    around = Surroundings(completes, steps=(Step("s", cancelable=False),))
    await around.run(claimed(timeout_seconds=60))
    around.runner.release()
    finishing = asyncio.create_task(around.runner.finish())
    await turns()
    assert finishing.done()


@pytest.mark.parametrize(
    ("fails", "answer", "counted", "warned"),
    [
        (False, DONE, [], None),
        (True, Answer(Verdict.SETTLED, "retry"), ["retries"], "retried"),
        (True, Answer(Verdict.SETTLED, "failed", is_dead_letter=True), ["dead_letters"], "failed"),
        (True, Answer(Verdict.SETTLED, "failed"), [], "failed"),
        (True, Answer(Verdict.SETTLED, "waiting"), [], None),
        (True, LOST, ["zombie_writes_refused"], "lost"),
        (False, LOST, ["zombie_writes_refused"], "lost"),
    ],
    ids=[
        "succeeded", "retried", "a dead letter", "failed, but its workflow decides", "a workflow that sees a cancel",
        "failed without its lease", "succeeded without its lease",
    ],
)  # fmt: skip
async def test_a_retry_a_dead_letter_and_a_refused_write_are_counted_and_only_an_attempt_in_vain_is_a_warning(
    answer: Answer, counted: list[str], warned: str | None, *, fails: bool
) -> None:
    async def works(of: Claimed, *_: Any) -> Settlement:
        if fails:
            raise Retryable("m", code="away")
        return Completion(of.lease)

    def counts() -> dict[str, float]:
        labels = {"pipeline": "p", "step": "s", "code": "away"}
        return {
            "retries": METRICS.get_sample_value("leasehold_retries_total", labels) or 0.0,
            "dead_letters": METRICS.get_sample_value("leasehold_dead_letters_total", labels) or 0.0,
            "zombie_writes_refused": METRICS.get_sample_value("leasehold_zombie_writes_refused_total") or 0.0,
        }

    before = counts()
    with structlog.testing.capture_logs() as lines:
        await Surroundings(works, answer).run(claimed())
    assert [name for name, count in counts().items() if count != before[name]] == counted
    warnings = [
        (line["outcome"], line["code"])
        for line in lines
        if line["event"] == "attempt ended" and line["log_level"] == "warning"
    ]
    assert warnings == ([(warned, "away" if fails else None)] if warned else [])


@pytest.mark.parametrize(
    ("refusals", "code"),
    [
        ([asyncpg.DataError("a NUL")], "bad_output"),
        ([asyncpg.UniqueViolationError("a part")], None),
        ([asyncpg.UniqueViolationError("a part")] * 2, "spread_twice"),
    ],
)
async def test_a_settlement_that_postgresql_refuses_fails_the_attempt_for_good(
    refusals: list[Exception], code: str | None
) -> None:
    """Exception: the task of a part exists already. Another step may have fanned out at this moment, so try again."""
    around = Surroundings(completes, *refusals, DONE if code is None else Answer(Verdict.SETTLED, "failed"))
    await around.run(claimed())
    last = around.settled[-1]
    assert len(around.settled) == len(refusals) + 1
    if code is None:
        assert last == around.settled[0]
    else:
        assert isinstance(last, Failure)
        assert (last.code, last.retryable) == (code, False)


@pytest.mark.parametrize("is_fenced", [True, False])
async def test_an_isolated_step_runs_in_a_child_if_the_fences_suffice_and_is_put_off_if_not(
    monkeypatch: pytest.MonkeyPatch, *, is_fenced: bool
) -> None:
    async def may_perform(_pipeline: object) -> bool:
        return is_fenced

    async def perform(of: Claimed, *_: Any) -> Completion:
        return Completion(of.lease, value={"of": "a child"})

    isolated: Any = SimpleNamespace(may_perform=may_perform, perform=perform)
    around = Surroundings(completes, steps=(Step("s", isolated=True),))
    monkeypatch.setattr(around.runner, "_isolated", isolated)
    isolated.pipelines, isolated.discard_speculations = ("p",), lambda *_: None
    await around.run(of := claimed())
    expected: Settlement = Completion(of.lease, value={"of": "a child"}).claiming_next()
    assert around.settled == [expected if is_fenced else Snoozing(of.lease, 30.0, missing_handler="p.s")]


@pytest.mark.parametrize("error", [GeneratorExit(), KeyboardInterrupt()])
async def test_an_attempt_that_is_ended_from_outside_is_no_failure_of_its_handler(error: BaseException) -> None:
    """As when the program closes the event loop while the handler runs."""
    attempt = Attempt(for_ever)
    running = attempt.settlement()
    running.send(None)
    with pytest.raises(type(error)):
        running.throw(error)
    assert attempt.told == []
    (handler,) = attempt.runner._given_up
    handler.cancel()
    await asyncio.wait({handler})
