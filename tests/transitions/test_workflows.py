"""The journal's statements: what a workflow writes is fenced, and no news is lost while it suspends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, cast
from uuid import UUID, uuid4

import asyncpg
import pytest

from leasehold.db.database import Connection
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.errors import Conflict, LeaseLost, NotFound, TooMany
from leasehold.domain.ids import new_id
from leasehold.domain.lease import Lease
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.transitions import claims, concurrency, jobs, settlements, sweeps
from leasehold.transitions.claims import Claimed
from leasehold.transitions.jobs import AdmissionTerms
from leasehold.transitions.settlements import Completion, Failure, Snoozing, Suspending, Verdict
from leasehold.transitions.workflows import children as started_runs
from leasehold.transitions.workflows import reading, recording, signals
from leasehold.transitions.workflows.records import Call, Recorded, Recording
from tests.factories import Rows, assert_history, stale
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open


def step(number: int, *, attempts: int = 1) -> Call:
    return Call("", number, "run", "child", child=new_id(), step=f"child#{number}", queue="default",
                max_attempts=attempts, handler="one.only", argument={"n": number})  # fmt: skip


def wait(number: int, name: str = "go") -> Call:
    return Call("", number, "signal", name)


async def suspended(rows: Rows, *calls: Call, ends: int | None = None, delay: float | None = None) -> Claimed:
    """A workflow that has made these calls and waits."""
    claimed = await rows.leased()
    outcome = await settlements.suspend(rows.connection, [Suspending(claimed.lease, calls, 0, ends, delay)])
    assert outcome.verdicts == {claimed.lease.task_id: Verdict.SETTLED}
    return claimed


async def is_due(rows: Rows, workflow: Claimed) -> bool:
    return bool(
        await rows.connection.fetchval(
            "SELECT status = 'waiting' AND available_at <= clock_timestamp() FROM task WHERE id = $1",
            workflow.lease.task_id,
        )
    )


async def table(rows: Rows, name: str) -> list[dict[str, Any]]:
    return [dict(row) for row in await rows.connection.fetch(f"SELECT * FROM {name} x ORDER BY x::text")]


async def children(rows: Rows) -> list[Claimed]:
    return sorted((c for c in await rows.claim_all() if "#" in c.step), key=lambda claimed: claimed.step)


async def test_a_child_has_its_own_argument_and_prefix(rows: Rows) -> None:
    workflow = await suspended(rows, step(1), ends=1)
    (child,) = await children(rows)
    assert (child.params, child.handler) == ({"n": 1}, "one.only")
    assert child.output_prefix == f"{workflow.output_prefix}/child.1"
    await assert_history(rows, workflow.job_id)


async def test_a_workflow_that_is_claimed_with_the_end_of_its_step_was_waiting(rows: Rows) -> None:
    """Its worker goes on with the coroutine in memory, and with the stream."""
    workflow = await suspended(rows, step(1), ends=1)
    (child,) = await children(rows)
    outcome = await settlements.complete(rows.connection, [Completion(child.lease, claim_next=True)], rows.terms)
    claimed = outcome.next_steps[child.lease.task_id]
    assert (claimed.lease.task_id, claimed.lease.epoch) == (workflow.lease.task_id, workflow.lease.epoch + 1)
    assert claimed.previous_state == "waiting"


@pytest.mark.parametrize("failing", [False, True])
async def test_a_workflow_is_due_once_as_many_steps_have_ended_as_it_waits_for(rows: Rows, failing: bool) -> None:
    workflow = await suspended(rows, step(1), step(2), step(3), ends=2)
    first, second, third = await children(rows)
    await settlements.complete(rows.connection, [Completion(first.lease)])
    assert not await is_due(rows, workflow)
    if failing:
        outcome = await settlements.fail(rows.connection, [Failure(second.lease, "error", "c", "m", False, 0.0)])
    else:
        outcome = await settlements.complete(rows.connection, [Completion(second.lease)])
    assert [hint.hint.task_id for hint in outcome.announcements] == [workflow.lease.task_id]
    assert await is_due(rows, workflow)
    # The third end neither wakes it again nor is lost: it is read with the journal.
    outcome = await settlements.complete(rows.connection, [Completion(third.lease)])
    assert outcome.announcements == []
    assert (await rows.job(workflow.job_id))["status"] == "running"
    await assert_history(rows, workflow.job_id)


async def test_steps_that_end_together_count_together(rows: Rows) -> None:
    workflow = await suspended(rows, step(1), step(2), ends=2)
    done = [Completion(child.lease) for child in await children(rows)]
    outcome = await settlements.complete(rows.connection, done)
    assert [hint.hint.task_id for hint in outcome.announcements] == [workflow.lease.task_id]


async def test_a_step_that_is_lost_too_often_fails_alone_and_wakes_its_workflow(rows: Rows) -> None:
    workflow = await suspended(rows, step(1), ends=1)
    (child,) = await children(rows)
    await rows.connection.execute("UPDATE task SET losses = 9 WHERE id = $1", child.lease.task_id)
    lost, hints, ended = await sweeps.expire_leases(rows.connection, [child.lease.owner], 5)
    assert (lost, ended) == (1, [])
    assert [hint.hint.task_id for hint in hints] == [workflow.lease.task_id]
    assert await is_due(rows, workflow)
    await assert_history(rows, workflow.job_id)


async def test_what_ends_while_the_workflow_runs_makes_its_next_suspension_due_at_once(rows: Rows) -> None:
    workflow = await suspended(rows, step(1), step(2), ends=1)
    first, second = await children(rows)
    await settlements.complete(rows.connection, [Completion(first.lease)])
    (again,) = await claims.claim(rows.connection, rows.terms, [workflow.lease.task_id])
    seen = (await reading.read(rows.connection, again.lease)).news
    await settlements.complete(rows.connection, [Completion(second.lease)])  # after the read, before the suspension
    outcome = await settlements.suspend(rows.connection, [Suspending(again.lease, (), seen, 1)])
    assert [hint.hint.task_id for hint in outcome.announcements] == [workflow.lease.task_id]
    assert await is_due(rows, workflow)


async def test_a_step_that_ends_while_the_workflow_suspends_is_not_missed(rows: Rows, another: Open) -> None:
    """Its commit waits for the suspension's lock on the job, and then sees the row that waits."""
    workflow = await suspended(rows, step(1), step(2), ends=1)
    first, second = await children(rows)
    await settlements.complete(rows.connection, [Completion(first.lease)])
    (again,) = await claims.claim(rows.connection, rows.terms, [workflow.lease.task_id])
    seen = (await reading.read(rows.connection, again.lease)).news
    other = (await another()).connection
    async with other.transaction():
        await settlements.suspend(other, [Suspending(again.lease, (), seen, 1)])
        ending = asyncio.create_task(settlements.complete(rows.connection, [Completion(second.lease)]))
        await until_waiting(other)
    await ending
    assert await is_due(rows, workflow)


