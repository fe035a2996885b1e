"""No write without the lease: an owner or an epoch that is not the row's changes nothing, whatever the verb."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from typing import Any
from uuid import uuid4

import pytest

from leasehold.db.artifacts import note_of
from leasehold.domain.errors import LeaseLost
from leasehold.domain.ids import new_id
from leasehold.domain.lease import Lease
from leasehold.transitions import claims, jobs, notes, settlements, sweeps
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import (
    Completion,
    Failure,
    FanningOut,
    Output,
    Part,
    Settled,
    Snoozing,
    Suspending,
    Verdict,
)
from leasehold.transitions.workflows.records import Call
from tests.factories import DIAMOND, Rows, assert_history, stale, terms
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open

Settle = Callable[[Any, Lease], Coroutine[Any, Any, Settled]]
OUTPUT = Output("o.bin", "k/o.bin", 1, "00", "application/octet-stream")


def part_of(lease: Lease) -> Part:
    """A part with a name of its own: two steps of a job may fan out."""
    return Part(f"part-{lease.task_id.hex[-8:]}", "default", 1, "one.only", 1)


def step_of(lease: Lease) -> Call:
    """A step that a workflow starts."""
    step = f"child-{lease.task_id.hex[-8:]}#1"
    return Call("", 1, "run", "child", child=new_id(), step=step, queue="default", max_attempts=1, handler="one.only",
                argument={})  # fmt: skip


def claiming(lease: Lease) -> Suspending:
    """A suspension that also claims the step which it starts."""
    call = step_of(lease)
    return Suspending(lease, (call,), 0, 1, step_to_claim=call.child)


SETTLEMENTS: dict[str, Settle] = {
    "complete": lambda c, lease: settlements.complete(c, [Completion(lease, [OUTPUT], {"x": 1})]),
    "complete_last": lambda c, lease: settlements.complete(c, [Completion(lease, value={"x": 1}, is_last=True)]),
    "fail": lambda c, lease: settlements.fail(c, [Failure(lease, "error", "boom", "it broke", True, 0.0)]),
    "snooze": lambda c, lease: settlements.snooze(c, [Snoozing(lease, 0.0, {"n": 1})]),
    "suspend": lambda c, lease: settlements.suspend(c, [claiming(lease)], terms(lease.owner)),
    "release": lambda c, lease: settlements.release(c, [lease]),
    "fan_out": lambda c, lease: settlements.fan_out(c, [FanningOut(lease, [part_of(lease)])]),
    "acknowledge_cancel": lambda c, lease: settlements.acknowledge_cancel(c, [lease]),
}
#: The same with several leases at once.
BATCHES: dict[str, Callable[[Any, list[Lease]], Awaitable[Settled]]] = {
    "complete": lambda c, leases: settlements.complete(c, [Completion(lease) for lease in leases]),
    "complete_last": lambda c, leases: settlements.complete(c, [Completion(a, is_last=True) for a in leases]),
    "fail": lambda c, leases: settlements.fail(c, [Failure(lease, "error", "e", "m", True, 0.0) for lease in leases]),
    "snooze": lambda c, leases: settlements.snooze(c, [Snoozing(lease, 0.0, None) for lease in leases]),
    "suspend": lambda c, leases: settlements.suspend(c, [Suspending(a, (step_of(a),), 0, 1) for a in leases]),
    "release": settlements.release,
    "fan_out": lambda c, leases: settlements.fan_out(c, [FanningOut(lease, [part_of(lease)]) for lease in leases]),
    "acknowledge_cancel": settlements.acknowledge_cancel,
}
WRONG: dict[str, Callable[[Lease], Lease]] = {
    "an older epoch": lambda lease: stale(lease, epoch=lease.epoch - 1),
    "a later epoch": lambda lease: stale(lease, epoch=lease.epoch + 1),
    "another owner": lambda lease: stale(lease, owner=uuid4()),
    "an unknown task": lambda lease: stale(lease, task_id=uuid4()),
}


def test_each_settlement_that_there_is_is_tried() -> None:
    """A statement that begins with the guard is a settlement."""
    modules = [import_module(f"{settlements.__name__}.{found.name}") for found in iter_modules(settlements.__path__)]
    with_guard = {
        name.lower()
        for module in modules
        for name, text in vars(module).items()
        if isinstance(text, str) and "lease_batch AS MATERIALIZED" in text and text.lstrip().startswith("--")
    }
    assert with_guard == SETTLEMENTS.keys()


async def leased_for(rows: Rows, verb: str) -> Claimed:
    """A claimed step that `verb` may settle."""
    claimed = await rows.leased()
    if verb == "acknowledge_cancel":
        await jobs.request_cancel(rows.connection, [claimed.job_id], "t", reason="r", by="b")
    return claimed


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("verb", SETTLEMENTS)
async def test_a_settlement_with_a_wrong_lease_changes_nothing(rows: Rows, verb: str, wrong: str) -> None:
    claimed = await leased_for(rows, verb)
    before = await rows.task(claimed.lease.task_id), await rows.job(claimed.job_id), await rows.events(claimed.job_id)
    lease = WRONG[wrong](claimed.lease)
    settled = await SETTLEMENTS[verb](rows.connection, lease)
    assert settled == Settled({lease.task_id: Verdict.LOST})
    after = await rows.task(claimed.lease.task_id), await rows.job(claimed.job_id), await rows.events(claimed.job_id)
    assert after == before
    assert await rows.connection.fetchval("SELECT count(*) FROM output") == 0
    assert await rows.connection.fetchval("SELECT count(*) FROM failure") == 0
    assert await rows.connection.fetchval("SELECT count(*) FROM task") == 1
    assert await rows.connection.fetchval("SELECT count(*) FROM journal") == 0


@pytest.mark.parametrize("verb", SETTLEMENTS)
async def test_a_wrong_lease_spoils_no_other_lease_of_its_batch(rows: Rows, verb: str) -> None:
    """The leases of a batch are told apart by place: each verdict is its own lease's."""
    lost, kept = await leased_for(rows, verb), await leased_for(rows, verb)
    leases = [stale(lost.lease, owner=uuid4()), kept.lease]
    settled = await BATCHES[verb](rows.connection, leases)
    assert settled.verdicts == {lost.lease.task_id: Verdict.LOST, kept.lease.task_id: Verdict.SETTLED}
    assert settled.states.keys() == {kept.lease.task_id}
    assert (await rows.task(lost.lease.task_id))["status"] == "running"
    assert (await rows.task(kept.lease.task_id))["status"] == settled.states[kept.lease.task_id]
    for claimed in (lost, kept):
        await assert_history(rows, claimed.job_id)


