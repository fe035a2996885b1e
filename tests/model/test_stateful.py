"""Any sequence of verbs, by any workers, with any old lease, on real PostgreSQL: the rows never leave the diagram.

Hypothesis picks the sequences, the same ones at every run; LEASEHOLD_TEST_EXAMPLES=2000 scripts/test tests/model
looks further.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import UUID

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from leasehold.database import Connection, connect
from leasehold.lease import Lease
from leasehold.pipeline import Pipeline
from leasehold.settings import Settings
from leasehold.states import JOB_TERMINAL, TASK_TERMINAL
from leasehold.transitions import claims, jobs, settlements, sweeps
from leasehold.transitions.settlements import Completion, Failure, Parking, Part, Spreading, Verdict
from tests.factories import DIAMOND, ONE, THREE, Rows, assert_history, terms

T = TypeVar("T")
EXAMPLES = int(os.environ.get("LEASEHOLD_TEST_EXAMPLES", "40"))
WORKERS = st.integers(0, 2)
DELAYS = st.sampled_from([0.0, 60.0])  # seconds


@dataclass
class Known:
    """A job as this test knows it. `ended`: the state it ended in, from then on."""

    id: UUID
    pipeline: Pipeline
    ended: str | None = None
    claimed: dict[UUID, int] = field(default_factory=dict)  # task -> claims that we were given


class Verbs(RuleBasedStateMachine):
    url: str  # set by the test

    tasks = Bundle("tasks")
    leases = Bundle("leases")

    @initialize()
    def open(self) -> None:
        self.runner = asyncio.Runner()
        made = Settings(_env_file=None, database_url=self.url)
        self.connections: list[Connection] = [self.run(connect(made, "model")) for _ in range(3)]
        self.workers = [terms(max_losses=3) for _ in range(3)]
        self.jobs: dict[UUID, Known] = {}
        self.job_of: dict[UUID, UUID] = {}

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            for connection in self.connections:
                self.run(connection.close())
            self.runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @property
    def rows(self) -> Rows:
        return Rows(self.connections[0])

    def row(self, task: UUID) -> dict[str, Any]:
        return self.run(self.rows.task(task))

    # --- what may happen

    @rule(target=tasks, pipeline=st.sampled_from([ONE, THREE, DIAMOND]))
    def submit(self, pipeline: Pipeline) -> Any:
        new = jobs.NewJob(pipeline, "t")
        self.run(jobs.submit(self.connections[0], [new]))
        self.jobs[new.id] = Known(new.id, pipeline)
        return self._learn(new.id)

    def _learn(self, job_id: UUID) -> Any:
        rows = self.run(self.connections[0].fetch("SELECT id FROM task WHERE job_id = $1 ORDER BY position", job_id))
        fresh = [row["id"] for row in rows if row["id"] not in self.job_of]
        self.job_of |= dict.fromkeys(fresh, job_id)
        return multiple(*fresh)

    @rule(target=leases, worker=WORKERS, task=tasks, copies=st.integers(1, 2), late=st.booleans())
    def follow_a_hint(self, worker: int, task: UUID, copies: int, late: bool) -> Any:
        """A hint may come twice, and of any task, whatever its state; `late`: after its due time."""
        if late:
            self.run(
                self.connections[0].execute(
                    "UPDATE task SET available_at = clock_timestamp() WHERE id = $1 AND status IN ('retry', 'waiting')",
                    task,
                )
            )
        before = self.row(task)
        parents = self._parents(task)
        found = self.run(claims.claim(self.connections[worker], self.workers[worker], [task] * copies))
        assert len(found) <= 1
        if not found:
            return multiple()
        (claimed,) = found
        assert claimed.lease.epoch == before["epoch"] + 1
        assert before["status"] in ("pending", "retry", "waiting", "running")
        assert all(status in ("succeeded", "skipped") for status in parents)
        return claimed.lease

    @rule(target=leases, task=tasks, first=WORKERS, second=WORKERS)
    def a_zombie_is_made(self, task: UUID, first: int, second: int) -> Any:
        """Its lease lapses, and the task is another's, or its own again; both leases are tried from now on."""
        older = self.follow_a_hint(first, task, 1, True)
        self.the_lease_lapses(task)
        newer = self.follow_a_hint(second, task, 1, True)
        return multiple(*(lease for lease in (older, newer) if isinstance(lease, Lease)))

    def _parents(self, task: UUID) -> list[str]:
        rows = self.run(self.connections[0].fetch("SELECT status FROM task WHERE $1 = ANY(unblocks)", task))
        return [row["status"] for row in rows]

    @rule(lease=leases, worker=WORKERS)
    def complete(self, lease: Lease, worker: int) -> None:
        self._settle(lease, settlements.complete(self.connections[worker], [Completion(lease, (), {"v": 1})]))

    @rule(lease=leases, cause=st.sampled_from(["error", "timeout", "crash"]), retryable=st.booleans(), delay=DELAYS)
    def fail(self, lease: Lease, cause: str, retryable: bool, delay: float) -> None:
        failure = Failure(lease, cause, "c", "m", retryable, delay)
        self._settle(lease, settlements.fail(self.connections[1], [failure]))

    @rule(lease=leases, delay=st.sampled_from([0.0, 60.0]))
    def park(self, lease: Lease, delay: float) -> None:
        self._settle(lease, settlements.wait_until(self.connections[1], [Parking(lease, delay, {"n": 1})]))

    @rule(lease=leases)
    def give_back(self, lease: Lease) -> None:
        self._settle(lease, settlements.release(self.connections[2], [lease]))

    @rule(lease=leases)
    def acknowledge_a_cancel(self, lease: Lease) -> None:
        self._settle(lease, settlements.acknowledge_cancel(self.connections[2], [lease]))

    @rule(target=tasks, lease=leases, parts=st.integers(1, 3))
    def spread(self, lease: Lease, parts: int) -> Any:
        job = self.job_of[lease.task_id]
        step = f"part{len(self.job_of)}"  # of its own, so that a step may spread more than once
        said = [Part(step, "default", 2, "one.only", number) for number in range(parts)]
        self._settle(lease, settlements.fan_out(self.connections[0], [Spreading(lease, said)]))
        return self._learn(job)

    def _settle(self, lease: Lease, work: Coroutine[Any, Any, settlements.Settled]) -> None:
        """A lease that is not the task's any more changes nothing at all."""
        before = self.row(lease.task_id)
        seq = self._seq(lease.task_id)
        outcome = self.run(work)
        ours = (before["status"], before["lease_owner"], before["epoch"]) == ("running", lease.owner, lease.epoch)
        if not ours:
            assert (self.row(lease.task_id), self._seq(lease.task_id)) == (before, seq)
        elif outcome.verdicts[lease.task_id] is Verdict.SETTLED:
            assert self.row(lease.task_id)["status"] != "running"
        else:
            assert self.row(lease.task_id) == before

    def _seq(self, task: UUID) -> int:
        found: int = self.run(
            self.connections[0].fetchval("SELECT event_seq FROM job WHERE id = $1", self.job_of[task])
        )
        return found

    @rule(task=tasks)
    def the_lease_lapses(self, task: UUID) -> None:
        self.run(
            self.connections[0].execute(
                "UPDATE task SET lease_until = clock_timestamp() - interval '1 s' WHERE id = $1 AND status = 'running'",
                task,
            )
        )

    @rule(gone=st.lists(WORKERS, unique=True, max_size=2))
    def sweep(self, gone: list[int]) -> None:
        owners = [self.workers[worker].owner for worker in gone]
        self.run(sweeps.end_cancels(self.connections[1], owners))
        self.run(sweeps.expire_leases(self.connections[1], owners, 3))

    @rule(task=tasks)
    def cancel(self, task: UUID) -> None:
        job = self.job_of[task]
        self.run(jobs.request_cancel(self.connections[2], [job], "t", reason="r", by="b"))

    @rule(task=tasks)
    def the_grace_passes(self, task: UUID) -> None:
        self.run(
            self.connections[0].execute(
                "UPDATE job SET cancel_by = clock_timestamp() - interval '1 s' WHERE id = $1 AND cancel_by IS NOT NULL",
                self.job_of[task],
            )
        )
        self.run(sweeps.end_cancels(self.connections[0], []))

    @rule(task=tasks)
    def replay(self, task: UUID) -> None:
        known = self.jobs[self.job_of[task]]
        if self.run(jobs.replay(self.connections[0], known.id, "t")) is not None:
            assert known.ended == "failed"
            known.ended = None

    # --- what must hold whatever happened

    @invariant()
    def the_rows_add_up(self) -> None:
        for known in getattr(self, "jobs", {}).values():
            self.run(self._check(known))

    async def _check(self, known: Known) -> None:
        await assert_history(self.rows, known.id)
        connection = self.connections[0]
        job = await self.rows.job(known.id)
        tasks = await connection.fetch("SELECT * FROM task WHERE job_id = $1", known.id)
        assert job["leased"] == sum(task["status"] == "running" for task in tasks)
        if job["status"] in JOB_TERMINAL:
            assert all(task["status"] in TASK_TERMINAL for task in tasks)
            assert known.ended in (None, job["status"])  # what has ended stays so
            known.ended = job["status"]
        else:
            assert known.ended is None
        if job["status"] == "succeeded":
            assert {task["status"] for task in tasks} <= {"succeeded", "skipped"}
        claims_told = await connection.fetch(
            "SELECT task_id, count(*) AS n, max(epoch) AS top FROM event"
            " WHERE job_id = $1 AND kind IN ('claimed', 'taken_over') GROUP BY task_id",
            known.id,
        )
        told = {row["task_id"]: (row["n"], row["top"]) for row in claims_told}
        for task in tasks:
            assert told.get(task["id"], (0, 0)) == (task["epoch"], task["epoch"])  # one claim, one epoch
            assert task["errors"] <= task["max_attempts"]
            assert task["crashes"] <= settlements.MAX_CRASHES
            assert task["losses"] <= 4


@pytest.mark.timeout(600)
def test_no_sequence_of_verbs_leaves_the_diagram(database_url: str) -> None:
    Verbs.url = database_url
    run_state_machine_as_test(  # type: ignore[no-untyped-call]  # Hypothesis leaves it without types
        Verbs,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