async def test_the_worker_that_ends_the_last_step_claims_the_workflow_with_the_same_commit(rows: Rows) -> None:
    workflow = await suspended(rows, step(1), ends=1)
    (child,) = await children(rows)
    outcome = await settlements.complete(rows.connection, [Completion(child.lease, claim_next=True)], rows.terms)
    claimed = outcome.next_steps[child.lease.task_id]
    assert (claimed.lease.task_id, claimed.lease.epoch) == (workflow.lease.task_id, 2)
    assert claimed.params == workflow.params
    assert outcome.announcements == []
    await assert_history(rows, workflow.job_id)


async def test_a_suspension_claims_a_step_that_it_starts(rows: Rows) -> None:
    """With all that a claim by its hint has, and without a hint."""
    calls = (step(1), step(2))
    workflow = await rows.leased()
    await rows.connection.execute("INSERT INTO paused_queue (queue, reason) VALUES ('elsewhere', 'r')")
    suspending = Suspending(workflow.lease, calls, 0, 2, step_to_claim=calls[1].child)
    outcome = await settlements.suspend(rows.connection, [suspending], rows.terms)
    claimed = outcome.next_steps[workflow.lease.task_id]
    assert claimed.waited == 0
    assert [hint.hint.task_id for hint in outcome.announcements] == [calls[0].child]
    row = await rows.task(claimed.lease.task_id)
    assert (row["status"], row["lease_owner"], row["epoch"], row["attempt"]) == ("running", rows.terms.owner, 1, 1)
    assert (await rows.job(workflow.job_id))["leased"] == 1
    await assert_history(rows, workflow.job_id)
    await settlements.release(rows.connection, [claimed.lease])
    again = {one.lease.task_id: one for one in await children(rows)}[claimed.lease.task_id]
    of_claim: dict[str, Any] = {"lease": again.lease, "waited": 0.0}
    assert replace(claimed, **of_claim) == replace(again, **of_claim)


@pytest.mark.parametrize("without", ["terms", "choice", "queue", "our own workers alone"])
async def test_a_step_that_the_suspension_may_not_claim_gets_a_hint(rows: Rows, without: str) -> None:
    call = step(1)
    workflow = await rows.leased()
    if without == "queue":
        await rows.connection.execute("INSERT INTO paused_queue (queue, reason) VALUES ('default', 'r')")
    if without == "our own workers alone":
        await rows.connection.execute("UPDATE job SET external = 1 WHERE id = $1", workflow.job_id)
    suspending = Suspending(workflow.lease, (call,), 0, 1, step_to_claim=None if without == "choice" else call.child)
    terms = None if without == "terms" else rows.terms
    outcome = await settlements.suspend(rows.connection, [suspending], terms)
    assert outcome.next_steps == {}
    assert [hint.hint.task_id for hint in outcome.announcements] == [call.child]
    assert call.child is not None
    assert (await rows.task(call.child))["status"] == "pending"
    await assert_history(rows, workflow.job_id)


async def test_suspensions_of_one_statement_claim_each_its_own_step(rows: Rows) -> None:
    workflows = [await rows.leased() for _ in range(3)]
    calls = [(step(1), step(2)) for _ in workflows]
    chosen = [calls[0][0].child, None, calls[2][1].child]
    batch = [
        Suspending(workflow.lease, made, 0, 1, step_to_claim=child)
        for workflow, made, child in zip(workflows, calls, chosen, strict=True)
    ]
    outcome = await settlements.suspend(rows.connection, batch, rows.terms)
    claimed = [outcome.next_steps.get(workflow.lease.task_id) for workflow in workflows]
    assert [None if one is None else one.lease.task_id for one in claimed] == chosen
    assert [one.params for one in claimed if one is not None] == [{"n": 1}, {"n": 2}]
    assert len(outcome.announcements) == 4
    again = await settlements.suspend(rows.connection, batch, rows.terms)  # its answer was lost
    assert (again.next_steps, again.announcements) == ({}, [])
    assert set(again.verdicts.values()) == {Verdict.SETTLED}
    for workflow in workflows:
        await assert_history(rows, workflow.job_id)


async def test_a_signal_between_the_read_and_the_suspension_wakes(rows: Rows) -> None:
    workflow = await rows.leased()
    seen = (await reading.read(rows.connection, workflow.lease)).news
    assert await _send(rows, workflow) == []  # it runs: nobody needs a hint
    await settlements.suspend(rows.connection, [Suspending(workflow.lease, (wait(1),), seen)])
    assert await is_due(rows, workflow)


async def test_a_signal_that_comes_while_the_workflow_suspends_wakes_it(rows: Rows, another: Open) -> None:
    workflow = await rows.leased()
    other = (await another()).connection
    async with other.transaction():
        await settlements.suspend(other, [Suspending(workflow.lease, (wait(1),), 0)])
        sending = asyncio.create_task(_send(rows, workflow))
        await until_waiting(other)
    assert [hint.hint.task_id for hint in await sending] == [workflow.lease.task_id]
    assert await is_due(rows, workflow)


async def test_only_the_signal_that_is_waited_for_wakes_and_it_is_consumed_with_its_record(rows: Rows) -> None:
    workflow = await suspended(rows, wait(1))
    assert await _send(rows, workflow, "other") == []
    assert not await is_due(rows, workflow)
    await _send(rows, workflow)
    (again,) = await claims.claim(rows.connection, rows.terms, [workflow.lease.task_id])
    journal = await reading.read(rows.connection, again.lease)
    assert [(signal.name, signal.payload) for signal in journal.signals] == [("other", 1), ("go", 1)]
    taken = Call("", 1, "signal", "go", "done", {"value": 1}, signal=journal.signals[1].id)
    for _ in range(2):  # an answer that is lost is asked for again
        answers, _ = await recording.record(rows.connection, [Recording(again.lease, (taken,))])
        assert answers == {again.lease.task_id: Recorded(committed=True, cancelling=False)}
    after = await reading.read(rows.connection, again.lease)
    assert [signal.name for signal in after.signals] == ["other"]
    assert [(entry.state, entry.value) for entry in after.entries] == [("done", {"value": 1})]