class Heard:
    """A connection, and the names of the statements that it got."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.statements: list[str] = []

    async def fetch(self, statement: str, *arguments: Any) -> Any:
        self.statements.append(statement.lstrip().partition("\n")[0])
        return await self._connection.fetch(statement, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


@pytest.mark.parametrize("verb", SETTLEMENTS)
async def test_a_settlement_with_valid_leases_is_one_statement(rows: Rows, verb: str) -> None:
    """A second run would settle nothing more, and would cost each step the time of the first."""
    leases = [(await leased_for(rows, verb)).lease for _ in range(2)]
    heard = Heard(rows.connection)
    settled = await BATCHES[verb](heard, leases)
    assert settled.verdicts == {lease.task_id: Verdict.SETTLED for lease in leases}
    assert heard.statements == [f"-- {verb}"]


@pytest.mark.parametrize("verb", SETTLEMENTS)
async def test_of_two_steps_that_settle_at_the_same_moment_the_second_waits_for_the_first(
    rows: Rows, another: Open, verb: str
) -> None:
    """Both count down on the job's row: the second one reads it after the first one's commit."""
    top = await rows.leased(DIAMOND)
    await settlements.complete(rows.connection, [Completion(top.lease)])
    left, right = await rows.claim_all()
    if verb == "acknowledge_cancel":
        await jobs.request_cancel(rows.connection, [top.job_id], "t", reason="r", by="b")
    other = await another()
    async with other.connection.transaction():
        first = await SETTLEMENTS[verb](other.connection, left.lease)
        second = asyncio.create_task(SETTLEMENTS[verb](rows.connection, right.lease))
        await until_waiting(other.connection)
    assert first.verdicts == {left.lease.task_id: Verdict.SETTLED}
    failed = verb == "fail"  # the job has another attempt of its step, or none: then it took the other lease
    assert failed or (await second).verdicts == {right.lease.task_id: Verdict.SETTLED}
    await second
    await assert_history(rows, top.job_id)


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_note_with_a_wrong_lease_is_refused_and_not_written(rows: Rows, wrong: str) -> None:
    claimed = await rows.leased()
    with pytest.raises(LeaseLost):
        await notes.remember(rows.connection, WRONG[wrong](claimed.lease), {"n": 1})
    assert await rows.connection.fetchval("SELECT count(*) FROM note") == 0
    await notes.remember(rows.connection, claimed.lease, {"n": 1})
    await notes.remember(rows.connection, claimed.lease, {"n": 2})
    assert await note_of(rows.connection, claimed.lease.task_id) == {"n": 2}


async def test_a_note_written_while_the_task_is_taken_over_is_seen_or_refused(rows: Rows, another: Open) -> None:
    """The claim is under way: the note waits for it, and finds that the lease is lost."""
    claimed = await rows.leased()
    await rows.lapse(claimed.lease.task_id)
    successor = await another()
    async with successor.connection.transaction():
        await claims.claim(successor.connection, successor.terms, [claimed.lease.task_id])
        late = asyncio.create_task(notes.remember(rows.connection, claimed.lease, {"n": 1}))
        blocked = await another()
        await until_waiting(blocked.connection)
    with pytest.raises(LeaseLost):
        await late
    assert await note_of(successor.connection, claimed.lease.task_id) == {}


@pytest.mark.parametrize("verb", SETTLEMENTS)
async def test_a_late_worker_cannot_settle_a_task_that_was_taken_over(rows: Rows, another: Open, verb: str) -> None:
    claimed = await leased_for(rows, verb)
    await rows.lapse(claimed.lease.task_id)
    successor = await another()
    if verb == "acknowledge_cancel":  # nobody claims a step of a job that is being cancelled
        await rows.connection.execute("UPDATE job SET status = 'running' WHERE id = $1", claimed.job_id)
    (taken,) = await claims.claim(successor.connection, successor.terms, [claimed.lease.task_id])
    assert (taken.previous_state, taken.lease.epoch) == ("running", 2)
    settled = await SETTLEMENTS[verb](rows.connection, claimed.lease)
    assert settled.verdicts[claimed.lease.task_id] is Verdict.LOST
    row = await rows.task(claimed.lease.task_id)
    assert (row["status"], row["epoch"], row["lease_owner"]) == ("running", 2, successor.terms.owner)


@pytest.mark.parametrize("verb", [verb for verb in SETTLEMENTS if verb != "acknowledge_cancel"])
async def test_a_settlement_that_waits_for_a_takeover_changes_nothing(rows: Rows, another: Open, verb: str) -> None:
    """When it began the lease was valid: it must judge the row that the takeover left. (Nobody takes over a step of a
    job that is being cancelled.)
    """
    claimed = await leased_for(rows, verb)
    await rows.lapse(claimed.lease.task_id)
    successor = await another()
    async with successor.connection.transaction():
        (taken,) = await claims.claim(successor.connection, successor.terms, [claimed.lease.task_id])
        late = asyncio.create_task(SETTLEMENTS[verb](rows.connection, claimed.lease))
        await until_waiting(successor.connection)
    assert await late == Settled({claimed.lease.task_id: Verdict.LOST})
    row = await rows.task(claimed.lease.task_id)
    assert (row["status"], row["epoch"], row["lease_owner"]) == ("running", 2, successor.terms.owner)
    assert (await settlements.complete(successor.connection, [Completion(taken.lease)])).verdicts == {
        claimed.lease.task_id: Verdict.SETTLED
    }
    await assert_history(rows, claimed.job_id)


async def test_a_completion_waits_for_the_renewal_of_its_task(rows: Rows, another: Open) -> None:
    """The renewal leaves a newer row, whose lease is the completion's still."""
    claimed = await rows.leased()
    heartbeat = await another()
    async with heartbeat.connection.transaction():
        (renewal,) = await claims.renew(heartbeat.connection, rows.terms.owner, [claimed.lease], 60.0)
        completing = asyncio.create_task(settlements.complete(rows.connection, [Completion(claimed.lease)]))
        await until_waiting(heartbeat.connection)
    assert renewal.renewed
    assert (await completing).verdicts == {claimed.lease.task_id: Verdict.SETTLED}
    await assert_history(rows, claimed.job_id)


