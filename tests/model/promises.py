"""What must hold of a job's rows whatever happened to it, and of its events: they add up to the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from chaos.checks.state_changes import JOB_EDGES, TASK_EDGES
from leasehold.domain.states import JOB_TERMINAL, TASK_TERMINAL, TaskState
from leasehold.transitions import settlements
from tests.factories import Rows, assert_history

Row = Mapping[str, Any]

#: Once a job was asked to stop it never looks again as if nobody had asked.
_AFTER_A_CANCEL = {"cancel_requested", "cancelled", "succeeded", "expired"}
_CLAIMS = ("claimed", "taken_over")


@dataclass
class Known:
    """A job as the test knows it. `ended`: the state it ended in, from then on."""

    id: UUID
    ended: str | None = None


async def assert_promises(rows: Rows, known: Known, max_losses: int) -> None:
    await assert_history(rows, known.id)
    job = await rows.job(known.id)
    stored = await rows.connection.fetch("SELECT * FROM task WHERE job_id = $1", known.id)
    tasks = [dict(row) for row in stored]
    events = await rows.events(known.id)
    _the_job_agrees_with_its_tasks(job, tasks)
    _what_has_ended_stays_so(job, known)
    _no_step_runs_before_what_it_needs(tasks)
    _limits_hold(tasks, max_losses)
    _only_edges_of_the_diagram(events, {task["id"]: task["status"] for task in tasks})
    _one_epoch_a_claim_and_one_effect_a_task(events, tasks)


def _the_job_agrees_with_its_tasks(job: Row, tasks: Sequence[Row]) -> None:
    states = {task["status"] for task in tasks}
    is_cancelling = job["status"] == "cancel_requested"
    counted = set(TaskState) - TASK_TERMINAL if is_cancelling else {"running"}
    assert job["leased"] == sum(task["status"] in counted for task in tasks)
    # A cancel leaves what runs, and the workflows that are to see it.
    assert not is_cancelling or all(
        task["status"] in TASK_TERMINAL or task["status"] == "running" or task["journaled"] for task in tasks
    )
    assert all((task["lease_owner"] is not None) == (task["status"] == "running") for task in tasks)
    assert (job["finished_at"] is not None) == (job["status"] in JOB_TERMINAL)
    if job["status"] in JOB_TERMINAL:
        assert states <= TASK_TERMINAL, (job["status"], states)
    else:
        assert not states <= TASK_TERMINAL, (job["status"], states)
    if job["status"] == "succeeded":
        assert {task["status"] for task in tasks if not task["contained"]} <= {"succeeded", "skipped"}
        assert states <= {"succeeded", "skipped", "failed"}


def _what_has_ended_stays_so(job: Row, known: Known) -> None:
    if job["status"] in JOB_TERMINAL:
        assert known.ended in (None, job["status"])
        known.ended = job["status"]
    else:
        assert known.ended is None


def _no_step_runs_before_what_it_needs(tasks: Sequence[Row]) -> None:
    running = {task["id"] for task in tasks if task["status"] == "running"}
    needed = [task for task in tasks if running & set(task["unblocks"]) and not task["contained"]]
    assert all(task["status"] in ("succeeded", "skipped") for task in needed)


def _limits_hold(tasks: Sequence[Row], max_losses: int) -> None:
    for task in tasks:
        assert task["errors"] <= task["max_attempts"]
        assert task["crashes"] <= settlements.MAX_CRASHES
        assert task["losses"] <= max_losses + 1


def _only_edges_of_the_diagram(events: Sequence[Row], rows: Mapping[UUID, str]) -> None:
    """Folds the events with leasehold.domain.states. That a step was freed has no event of its own."""
    job: str | None = None
    tasks: dict[UUID, str] = {}
    for event in events:
        now = event["job_status"]
        assert now == job or (job, now) in JOB_EDGES, (job, event)
        assert job != "cancel_requested" or now in _AFTER_A_CANCEL, event
        job = now
        if event["task_id"] is not None:
            before, after = tasks.get(event["task_id"], "pending"), event["task_status"]
            freed = before == "blocked" and ("pending", after) in TASK_EDGES
            assert before == after or (before, after) in TASK_EDGES or freed, (before, event)
            tasks[event["task_id"]] = after
    for task_id, said in tasks.items():
        assert said == rows[task_id] or (said, rows[task_id]) == ("blocked", "pending")


def _one_epoch_a_claim_and_one_effect_a_task(events: Sequence[Row], tasks: Sequence[Row]) -> None:
    claimed: dict[UUID, list[int]] = {}
    for event in events:
        if event["kind"] in _CLAIMS:
            claimed.setdefault(event["task_id"], []).append(event["epoch"])
    completed = Counter(event["task_id"] for event in events if event["kind"] == "completed")
    for task in tasks:
        assert claimed.get(task["id"], []) == list(range(1, task["epoch"] + 1))
        assert completed[task["id"]] == (task["status"] == "succeeded")