async def test_a_step_beside_a_workflow_snoozes_on_when_the_workflow_is_woken(rows: Rows) -> None:
    """By a signal, and by the end of a run that it awaits: a handler that sleeps by a snooze must not wake early."""
    two = Pipeline("two", module="", steps=[Step("a"), Step("b", needs=())])
    await rows.submit(two)
    workflow, plain = sorted(await rows.claim_all(), key=lambda claimed: claimed.step)
    ended = await rows.leased()
    await settlements.complete(rows.connection, [Completion(ended.lease)])
    await settlements.snooze(rows.connection, [Snoozing(plain.lease, 3600.0)])
    calls = (wait(1), Call("", 2, "result", "only", child=ended.job_id))
    await settlements.suspend(rows.connection, [Suspending(workflow.lease, calls, 0)])
    assert len(await _send(rows, workflow)) == 1
    assert (await is_due(rows, workflow), await is_due(rows, plain)) == (True, False)
    await rows.connection.execute("UPDATE task SET available_at = 'infinity' WHERE id = $1", workflow.lease.task_id)
    assert len(await started_runs.wake_waiting(rows.connection)) == 1
    assert (await is_due(rows, workflow), await is_due(rows, plain)) == (True, False)


async def _send(rows: Rows, workflow: Claimed, name: str = "go", at_most: int = 1000) -> list[Any]:
    async with rows.connection.transaction():
        return list(await signals.send(rows.connection, workflow.job_id, "t", name, 1, at_most=at_most))


async def test_a_run_takes_so_many_signals_and_none_when_it_has_ended(rows: Rows) -> None:
    workflow = await rows.leased()
    for _ in range(3):
        await _send(rows, workflow, at_most=3)
    with pytest.raises(TooMany) as refused:
        await _send(rows, workflow, at_most=3)
    assert refused.value.code == "too_many_signals"
    await settlements.complete(rows.connection, [Completion(workflow.lease)])
    with pytest.raises(Conflict, match="has ended"):
        await _send(rows, workflow)
    with pytest.raises(NotFound):
        async with rows.connection.transaction():
            await signals.send(rows.connection, workflow.job_id, "another tenant", "go", 1, at_most=3)


async def test_a_run_that_is_being_cancelled_takes_no_signal(rows: Rows) -> None:
    workflow = await suspended(rows, wait(1))
    await jobs.request_cancel(rows.connection, [workflow.job_id], "t", reason="r", by="b")
    with pytest.raises(Conflict, match="is being cancelled"):
        await _send(rows, workflow)
    assert await table(rows, "signal") == []


async def test_a_signal_wakes_the_workflow_of_its_own_run_and_touches_no_other_task(rows: Rows) -> None:
    """Neither another workflow that waits for a signal of this name or runs, nor a step that the workflow has started.
    Signals to other runs do not count.
    """
    own = await suspended(rows, wait(1), step(2), ends=1)
    assert len(await children(rows)) == 1
    await suspended(rows, wait(1))
    await _send(rows, await rows.leased())
    tasks = await table(rows, "task")
    (hint,) = await _send(rows, own, at_most=1)
    assert hint.hint.task_id == own.lease.task_id
    assert await is_due(rows, own)
    (task,) = [row for row in tasks if row["id"] == own.lease.task_id]
    woken = await rows.task(own.lease.task_id)
    assert woken == task | {"news": task["news"] + 1, "wake_at": None, "available_at": woken["available_at"]}
    assert [row["id"] for row in await table(rows, "task") if row not in tasks] == [own.lease.task_id]
    with pytest.raises(NotFound):
        await signals.send(rows.connection, uuid4(), "t", "go", 1, at_most=9)


async def test_a_signal_for_which_the_workflow_does_not_wait_wakes_nobody(rows: Rows) -> None:
    """The wait for it has ended, another run waits for it, or a call of another kind has its name."""
    await suspended(rows, wait(1))
    calls = (wait(1, "other"), Call("", 2, "signal", "go", "timed_out"), Call("", 3, "result", "go", child=uuid4()))
    own = await suspended(rows, *calls)
    tasks = await table(rows, "task")
    assert await _send(rows, own) == []
    assert await table(rows, "task") == tasks


async def test_the_open_waits_of_a_run_are_read_with_the_schema_of_the_first_for_each_name(rows: Rows) -> None:
    """Neither those of another run, nor those that have ended, nor calls of another kind. Nobody else reads them."""

    def asks(branch: str, number: int, name: str, schema: Any, *, kind: str = "signal", state: str = "open") -> Call:
        return Call(branch, number, kind, name, state, {"schema": schema})

    await suspended(rows, asks("", 0, "go", {"const": "another run"}), asks("", 1, "other", {"const": "another run"}))
    own = await suspended(
        rows,
        asks("", 1, "go", {"const": "ended"}, state="done"),
        asks("", 2, "go", {"const": "of another kind"}, kind="result"),
        asks("", 3, "go", {"type": "integer"}),
        asks("", 4, "past", {"const": "ended"}, state="timed_out"),
        asks("1.0/", 1, "go", {"type": "string"}),
        wait(5, "any"),
    )
    waits = await signals.waits_of(rows.connection, own.job_id, "t")
    assert [(one["name"], one["schema"], one["branch"], one["number"], one["epoch"]) for one in waits] == [
        ("any", None, "", 5, 1),
        ("go", {"type": "integer"}, "", 3, 1),
    ]
    names = ("go", "any", "past", "other")
    schemas = [await signals.schema_of(rows.connection, own.job_id, "t", name) for name in names]
    assert schemas == [{"type": "integer"}, None, None, None]
    assert await signals.waits_of(rows.connection, own.job_id, "another tenant") == []
    assert await signals.schema_of(rows.connection, own.job_id, "another tenant", "go") is None