@pytest.mark.parametrize("verb", SETTLEMENTS)
async def test_a_settlement_whose_answer_was_lost_can_be_repeated(rows: Rows, verb: str) -> None:
    claimed = await leased_for(rows, verb)
    first = await SETTLEMENTS[verb](rows.connection, claimed.lease)
    events = await rows.events(claimed.job_id)
    again = await SETTLEMENTS[verb](rows.connection, claimed.lease)
    assert first.verdicts == again.verdicts == {claimed.lease.task_id: Verdict.SETTLED}
    assert again.announcements == []
    assert again.states.items() <= first.states.items()
    zombie = stale(claimed.lease, epoch=claimed.lease.epoch - 1)  # its attempt ended before this one began
    assert await SETTLEMENTS[verb](rows.connection, zombie) == Settled({zombie.task_id: Verdict.LOST})
    assert await rows.events(claimed.job_id) == events
    await assert_history(rows, claimed.job_id)


async def test_a_last_failure_whose_answer_was_lost_can_be_repeated(rows: Rows) -> None:
    claimed = await rows.leased()
    failures = [Failure(claimed.lease, "error", "boom", "it broke", False, 0.0)]
    first = await settlements.fail(rows.connection, failures)
    again = await settlements.fail(rows.connection, failures)
    assert first.verdicts == again.verdicts == {claimed.lease.task_id: Verdict.SETTLED}
    assert ([one.outcome for one in first.ended], again.ended) == (["rejected"], [])
    await assert_history(rows, claimed.job_id)


