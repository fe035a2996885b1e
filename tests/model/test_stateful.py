"""Any sequence of verbs, by any workers, with any old lease, on real PostgreSQL: the rows never leave the diagram,
and whatever happened, every job can still be finished.

Hypothesis picks the sequences by a seed: another one at each commit, which the head of the run and a failure name, and
LEASEHOLD_TEST_SEED sets. What failed is kept in .hypothesis and tried first until it passes.
LEASEHOLD_TEST_EXAMPLES=2000 scripts/test tests/model looks further.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from leasehold.broker import outbox
from leasehold.db.database import Connection, connect
from leasehold.domain.ids import new_id
from leasehold.domain.lease import Lease
from leasehold.domain.pipeline import Pipeline
from leasehold.settings import Settings
from leasehold.transitions import claims, jobs, settlements, sweeps
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import (
    Completion,
    Failure,
    FanningOut,
    Part,
    Settled,
    Snoozing,
    Suspending,
    Verdict,
)
from leasehold.transitions.workflows import recording
from leasehold.transitions.workflows.records import Call, Recording
from tests.factories import DIAMOND, ONE, THREE, Rows, terms
from tests.model.promises import Known, assert_promises
from tests.support.seeds import ROOT, seed_of_this_commit

T = TypeVar("T")
Settle = Callable[[Connection, Sequence[Lease]], Awaitable[Settled]]

EXAMPLES = int(os.environ.get("LEASEHOLD_TEST_EXAMPLES", "0"))
MAX_LOSSES = 1  # soon reached, so that steps fail for it
WORKERS = st.integers(0, 2)
DELAYS = st.sampled_from([0.0, 60.0])  # seconds

SETTLEMENTS: dict[str, Settle] = {
    "complete": lambda c, leases: settlements.complete(c, [Completion(lease, (), {"v": 1}) for lease in leases]),
    "error": lambda c, leases: settlements.fail(c, [Failure(x, "error", "c", "m", True, 0.0) for x in leases]),
    "crash": lambda c, leases: settlements.fail(c, [Failure(x, "crash", "c", "m", True, 60.0) for x in leases]),
    "for good": lambda c, leases: settlements.fail(c, [Failure(x, "error", "c", "m", False, 0.0) for x in leases]),
    "snooze": lambda c, leases: settlements.snooze(c, [Snoozing(lease, 60.0, {"n": 1}) for lease in leases]),
    "snooze of the step": lambda c, leases: settlements.snooze(c, [Snoozing(x, 60.0, by_step=True) for x in leases]),
    "release": settlements.release,
    "acknowledge": settlements.acknowledge_cancel,
}
_DUE = "UPDATE task SET available_at = clock_timestamp() WHERE status IN ('retry', 'waiting')"
_LAPSE = "UPDATE task SET lease_until = clock_timestamp() - interval '1 s' WHERE status = 'running'"
_GRACE_PASSES = "UPDATE job SET cancel_by = clock_timestamp() - interval '1 s' WHERE cancel_by IS NOT NULL"
_IS_WITHIN_GRACE = """
SELECT status = 'cancel_requested' AND cancel_by > clock_timestamp() FROM job WHERE id = $1
"""


class Verbs(RuleBasedStateMachine):
    url: str  # set by the test

    tasks = Bundle("tasks")
    leases = Bundle("leases")

    @initialize()
    def open(self) -> None:
        self.runner = asyncio.Runner()
        made = Settings(_env_file=None, database_url=self.url)
        self.connections: list[Connection] = [self.run(connect(made, "model")) for _ in range(3)]
        self.workers = [terms(max_losses=MAX_LOSSES) for _ in range(3)]
        self.jobs: dict[UUID, Known] = {}
        self.job_of: dict[UUID, UUID] = {}
        self.whole = True

    def teardown(self) -> None:
        if not hasattr(self, "runner"):
            return
        try:
            if self.whole:
                self.run(self._finish_everything())
        finally:
            for connection in self.connections:
                self.run(connection.close())
            self.runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def gather_or_cancel(self, *work: Awaitable[Any]) -> list[Any]:
        """Each on a connection of its own, at the same time."""

        async def all_of_it() -> list[Any]:
            return await asyncio.gather(*work)

        return self.run(all_of_it())

    @property
    def rows(self) -> Rows:
        return Rows(self.connections[0])

    def row(self, task: UUID) -> dict[str, Any]:
        return self.run(self.rows.task(task))

    def execute(self, statement: str, *values: Any) -> None:
        self.run(self.connections[0].execute(statement, *values))

    # --- jobs, and hints of them

    @rule(target=tasks, pipeline=st.sampled_from([ONE, THREE, DIAMOND]), count=st.integers(1, 2))
    def submit(self, pipeline: Pipeline, count: int = 1) -> Any:
        new = [jobs.NewJob(pipeline, "t") for _ in range(count)]
        self.run(jobs.submit(self.connections[0], new))
        self.jobs |= {job.id: Known(job.id) for job in new}
        return multiple(*[task for job in new for task in self._learn(job.id)])

    def _learn(self, job_id: UUID) -> list[UUID]:
        rows = self.run(self.connections[0].fetch("SELECT id FROM task WHERE job_id = $1 ORDER BY position", job_id))
        fresh = [row["id"] for row in rows if row["id"] not in self.job_of]
        self.job_of |= dict.fromkeys(fresh, job_id)
        return fresh

    @rule()
    def announce(self) -> None:
        """The relay has had the hints confirmed that are in the outbox."""
        self.execute("UPDATE outbox_batch SET relay_at = clock_timestamp()")
        self.run(outbox.split(self.connections[1], 100))
        self.execute("UPDATE outbox SET relay_at = clock_timestamp()")
        taken = self.run(outbox.take(self.connections[1], 100))
        self.run(outbox.delete_confirmed(self.connections[1], taken))

    @rule(target=leases, worker=WORKERS, task=tasks, copies=st.integers(1, 2), late=st.booleans(), gone=WORKERS)
    def follow_a_hint(self, worker: int, task: UUID, copies: int, late: bool, gone: int) -> Any:
        """A hint may come twice, and of any task, whatever its state; `late`: after its due time. `gone`: whose
        presence has ended, if it is another's.
        """
        if late:
            self.execute(_DUE + " AND id = $1", task)
        before = self.row(task)
        owners = [] if gone == worker else [self.workers[gone].owner]
        found = self.run(claims.claim(self.connections[worker], self.workers[worker], [task, uuid4()] * copies, owners))
        assert len(found) <= 1
        for claimed in found:
            assert claimed.lease.epoch == before["epoch"] + 1
            assert not claimed.cancelling or before["journaled"]  # any other work begins nothing after a cancel
            assert before["status"] in ("pending", "retry", "waiting") or (
                before["status"] == "running" and (before["lease_owner"] in owners or self._lapsed(before))
            )
        return _so_many(1, found, task)

    def _lapsed(self, row: dict[str, Any]) -> bool:
        said: bool = self.run(self.connections[0].fetchval("SELECT $1 < clock_timestamp()", row["lease_until"]))
        return said

    @rule(target=leases, worker=WORKERS, at_most=st.integers(1, 3), task=tasks)
    def look(self, worker: int, at_most: int, task: UUID) -> Any:
        """Without any hint. Who finds fewer than wanted has left nothing that could be claimed."""
        found = self.run(claims.claim_due(self.connections[worker], self.workers[worker], ["default"], at_most))
        assert len(found) <= at_most
        if len(found) < at_most:
            left = self.run(
                self.connections[0].fetchval(
                    "SELECT count(*) FROM task WHERE status IN ('pending', 'retry', 'waiting')"
                    " AND available_at <= clock_timestamp()"
                )
            )
            assert left == 0
        return _so_many(at_most, found, task)

    @rule(target=leases, task=tasks, first=WORKERS, second=WORKERS)
    def a_zombie_is_made(self, task: UUID, first: int, second: int) -> Any:
        """Its lease lapses, and the task is another's, or its own again; both leases are tried from now on."""
        found = []
        for worker in (first, second):
            self.execute(_DUE + " AND id = $1", task)
            found += self.run(claims.claim(self.connections[worker], self.workers[worker], [task]))
            if worker == first and found:
                self.the_lease_lapses(task)
        return _so_many(2, found, task)

    @rule(target=leases, worker=WORKERS)
    def siblings_run(self, worker: int) -> Any:
        """Two steps of one job in one worker's hands."""
        self.submit(DIAMOND)
        top, left, right, _ = list(self.job_of)[-4:]
        claimed = self.run(claims.claim(self.connections[worker], self.workers[worker], [top]))
        self._settle("complete", [one.lease for one in claimed])
        pair = self.run(claims.claim(self.connections[worker], self.workers[worker], [left, right]))
        assert len(pair) == 2
        return multiple(*(one.lease for one in pair))

    @rule(target=leases, worker=WORKERS, waits=st.booleans())
    def a_workflow_sees_its_cancel(self, worker: int, waits: bool) -> Any:
        """It has called something; the cancel meets it while it runs or waits, and a worker has it now."""
        self.submit(ONE)
        task = list(self.job_of)[-1]
        (first,) = self.run(claims.claim(self.connections[0], self.workers[0], [task]))
        self.record(first.lease, has_seen_cancel=False)
        if not waits:
            self.cancel(task)
            return multiple(first.lease)
        self.run(settlements.suspend(self.connections[0], [Suspending(first.lease, (), 0)]))
        self.cancel(task)
        (claimed,) = self.run(claims.claim(self.connections[worker], self.workers[worker], [task]))
        assert claimed.cancelling
        return multiple(claimed.lease)

    # --- ending attempts

    @rule(some=st.lists(leases, min_size=1, max_size=3), how=st.sampled_from(sorted(SETTLEMENTS)))
    def settle(self, some: list[Lease], how: str) -> None:
        one_each = {lease.task_id: lease for lease in some}
        self._settle(how, list(one_each.values()))

    @rule(target=leases, some=st.lists(leases, min_size=1, max_size=3), worker=WORKERS, heard=st.booleans())
    def complete_and_go_on(self, some: list[Lease], worker: int, heard: bool) -> Any:
        """The step after it is claimed by the same commit; an answer that is not heard can be asked for again."""
        terms = self.workers[worker]
        mine = list({lease.task_id: lease for lease in some if lease.owner == terms.owner}.values())
        before = {lease.task_id: self.row(lease.task_id) for lease in mine}
        # Whether a worker takes a step for the last one changes only the statement.
        done = [Completion(lease, claim_next=True, is_last=lease.epoch % 2 == 1) for lease in mine]
        outcome = self.run(settlements.complete(self.connections[1], done, terms))
        next_steps = outcome.next_steps
        went_on = {claimed.lease.task_id for claimed in next_steps.values()}
        for lease in mine:
            if lease.task_id in went_on:  # an old lease of a workflow that goes on because its step was completed
                assert outcome.verdicts[lease.task_id] is Verdict.LOST
                assert not self._holds(lease, before[lease.task_id])
            else:
                self._judge(lease, before[lease.task_id], outcome.verdicts[lease.task_id])
        if not heard and next_steps:
            assert self.run(settlements.complete(self.connections[1], done, terms)).next_steps == {}
            epochs = {task: claimed.lease.epoch for task, claimed in next_steps.items()}
            next_steps = self.run(claims.claim_again(self.connections[1], list(next_steps), {}, terms, []))
            again = {task: claimed.lease.epoch for task, claimed in next_steps.items()}
            assert again == {task: epoch + 1 for task, epoch in epochs.items()}
        for task, claimed in next_steps.items():
            row = self.row(claimed.lease.task_id)
            assert task in before
            assert (row["status"], row["lease_owner"], row["epoch"]) == ("running", terms.owner, claimed.lease.epoch)
        return _so_many(len(some), list(next_steps.values()), some[0].task_id)

    def _settle(self, how: str, some: Sequence[Lease]) -> None:
        """A lease that is not the task's any more changes nothing at all."""
        before = {lease.task_id: self.row(lease.task_id) for lease in some}
        outcome = self.run(_carried(SETTLEMENTS[how], self.connections[1], some))
        for lease in some:
            self._judge(lease, before[lease.task_id], outcome.verdicts[lease.task_id])

    def _judge(self, lease: Lease, before: dict[str, Any], verdict: Verdict) -> None:
        ours = self._holds(lease, before)
        after = self.row(lease.task_id)
        if ours and verdict is Verdict.SETTLED:
            assert after["status"] != "running"
        elif ours:  # the verb is not for a job that is (or is not) being cancelled, or a sibling ended the job
            assert after == before or after["status"] == "cancelled"
        else:
            assert after["epoch"] == before["epoch"]
            assert before["status"] != "running" or after == before or after["status"] == "cancelled"

    @rule(target=tasks, lease=leases, parts=st.integers(1, 3))
    def spread(self, lease: Lease, parts: int) -> Any:
        job = self.job_of[lease.task_id]
        step = f"part{len(self.job_of)}"  # of its own, so that a step may spread more than once
        said = [Part(step, "default", 2, "one.only", number) for number in range(parts)]
        before = self.row(lease.task_id)
        outcome = self.run(settlements.fan_out(self.connections[0], [FanningOut(lease, said)]))
        self._judge(lease, before, outcome.verdicts[lease.task_id])
        fresh = self._learn(job)
        return multiple(*(fresh or [lease.task_id] * parts))

    @rule(target=tasks, lease=leases, children=st.integers(0, 2), seconds=st.sampled_from([None, 60.0]))
    def suspend(self, lease: Lease, children: int, seconds: float | None) -> Any:
        """The workflow starts steps of its own, and waits for them, or for a time."""
        before, job = self.row(lease.task_id), self.job_of[lease.task_id]
        calls = tuple(self._call(n) for n in range(children))
        suspending = Suspending(lease, calls, before["news"], ends=children or None, delay=seconds)
        outcome = self.run(settlements.suspend(self.connections[1], [suspending]))
        verdict = outcome.verdicts[lease.task_id]
        self._judge(lease, before, verdict)
        if self._holds(lease, before):  # in a job that is being cancelled nothing waits any more
            assert (verdict is Verdict.SETTLED) != self._is_cancelling(job)
        fresh = self._learn(job)
        return multiple(*(fresh or [lease.task_id] * (children or 1)))

    @rule(target=leases, lease=leases)
    def suspend_and_claim_the_step(self, lease: Lease) -> Any:
        """The step that the workflow starts is claimed by the same commit; in a lost lease's name, nothing is."""
        terms = next((one for one in self.workers if one.owner == lease.owner), self.workers[0])
        before = self.row(lease.task_id)
        suspending = Suspending(lease, (self._call(0),), before["news"], ends=1).claiming_next("default")
        outcome = self.run(settlements.suspend(self.connections[1], [suspending], terms))
        self._judge(lease, before, outcome.verdicts[lease.task_id])
        fresh = self._learn(self.job_of[lease.task_id])
        assert [claimed.lease.task_id for claimed in outcome.next_steps.values()] == fresh
        for claimed in outcome.next_steps.values():
            row = self.row(claimed.lease.task_id)
            assert (row["status"], row["lease_owner"], row["epoch"]) == ("running", terms.owner, 1)
        return _so_many(1, list(outcome.next_steps.values()), lease.task_id)

    def _call(self, number: int) -> Call:
        return Call("", len(self.job_of) + number, "run", "child", child=new_id(),
                    step=f"child#{len(self.job_of) + number}", queue="default", max_attempts=1,
                    handler="one.only", timeout_seconds=60, argument={})  # fmt: skip

    def _holds(self, lease: Lease, row: dict[str, Any]) -> bool:
        return (row["status"], row["lease_owner"], row["epoch"]) == ("running", lease.owner, lease.epoch)

    def _is_cancelling(self, job: UUID) -> bool:
        return bool(self.run(self.rows.job(job))["status"] == "cancel_requested")

    @rule(lease=leases, has_seen_cancel=st.booleans())
    def record(self, lease: Lease, has_seen_cancel: bool) -> None:
        """The workflow commits a call and goes on. In a cancelled job it does so once it has seen the cancel."""
        before, job = self.row(lease.task_id), self.job_of[lease.task_id]
        call = Call("", len(self.job_of) + 1000, "call", "drawn", "done", {"value": 1})
        answers, _ = self.run(recording.record(self.connections[1], [Recording(lease, (call,), has_seen_cancel)]))
        recorded = answers[lease.task_id]
        assert recorded.cancelling == self._is_cancelling(job)
        assert recorded.committed == (self._holds(lease, before) and has_seen_cancel == recorded.cancelling)
        after = self.row(lease.task_id)
        if recorded.committed:
            assert after == before | {"journaled": True, "losses": 0, "errors": 0}
        else:
            assert after == before

    @rule(lease=leases)
    def renew(self, lease: Lease) -> None:
        before = self.row(lease.task_id)
        ours = self._holds(lease, before)
        (answer,) = self.run(claims.renew(self.connections[2], lease.owner, [lease], 30.0))
        assert (answer.renewed, answer.is_valid) == (ours, ours)
        after = self.row(lease.task_id)
        assert after == before or (ours and not self._lapsed(after))

    # --- at the same time

    @rule(target=leases, task=tasks)
    def two_workers_race_for_a_task(self, task: UUID) -> Any:
        before = self.row(task)
        answers = self.gather_or_cancel(
            *(claims.claim(self.connections[n], self.workers[n], [task]) for n in (0, 1)),
        )
        won = [claimed for found in answers for claimed in found]
        assert len(won) <= 1
        assert self.row(task)["epoch"] == before["epoch"] + len(won)
        return _so_many(1, won, task)

    @rule(target=leases, lease=leases, how=st.sampled_from(sorted(SETTLEMENTS)), lapses=st.booleans())
    def a_settlement_races_a_takeover_and_the_sweeper(self, lease: Lease, how: str, lapses: bool) -> Any:
        if lapses:
            self.the_lease_lapses(lease.task_id)
        before = self.row(lease.task_id)
        outcome, taken, _ = self.gather_or_cancel(
            SETTLEMENTS[how](self.connections[0], [lease]),
            claims.claim(self.connections[1], self.workers[1], [lease.task_id]),
            sweeps.expire_leases(self.connections[2], [], MAX_LOSSES),
        )
        assert self.row(lease.task_id)["epoch"] == before["epoch"] + len(taken)
        if how == "complete" and outcome.verdicts[lease.task_id] is Verdict.SETTLED:
            assert not taken  # nobody runs again what was just completed
        return _so_many(1, taken, lease.task_id)

    # --- what time and people do

    @rule(task=tasks)
    def the_lease_lapses(self, task: UUID) -> None:
        self.execute(_LAPSE + " AND id = $1", task)

    @rule(gone=st.lists(WORKERS, unique=True, max_size=2))
    def sweep(self, gone: list[int]) -> None:
        owners = [self.workers[worker].owner for worker in gone]
        self.run(sweeps.end_cancels(self.connections[1], owners, MAX_LOSSES))
        self.run(sweeps.expire_leases(self.connections[1], owners, MAX_LOSSES))

    @rule(task=tasks)
    def cancel(self, task: UUID) -> None:
        self.run(jobs.request_cancel(self.connections[2], [self.job_of[task]], "t", reason="r", by="b"))

    @rule(lease=leases)
    def the_worker_of_a_cancelled_job_is_lost(self, lease: Lease) -> None:
        """A workflow that had called something goes on; any other work has ended."""
        self.cancel(lease.task_id)
        self.the_lease_lapses(lease.task_id)
        before, job = self.row(lease.task_id), self.job_of[lease.task_id]
        is_within = self.run(self.rows.connection.fetchval(_IS_WITHIN_GRACE, job))
        self.run(sweeps.end_cancels(self.connections[1], [], MAX_LOSSES))
        if before["status"] == "running" and is_within:
            goes_on = before["journaled"] and before["losses"] < MAX_LOSSES
            assert self.row(lease.task_id)["status"] == ("pending" if goes_on else "cancelled")

    @rule(task=tasks)
    def the_grace_passes(self, task: UUID) -> None:
        self.execute(_GRACE_PASSES + " AND id = $1", self.job_of[task])
        self.run(sweeps.end_cancels(self.connections[0], [], MAX_LOSSES))

    @rule(task=tasks)
    def the_deadline_passes(self, task: UUID) -> None:
        if self.jobs[self.job_of[task]].ended is not None:
            return
        self.execute("UPDATE job SET deadline_at = clock_timestamp() - interval '1 s' WHERE id = $1", self.job_of[task])
        self.run(sweeps.expire_jobs(self.connections[0]))

    @rule(task=tasks)
    def replay(self, task: UUID) -> None:
        known = self.jobs[self.job_of[task]]
        if self.run(jobs.replay(self.connections[0], known.id, "t")) is not None:
            assert known.ended == "failed"
            known.ended = None

    # --- what must hold whatever happened

    @invariant()
    def the_rows_add_up(self) -> None:
        self.whole = False
        for known in getattr(self, "jobs", {}).values():
            self.run(assert_promises(self.rows, known, MAX_LOSSES))
        self.whole = True

    async def _finish_everything(self) -> None:
        """No job is lost: when nothing more goes wrong, workers that only look bring every one to its end."""
        connection, worker = self.connections[0], self.workers[0]
        for _ in range(200):
            await connection.execute(_LAPSE)
            await sweeps.expire_leases(connection, [], MAX_LOSSES)
            await connection.execute(_GRACE_PASSES)
            await sweeps.end_cancels(connection, [], MAX_LOSSES)
            await connection.execute(_DUE)
            found = await claims.claim_due(connection, worker, ["default"], 20)
            await settlements.complete(connection, [Completion(claimed.lease) for claimed in found])
            if not await connection.fetchval("SELECT count(*) FROM job WHERE finished_at IS NULL"):
                break
        for known in self.jobs.values():
            await assert_promises(self.rows, known, MAX_LOSSES)
            assert known.ended is not None


def _so_many(count: int, found: Sequence[Claimed], task: UUID) -> Any:
    """As many leases however a race went, or Hypothesis could not repeat what it found: the missing ones are leases
    that nobody was ever given.
    """
    made_up = [Lease(task, uuid4(), 1, 1, 0.0) for _ in range(count - len(found))]
    return multiple(*(claimed.lease for claimed in found), *made_up)


async def _carried(settle: Settle, connection: Connection, some: Sequence[Lease]) -> Settled:
    return await settle(connection, some)


@pytest.mark.timeout(0)  # as long as it was asked to look
def test_no_sequence_of_verbs_leaves_the_diagram_and_every_job_can_end(database_url: str) -> None:
    Verbs.url = database_url
    sys.stdout.write(f"LEASEHOLD_TEST_SEED={seed_of_this_commit()}\n")
    run_state_machine_as_test(
        seed(seed_of_this_commit())(Verbs),
        settings=settings(
            max_examples=EXAMPLES or 40,
            stateful_step_count=30,
            deadline=None,
            database=DirectoryBasedExampleDatabase(ROOT / ".hypothesis" / "examples"),
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