WRONG: dict[str, Callable[[Lease], Lease]] = {
    "an older epoch": lambda lease: stale(lease, epoch=lease.epoch - 1),
    "another owner": lambda lease: stale(lease, owner=uuid4()),
    "an unknown task": lambda lease: stale(lease, task_id=uuid4()),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_zombie_writes_nothing_to_the_journal_and_reads_nothing(rows: Rows, wrong: str) -> None:
    workflow = await rows.leased()
    lease = WRONG[wrong](workflow.lease)
    answers, hints = await recording.record(rows.connection, [Recording(lease, (step(1), wait(2)))])
    assert (answers[lease.task_id].committed, hints) == (False, [])
    with pytest.raises(LeaseLost):
        await reading.read(rows.connection, lease)
    assert await rows.connection.fetchval("SELECT count(*) FROM journal") == 0
    assert await rows.connection.fetchval("SELECT count(*) FROM task") == 1


async def test_a_row_with_a_result_never_changes_and_a_repeated_write_starts_nothing_twice(rows: Rows) -> None:
    workflow = await rows.leased()
    calls = (step(1), Call("", 2, "call", "f", "done", {"value": 1}))
    for _ in range(2):
        await recording.record(rows.connection, [Recording(workflow.lease, calls)])
    other = Call("", 2, "call", "f", "done", {"value": 2})
    await recording.record(rows.connection, [Recording(workflow.lease, (other,))])
    entries = (await reading.read(rows.connection, workflow.lease)).entries
    assert [(entry.number, entry.value) for entry in entries] == [(1, None), (2, {"value": 1})]
    assert (await rows.job(workflow.job_id))["steps_left"] == 2
    await assert_history(rows, workflow.job_id)


async def test_each_step_that_a_running_workflow_starts_has_a_hint_and_counts_in_its_own_run(rows: Rows) -> None:
    workflows = [await rows.leased() for _ in range(3)]
    calls = [tuple(step(number) for number in range(count)) for count in range(3)]
    batch = [Recording(workflow.lease, made) for workflow, made in zip(workflows, calls, strict=True)]
    _, hints = await recording.record(rows.connection, batch)
    assert {hint.hint.task_id for hint in hints} == {call.child for made in calls for call in made}
    assert len(hints) == 3
    assert [(await rows.job(workflow.job_id))["steps_left"] for workflow in workflows] == [1, 2, 3]


async def test_a_later_attempt_leaves_a_wait_as_it_was_first_recorded(rows: Rows) -> None:
    """The place and the epoch identify the wait for those who may end it."""
    workflow = await suspended(rows, replace(wait(1), value={"schema": {"type": "string"}}), delay=0.0)
    (waits,) = await signals.waits_of(rows.connection, workflow.job_id, "t")
    (again,) = await claims.claim(rows.connection, rows.terms, [workflow.lease.task_id])
    assert again.lease.epoch > workflow.lease.epoch
    await recording.record(rows.connection, [Recording(again.lease, (wait(1),))])
    assert list(await signals.waits_of(rows.connection, workflow.job_id, "t")) == [waits]


async def test_a_workflow_consumes_only_signals_to_its_own_run(rows: Rows) -> None:
    own, other = [await rows.leased() for _ in range(2)]
    await _send(rows, other)
    (signal,) = (await reading.read(rows.connection, other.lease)).signals
    taken = Call("", 1, "signal", "go", "done", {"value": 1}, signal=signal.id)
    await recording.record(rows.connection, [Recording(own.lease, (taken,))])
    assert (await reading.read(rows.connection, other.lease)).signals == [signal]


async def test_a_workflow_reads_the_signals_to_its_own_run_while_it_has_the_lease(rows: Rows) -> None:
    """The same worker has the lease of another workflow, to which an older signal of this name has come."""
    other, own = [await rows.leased() for _ in range(2)]
    for workflow in (other, own):
        await _send(rows, workflow)
    (sent,) = await rows.connection.fetch("SELECT id FROM signal WHERE job_id = $1", own.job_id)
    for places in (None, [("", 1)]):
        (journal,) = await reading.read_each(rows.connection, [reading.Reading(own.lease, places)])
        assert journal is not None
        assert [signal.id for signal in journal.signals] == [sent["id"]]
    signal = await reading.read_signal(rows.connection, own.lease, "go", 0)
    assert signal is not None
    assert signal.id == sent["id"]
    for wrong in WRONG.values():
        assert await reading.read_signal(rows.connection, wrong(own.lease), "go", 0) is None


async def test_a_journal_belongs_to_one_workflow_of_its_run(rows: Rows) -> None:
    """Another step of the run that is a workflow, too, is told so before it makes its first call."""
    await rows.submit(Pipeline("two", module="", steps=[Step("a"), Step("b", needs=())]))
    first, second = await rows.claim_all()
    stranger = await rows.leased()

    async def is_of_other_step() -> list[bool]:
        journals = [await reading.read(rows.connection, one.lease) for one in (first, second, stranger)]
        return [journal.is_of_other_step for journal in journals]

    assert await is_of_other_step() == [False, False, False]
    await recording.record(rows.connection, [Recording(first.lease, (wait(1),))])
    assert await is_of_other_step() == [False, True, False]


async def attempt(rows: Rows, task_id: UUID | None, *, code: str | None = None, value: Any = None) -> None:
    """An attempt of this step, which fails with the code, or succeeds with the value."""
    assert task_id is not None
    (claimed,) = await claims.claim(rows.connection, rows.terms, [task_id])
    if code is None:
        await settlements.complete(rows.connection, [Completion(claimed.lease, value={"value": value})])
    else:
        await settlements.fail(rows.connection, [Failure(claimed.lease, "error", code, f"was {code}", True, 0.0)])


async def run_with_step(rows: Rows, value: Any, tenant: str = "t") -> UUID:
    """A run that has succeeded with the value. Its workflow has started a step."""
    workflow, call = await rows.leased(tenant=tenant), step(1)
    await settlements.suspend(rows.connection, [Suspending(workflow.lease, (call,), 0, 1)])
    await attempt(rows, call.child, value="of its step")
    await attempt(rows, workflow.lease.task_id, value=value)
    return workflow.job_id


async def test_a_journal_has_each_step_and_each_awaited_run_as_it_is_now(rows: Rows) -> None:
    """With the error of the last attempt, or the reason of the cancel. The start of a run tells nothing of the run. Of
    a deleted run there is nothing to tell, and another tenant's run is as if deleted. Another workflow has calls at the
    same places, and another step has failed more often.
    """
    places = [("", number) for number in range(1, 10)]
    stranger = await rows.leased()
    calls = tuple(Call("", number, "call", "f", "done", {"value": "foreign"}) for _, number in places)
    await recording.record(rows.connection, [Recording(stranger.lease, calls)])
    (hint,) = await rows.submit()
    for _ in range(3):
        await attempt(rows, hint.hint.task_id, code="foreign")
    (hint,) = await rows.submit()
    failed = (await rows.task(hint.hint.task_id))["job_id"]
    for code in ("one", "two", "three"):
        await attempt(rows, hint.hint.task_id, code=code)
    cancelled = await rows.leased()
    await jobs.request_cancel(rows.connection, [cancelled.job_id], "t", reason="not needed", by="b")
    await settlements.acknowledge_cancel(rows.connection, [cancelled.lease])
    steps = [step(1, attempts=2), step(2, attempts=2), step(3)]
    awaited = [await run_with_step(rows, 5), failed, cancelled.job_id, await run_with_step(rows, 8, "u"), uuid4()]
    ends = [Call("", number, "result", "one", child=run) for number, run in enumerate(awaited, 5)]
    own = await rows.leased()
    made = (*steps, Call("", 4, "start", "one", child=failed), *ends)
    await recording.record(rows.connection, [Recording(own.lease, made)])
    await attempt(rows, steps[0].child, code="early")
    await attempt(rows, steps[0].child, value=1)
    for code in ("early", "late"):
        await attempt(rows, steps[1].child, code=code)
    readings = [reading.Reading(own.lease), reading.Reading(own.lease, places)]
    for journal in (
        *await reading.read_each(rows.connection, readings),
        await reading.read(rows.connection, own.lease),
        await reading.read(rows.connection, own.lease, places),
    ):
        assert journal is not None
        entries = [(one.number, one.child, one.status, one.value, one.code, one.message) for one in journal.entries]
        assert entries == [
            (1, steps[0].child, "succeeded", {"value": 1}, None, None),
            (2, steps[1].child, "failed", None, "late", "was late"),
            (3, steps[2].child, "pending", None, None, None),
            (4, failed, None, None, None, None),
            (5, awaited[0], "succeeded", {"value": 5}, None, None),
            (6, failed, "failed", None, "three", "was three"),
            (7, cancelled.job_id, "cancelled", None, None, "not needed"),
            (8, awaited[3], None, None, None, None),
            (9, awaited[4], None, None, None, None),
        ]


async def test_a_journal_tells_for_how_long_each_call_waits_yet(rows: Rows) -> None:
    """A wait without a time does not end by itself, nor does one for a run, whose end the row has in its place."""
    child = await rows.leased()
    calls = (wait(1), Call("", 2, "sleep", "", delay=3600.0), Call("", 3, "result", "one", child=child.job_id))
    workflow = await suspended(rows, *calls, Call("", 4, "sleep", "", delay=-1.0))
    await settlements.complete(rows.connection, [Completion(child.lease)])
    assert len(await started_runs.wake_waiting(rows.connection)) == 1
    (claimed,) = await claims.claim(rows.connection, rows.terms, [workflow.lease.task_id])
    unending, sleep, result, over = (await reading.read(rows.connection, claimed.lease)).entries
    assert (unending.seconds, result.seconds, over.seconds) == (None, None, 0)
    assert sleep.seconds is not None
    assert 0 < sleep.seconds <= 3600


async def test_a_journal_tells_the_end_of_each_wait_and_when_it_was_read(rows: Rows) -> None:
    workflow = await rows.leased()
    calls = (Call("", 1, "signal", "one", delay=3600.0), wait(2), Call("", 3, "sleep", "", delay=-3600.0))
    await recording.record(rows.connection, [Recording(workflow.lease, calls)])
    before = await rows.connection.fetchval("SELECT clock_timestamp()")
    journal = await reading.read(rows.connection, workflow.lease)
    assert before < journal.read_at < before + timedelta(minutes=10)
    ends = {entry.number: entry.at - before for entry in journal.entries}
    assert timedelta(minutes=50) < ends[1] < timedelta(hours=1)
    assert timedelta(minutes=-10) < ends[2] < timedelta(0)  # it has none: when the row was written
    assert timedelta(minutes=-70) < ends[3] < timedelta(hours=-1)


async def test_a_step_that_ends_after_its_workflow_changes_nothing_of_the_workflow(rows: Rows) -> None:
    workflow = await rows.leased()
    await recording.record(rows.connection, [Recording(workflow.lease, (step(1),))])
    await settlements.complete(rows.connection, [Completion(workflow.lease)])
    before = await rows.task(workflow.lease.task_id)
    (child,) = await children(rows)
    outcome = await settlements.complete(rows.connection, [Completion(child.lease, claim_next=True)], rows.terms)
    assert (outcome.announcements, outcome.next_steps) == ([], {})
    assert await rows.task(workflow.lease.task_id) == before
    assert (await rows.job(workflow.job_id))["status"] == "succeeded"
    await assert_history(rows, workflow.job_id)


async def test_a_run_that_is_being_cancelled_records_and_starts_nothing(rows: Rows) -> None:
    workflow = await rows.leased()
    await jobs.request_cancel(rows.connection, [workflow.job_id], "t", reason="r", by="b")
    answers, _ = await recording.record(rows.connection, [Recording(workflow.lease, (step(1),))])
    assert answers == {workflow.lease.task_id: Recorded(committed=False, cancelling=True)}
    assert await rows.connection.fetchval("SELECT count(*) FROM journal") == 0


async def test_progress_forgives_what_the_worker_lost_before(rows: Rows) -> None:
    """It forgives nothing to another workflow."""
    workflow, other = await rows.leased(), await rows.leased()
    for verb, losses, errors in (("record", 3, 1), ("record", 1, 0), ("record", 0, 1), ("suspend", 3, 1)):
        await rows.connection.execute("UPDATE task SET losses = $1, errors = $2", losses, errors)
        before = await rows.task(other.lease.task_id)
        if verb == "record":
            await recording.record(rows.connection, [Recording(workflow.lease, (wait(1),))])
        else:
            await settlements.suspend(rows.connection, [Suspending(workflow.lease, (), 0)])
        row = await rows.task(workflow.lease.task_id)
        assert (row["losses"], row["errors"]) == (0, 0)
        assert await rows.task(other.lease.task_id) == before


@pytest.mark.parametrize(
    ("snoozing", "losses"),
    [({"by_step": True}, 0), ({"by_step": True, "missing_handler": "one.b"}, 0), ({"missing_handler": "one.only"}, 3),
     ({}, 3)],
)  # fmt: skip
async def test_a_snooze_of_the_step_itself_forgives_what_the_worker_lost_before(
    rows: Rows, snoozing: dict[str, Any], losses: int
) -> None:
    """A step that asks to run later has not killed its worker. A worker may also put a step off that it has not run."""
    claimed = await rows.leased()
    await rows.connection.execute("UPDATE task SET losses = 3, errors = 1 WHERE id = $1", claimed.lease.task_id)
    await settlements.snooze(rows.connection, [Snoozing(claimed.lease, 0.0, **snoozing)])
    row = await rows.task(claimed.lease.task_id)
    assert (row["status"], row["losses"], row["errors"]) == ("waiting", losses, 1)


@pytest.mark.parametrize("called_since", [False, True])
async def test_a_replay_revives_a_failed_step_unless_the_journal_depends_on_its_failure(
    rows: Rows, called_since: bool
) -> None:
    workflow = await suspended(rows, step(1), ends=1)
    (child,) = await children(rows)
    await settlements.fail(rows.connection, [Failure(child.lease, "error", "c", "m", False, 0.0)])
    (again,) = await claims.claim(rows.connection, rows.terms, [workflow.lease.task_id])
    if called_since:
        await recording.record(rows.connection, [Recording(again.lease, (Call("", 2, "call", "f", "done", {}),))])
    await settlements.fail(rows.connection, [Failure(again.lease, "error", "c", "m", False, 0.0)])
    assert (await rows.job(workflow.job_id))["status"] == "failed"
    assert await jobs.replay(rows.connection, workflow.job_id, "t") is not None
    assert (await rows.task(child.lease.task_id))["status"] == ("failed" if called_since else "pending")
    assert (await rows.task(workflow.lease.task_id))["status"] == "pending"
    await assert_history(rows, workflow.job_id)


async def test_a_workflow_from_which_its_run_goes_on_keeps_the_steps_that_it_has_started_and_waits_for_none(
    rows: Rows,
) -> None:
    """Its journal has their results, and it may have gone on after a failure."""
    workflow = await suspended(rows, step(1), step(2), ends=2)
    done, failed = await children(rows)
    await settlements.complete(rows.connection, [Completion(done.lease, value={"value": 1})])
    await settlements.fail(rows.connection, [Failure(failed.lease, "error", "c", "m", False, 0.0)])
    (again,) = await claims.claim(rows.connection, rows.terms, [workflow.lease.task_id])
    await recording.record(rows.connection, [Recording(again.lease, (Call("", 3, "call", "f", "done", {}),))])
    await settlements.fail(rows.connection, [Failure(again.lease, "error", "c", "m", False, 0.0)])
    await jobs.replay(rows.connection, workflow.job_id, "t", from_step=workflow.step)
    await assert_history(rows, workflow.job_id)
    (again,) = await claims.claim(rows.connection, rows.terms, [workflow.lease.task_id])
    entries = (await reading.read(rows.connection, again.lease)).entries
    assert [(entry.status, entry.value) for entry in entries] == [
        ("succeeded", {"value": 1}),
        ("failed", None),
        (None, {}),
    ]


@pytest.mark.parametrize("called_since", [False, True])
async def test_a_retried_workflow_that_waited_at_a_limit_goes_on_whatever_becomes_of_its_steps(
    rows: Rows, called_since: bool
) -> None:
    """A workflow needs no step to begin: neither one that stays failed, nor one that runs again and fails again."""
    workflow = await suspended(rows, step(1), step(2), ends=2)
    failures = [Failure(child.lease, "error", "c", "m", False, 0.0) for child in await children(rows)]
    await settlements.fail(rows.connection, failures)
    (again,) = await claims.claim(rows.connection, rows.terms, [workflow.lease.task_id])
    if called_since:
        await recording.record(rows.connection, [Recording(again.lease, (Call("", 3, "call", "f", "done", {}),))])
    await settlements.fail(rows.connection, [Failure(again.lease, "error", "c", "m", False, 0.0)])
    limit = ConcurrencyLimit("t", "k", at_most=1)
    assert await jobs.replay(rows.connection, workflow.job_id, "t", terms=AdmissionTerms([limit])) == []
    await assert_history(rows, workflow.job_id)
    hints = await concurrency.admit(rows.connection, [("t", "k")])
    assert workflow.lease.task_id in {hint.hint.task_id for hint in hints}
    assert len(hints) == (1 if called_since else 3)
    assert (await rows.task(workflow.lease.task_id))["status"] == "pending"
    job = await rows.job(workflow.job_id)
    assert (job["held"], job["status"]) == (False, "queued")
    await assert_history(rows, workflow.job_id)


@pytest.mark.parametrize("deleted", [False, True])
async def test_a_run_whose_result_a_workflow_awaits_is_kept_and_wakes_it_even_if_somebody_deletes_it(
    rows: Rows, deleted: bool
) -> None:
    child = await rows.leased(keep_seconds=0)
    workflow = await suspended(rows, Call("", 1, "result", "one", child=child.job_id))
    assert await started_runs.wake_waiting(rows.connection) == []
    await settlements.complete(rows.connection, [Completion(child.lease)])
    assert await sweeps.forgettable_jobs(rows.connection) == []
    if deleted:
        await sweeps.forget_jobs(rows.connection, [child.job_id])
    assert len(await started_runs.wake_waiting(rows.connection)) == 1
    assert await is_due(rows, workflow)
    (claimed,) = await rows.claim_all()
    (entry,) = (await reading.read(rows.connection, claimed.lease)).entries
    assert entry.status == (None if deleted else "succeeded")
    await settlements.complete(rows.connection, [Completion(claimed.lease)])
    assert len(await sweeps.forgettable_jobs(rows.connection)) == (not deleted)


async def test_a_workflow_with_many_ended_runs_takes_one_place_of_those_that_are_woken_together(rows: Rows) -> None:
    workflows = []
    for _ in range(2):
        ended = [await rows.leased() for _ in range(3)]
        await settlements.complete(rows.connection, [Completion(child.lease) for child in ended])
        calls = (Call("", number, "result", "one", child=child.job_id) for number, child in enumerate(ended, start=1))
        workflows.append(await suspended(rows, *calls))
    assert len(await started_runs.wake_waiting(rows.connection, 2)) == 2
    assert [await is_due(rows, workflow) for workflow in workflows] == [True, True]


async def test_workflows_that_others_have_locked_take_no_place_of_those_that_are_woken_together(
    rows: Rows, another: Open
) -> None:
    children = [await rows.leased() for _ in range(2)]
    workflows = [await suspended(rows, Call("", 1, "result", "one", child=child.job_id)) for child in children]
    await settlements.complete(rows.connection, [Completion(child.lease) for child in children])
    other = (await another()).connection
    for locked, free in (workflows, workflows[::-1]):
        await rows.connection.execute("UPDATE journal SET due_at = NULL")
        await rows.connection.execute(
            "UPDATE task SET available_at = 'infinity', status = 'waiting' WHERE id = ANY($1)",
            [workflow.lease.task_id for workflow in workflows],
        )
        async with other.transaction():
            await other.execute("SELECT FROM job WHERE id = $1 FOR UPDATE", locked.job_id)
            assert len(await started_runs.wake_waiting(rows.connection, 1)) == 1
            assert [await is_due(rows, workflow) for workflow in (locked, free)] == [False, True]


@pytest.mark.parametrize("deleted", [False, True])
async def test_a_workflow_that_goes_on_after_a_result_is_not_woken_again_by_it(rows: Rows, deleted: bool) -> None:
    """The row of the result stays open, because a replay reads the result again."""
    child, other = await rows.leased(), await rows.leased()
    workflow = await suspended(rows, Call("", 1, "result", "one", child=child.job_id))
    await settlements.complete(rows.connection, [Completion(child.lease)])
    if deleted:
        await rows.connection.execute("DELETE FROM job WHERE id = $1", child.job_id)
    assert len(await started_runs.wake_waiting(rows.connection)) == 1
    (claimed,) = await rows.claim_all()
    journal = await reading.read(rows.connection, claimed.lease)
    assert [entry.seconds for entry in journal.entries] == [None]  # a wait for a run never ends by itself
    calls = (wait(2), Call("", 3, "result", "one", child=other.job_id))
    await settlements.suspend(rows.connection, [Suspending(claimed.lease, calls, journal.news, None, 3600.0)])
    assert not await is_due(rows, workflow)
    assert await started_runs.wake_waiting(rows.connection) == []
    assert not await is_due(rows, workflow)
    await settlements.complete(rows.connection, [Completion(other.lease)])
    assert len(await started_runs.wake_waiting(rows.connection)) == 1
    await assert_history(rows, workflow.job_id)


@pytest.mark.parametrize("deleted", [False, True])
async def test_a_run_that_was_retried_before_its_workflow_read_its_end_wakes_the_workflow_when_it_ends_again(
    rows: Rows, deleted: bool
) -> None:
    child = await rows.leased()
    workflow = await suspended(rows, Call("", 1, "result", "one", child=child.job_id))
    await settlements.fail(rows.connection, [Failure(child.lease, "error", "c", "m", False, 0.0)])
    assert len(await started_runs.wake_waiting(rows.connection)) == 1
    await jobs.replay(rows.connection, child.job_id, "t")
    claimed = {claim.job_id: claim for claim in await rows.claim_all()}
    going_on, again = claimed[workflow.job_id], claimed[child.job_id]
    journal = await reading.read(rows.connection, going_on.lease)
    assert [(entry.status, entry.seconds) for entry in journal.entries] == [("running", None)]
    await settlements.suspend(rows.connection, [Suspending(going_on.lease, (), journal.news)])
    assert await started_runs.wake_waiting(rows.connection) == []
    if deleted:
        await rows.connection.execute("DELETE FROM job WHERE id = $1", child.job_id)
    else:
        await settlements.complete(rows.connection, [Completion(again.lease)])
    assert len(await started_runs.wake_waiting(rows.connection)) == 1
    assert await is_due(rows, workflow)


async def test_the_runs_of_a_failed_workflow_are_cancelled_also_if_it_is_deleted_immediately(rows: Rows) -> None:
    started, detached = await rows.leased(), await rows.leased()
    calls = (Call("", 1, "start", "one", child=started.job_id),
             Call("", 2, "start", "one", "done", child=detached.job_id), step(3))  # fmt: skip
    workflow = await suspended(rows, *calls, ends=1)
    (child,) = await children(rows)
    await settlements.complete(rows.connection, [Completion(child.lease)])
    (again,) = await rows.claim_all()
    await settlements.fail(rows.connection, [Failure(again.lease, "error", "c", "m", False, 0.0)])
    assert await jobs.delete(rows.connection, workflow.job_id, "t") is not None
    await sweeps.forget_jobs(rows.connection, [workflow.job_id])
    assert await sweeps.forgettable_jobs(rows.connection) == []
    await started_runs.cancel_orphans(rows.connection)
    assert [job.job_id for job in await sweeps.forgettable_jobs(rows.connection)] == [workflow.job_id]
    states = [(await rows.job(run.job_id))["status"] for run in (started, detached)]
    assert states == ["cancel_requested", "running"]
    await sweeps.forget_jobs(rows.connection, [workflow.job_id])
    assert await rows.connection.fetchval("SELECT count(*) FROM job WHERE id = $1", workflow.job_id) == 0


async def test_short_journals_are_read_together_and_a_long_one_says_that_it_is_cut(rows: Rows) -> None:
    """A long journal would hold up the others: its worker reads it by itself."""
    sizes = (0, 1, reading.SHORT, reading.SHORT + 1, reading.SHORT + 9)
    workflows = [await rows.leased() for _ in sizes]
    for workflow, size in zip(workflows, sizes, strict=True):
        calls = tuple(Call("", number, "call", "f", "done", {"value": number}) for number in range(1, size + 1))
        await recording.record(rows.connection, [Recording(workflow.lease, calls)])
    lost = reading.Reading(stale(workflows[0].lease, epoch=9))
    readings = [lost, *(reading.Reading(workflow.lease) for workflow in workflows)]
    nothing, *journals = await reading.read_each(rows.connection, readings)
    assert nothing is None
    assert [journal is not None and journal.is_cut for journal in journals] == [False, False, False, True, True]
    for workflow, journal, size in zip(workflows, journals, sizes, strict=True):
        assert journal is not None
        whole = await reading.read(rows.connection, workflow.lease)
        assert [entry.number for entry in whole.entries] == list(range(1, size + 1))
        assert (whole.is_cut, journal.is_cut or journal.entries == whole.entries) == (False, True)


async def test_readings_of_one_round_trip_each_get_their_own_journal(rows: Rows) -> None:
    """Whole journals and some of their rows are read together."""
    workflows = [await rows.leased() for _ in range(4)]
    for number, workflow in enumerate(workflows):
        call = Call("", 1, "call", "f", "done", {"value": number})
        await recording.record(rows.connection, [Recording(workflow.lease, (call,))])
    readings = [
        reading.Reading(stale(workflow.lease, epoch=epoch), [("", 1)] if number % 2 else None)
        for number, workflow in enumerate(workflows)
        for epoch in (workflow.lease.epoch + 1, workflow.lease.epoch)
    ]
    journals = await reading.read_each(rows.connection, readings)
    read = [None if journal is None else [entry.value["value"] for entry in journal.entries] for journal in journals]
    assert read == [None, [0], None, [1], None, [2], None, [3]]


@dataclass
class Narrow:
    """A connection to a PostgreSQL that puts the results of at most so many rows into one JSON value."""

    connection: Connection
    most: int
    tries: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)

    async def fetchrow(self, *arguments: Any) -> Any:
        self.tries += 1
        assert self.tries < 50, "the reader does not come to an end"
        row = await self.connection.fetchrow(*arguments)
        if row is not None and len(row["entries"]) > self.most:
            raise asyncpg.ProgramLimitExceededError
        return row