@pytest.mark.parametrize("verb", ["fail", "release"])
async def test_a_settlement_can_be_repeated_beside_other_failures(rows: Rows, verb: str) -> None:
    """Those of its own task are of earlier leases, and those of the same epoch of other tasks."""
    claimed, other = await rows.leased(), await rows.leased()
    await SETTLEMENTS["fail"](rows.connection, claimed.lease)
    (claimed,) = await claims.claim(rows.connection, rows.terms, [claimed.lease.task_id])
    await SETTLEMENTS["fail"](rows.connection, other.lease)
    (other,) = await claims.claim(rows.connection, rows.terms, [other.lease.task_id])
    await SETTLEMENTS["fail"](rows.connection, other.lease)
    assert claimed.lease.epoch == other.lease.epoch == 2
    for _ in range(2):
        settled = await SETTLEMENTS[verb](rows.connection, claimed.lease)
        assert settled.verdicts == {claimed.lease.task_id: Verdict.SETTLED}


async def test_repeated_failures_are_known_by_their_causes(rows: Rows) -> None:
    """A step that was timed out meanwhile is not told that its own failure is recorded."""
    first, second = (await rows.leased()).lease, (await rows.leased()).lease
    crash, timeout = (Failure(lease, cause, "c", "m", True, 0.0) for lease, cause in
                      ((first, "crash"), (second, "timeout")))  # fmt: skip
    await settlements.fail(rows.connection, [crash, timeout])
    again = await settlements.fail(rows.connection, [timeout, crash])
    assert again.verdicts == {first.task_id: Verdict.SETTLED, second.task_id: Verdict.SETTLED}
    others = [replace(crash, lease=second), replace(timeout, lease=first)]
    assert await settlements.fail(rows.connection, others) == Settled(
        {first.task_id: Verdict.LOST, second.task_id: Verdict.LOST}
    )