@pytest.mark.parametrize("of_places", [False, True])
async def test_a_journal_of_large_results_is_read_row_by_row_and_one_too_large_result_is_an_error(
    rows: Rows, of_places: bool
) -> None:
    workflow = await rows.leased()
    places = [("", 1), ("", 2), ("1.0/", 1), ("1.1/", 1), ("1.1/", 2)]
    calls = tuple(Call(branch, number, "call", "f", "done", {"value": 1}) for branch, number in places)
    await recording.record(rows.connection, [Recording(workflow.lease, calls)])
    for most in (1, 0):
        narrow = cast("Connection", Narrow(rows.connection, most))
        read = reading.read(narrow, workflow.lease, places if of_places else None)
        if most:
            assert [(entry.branch, entry.number) for entry in (await read).entries] == places
        else:
            with pytest.raises(asyncpg.ProgramLimitExceededError):
                await read


async def test_a_journal_is_read_whose_results_do_not_fit_into_one_json_value(rows: Rows) -> None:
    """PostgreSQL puts at most 256 MB into one value. A number takes 12 bytes of them, and a few in the text of JSON.
    The strings here reach the bound with a tenth of the work.
    """
    workflow = await rows.leased()
    await rows.connection.execute(
        "INSERT INTO journal (job_id, branch, number, kind, name, state, value, epoch)"
        " SELECT $1, '', n, 'call', 'f', 'done', to_jsonb(repeat('x', 2700000)), 1"
        " FROM generate_series(1, 100) n",
        workflow.job_id,
    )
    journal = await reading.read(rows.connection, workflow.lease)
    assert [entry.number for entry in journal.entries] == list(range(1, 101))
    assert {len(entry.value) for entry in journal.entries} == {2_700_000}


async def test_long_journals_are_read_in_pages(rows: Rows) -> None:
    workflow = await rows.leased()
    await rows.connection.execute(
        "INSERT INTO journal (job_id, branch, number, kind, name, state, epoch)"
        " SELECT $1, branch, n, 'patch', 'p', 'done', 1 FROM unnest(ARRAY['', '1.0/', '1.1/']) branch,"
        " generate_series(1, 200) n",
        workflow.job_id,
    )
    places = [(branch, number) for branch in ("", "1.0/", "1.1/") for number in range(1, 201)]
    for journal in (
        await reading.read(rows.connection, workflow.lease),
        await reading.read(rows.connection, workflow.lease, places),
    ):
        assert sorted((entry.branch, entry.number) for entry in journal.entries) == places
    absent = [*places[:300], ("", 999), *places[300:]]
    assert len((await reading.read(rows.connection, workflow.lease, absent)).entries) == len(places)


@pytest.mark.parametrize(
    ("sizes", "read"),
    [([10] * 16, 16), ([10] * 17, 16), ([100_000, 10], 1), ([10, 100_000, 10], 2), ([], 0)],
)
async def test_a_journal_is_read_with_the_oldest_signals_and_those_behind_them_by_name(
    rows: Rows, sizes: list[int], read: int
) -> None:
    """A client may send a thousand large ones to a run that needs none of them."""
    workflow = await rows.leased()
    for number, size in enumerate(sizes):
        await signals.send(rows.connection, workflow.job_id, "t", f"s{number}", "x" * size, at_most=99)
    (each,) = await reading.read_each(rows.connection, [reading.Reading(workflow.lease)])
    (open_calls,) = await reading.read_each(rows.connection, [reading.Reading(workflow.lease, [("", 1)])])
    whole = await reading.read(rows.connection, workflow.lease)
    for journal in (each, open_calls, whole):
        assert journal is not None
        assert [signal.name for signal in journal.signals] == [f"s{number}" for number in range(read)]
        assert journal.has_more_signals == (read < len(sizes))
    if read < len(sizes):
        last = whole.signals[-1].id
        later = await reading.read_signal(rows.connection, workflow.lease, f"s{read}", last)
        assert later is not None
        assert (later.payload, later.id > last) == ("x" * sizes[read], True)
        assert await reading.read_signal(rows.connection, workflow.lease, f"s{read}", later.id) is None
        assert await reading.read_signal(rows.connection, workflow.lease, "s0", last) is None
        assert await reading.read_signal(rows.connection, stale(workflow.lease, epoch=9), later.name, last) is None