async def test_a_failure_is_no_repetition_once_the_step_was_claimed_again_or_its_job_was_cancelled(rows: Rows) -> None:
    """The failure of that epoch is recorded, with the same cause. The step has another state since."""
    first, cancelled = await rows.leased(), await rows.leased()
    for claimed in (first, cancelled):
        await SETTLEMENTS["fail"](rows.connection, claimed.lease)
    (again,) = await claims.claim(rows.connection, rows.terms, [first.lease.task_id])
    await SETTLEMENTS["fail"](rows.connection, again.lease)
    await jobs.request_cancel(rows.connection, [cancelled.job_id], "t", reason="", by="test")
    for claimed in (first, cancelled):
        late = await SETTLEMENTS["fail"](rows.connection, claimed.lease)
        assert late == Settled({claimed.lease.task_id: Verdict.LOST})
    repeated = await SETTLEMENTS["fail"](rows.connection, again.lease)
    assert repeated.verdicts == {again.lease.task_id: Verdict.SETTLED}


@pytest.mark.parametrize("max_losses", [0, 1])
@pytest.mark.parametrize("verb", [verb for verb in SETTLEMENTS if verb != "acknowledge_cancel"])
async def test_a_late_worker_is_told_that_a_sweep_has_ended_its_lease(rows: Rows, verb: str, max_losses: int) -> None:
    """The epoch is still that of the lease. A last failure would count as a second dead letter. (In a job that is being
    cancelled, no sweep ends a lease in this way.)
    """
    claimed = await leased_for(rows, verb)
    await rows.lapse(claimed.lease.task_id)
    assert (await sweeps.expire_leases(rows.connection, [], max_losses))[0] == 1
    row, events = await rows.task(claimed.lease.task_id), await rows.events(claimed.job_id)
    assert (row["status"], row["epoch"]) == ("pending" if max_losses else "failed", claimed.lease.epoch)
    assert await SETTLEMENTS[verb](rows.connection, claimed.lease) == Settled({claimed.lease.task_id: Verdict.LOST})
    assert (await rows.task(claimed.lease.task_id), await rows.events(claimed.job_id)) == (row, events)


@pytest.mark.parametrize("verb", SETTLEMENTS)
async def test_a_settlement_does_not_wait_for_the_job_of_another(rows: Rows, another: Open, verb: str) -> None:
    claimed, busy, other = await leased_for(rows, verb), await rows.leased(), await another()
    await rows.connection.execute("SET lock_timeout = '10s'")
    async with other.connection.transaction():
        await other.connection.execute("SELECT FROM job WHERE id = $1 FOR UPDATE", busy.job_id)
        settled = await SETTLEMENTS[verb](rows.connection, claimed.lease)
    assert settled.verdicts == {claimed.lease.task_id: Verdict.SETTLED}


async def test_a_renewal_tells_what_was_lost_and_renews_the_rest(rows: Rows, another: Open) -> None:
    kept, lost = await rows.leased(), await rows.leased()
    await rows.lapse(lost.lease.task_id)
    successor = await another()
    await claims.claim(successor.connection, successor.terms, [lost.lease.task_id])
    before = (await rows.task(kept.lease.task_id))["lease_until"]
    answers = await claims.renew(rows.connection, rows.terms.owner, [kept.lease, lost.lease], 60.0)
    told = {answer.task_id: (answer.renewed, answer.is_valid) for answer in answers}
    assert told == {kept.lease.task_id: (True, True), lost.lease.task_id: (False, False)}
    assert (await rows.task(kept.lease.task_id))["lease_until"] > before


async def test_a_renewal_does_not_wait_for_a_row_that_is_being_settled(rows: Rows, another: Open) -> None:
    claimed = await rows.leased()
    other = await another()
    async with other.connection.transaction():
        await other.connection.execute("SELECT 1 FROM task WHERE id = $1 FOR UPDATE", claimed.lease.task_id)
        (answer,) = await claims.renew(rows.connection, rows.terms.owner, [claimed.lease], 60.0)
    assert (answer.renewed, answer.is_valid) == (False, True)
