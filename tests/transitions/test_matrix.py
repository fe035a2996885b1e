"""Every verb against every state: it moves a task exactly where leasehold.domain.states says it may."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.ids import new_id
from leasehold.domain.lease import Lease
from leasehold.domain.states import TASK_MOVES, TASK_TERMINAL, TaskState
from leasehold.transitions import claims, concurrency, jobs, settlements, sweeps
from leasehold.transitions.settlements import Completion, Failure, FanningOut, Part, Snoozing, Suspending
from tests.factories import ONE, Rows

_JOB_OF = {TaskState.SUCCEEDED: "succeeded", TaskState.FAILED: "failed", TaskState.SKIPPED: "failed",
           TaskState.CANCELLED: "failed"}  # fmt: skip


async def put_into(rows: Rows, state: TaskState) -> tuple[UUID, Lease]:
    """A job whose one task is in `state`, and a lease that would fit it if it were running."""
    claimed = await rows.leased(ONE)
    lease = claimed.lease
    running, ended = state is TaskState.RUNNING, state in TASK_TERMINAL
    await rows.connection.execute(
        "UPDATE task SET status = $2, waiting_on = ($2 = 'blocked')::int, lease_owner = $3, lease_until = $4,"
        " finished_at = CASE WHEN $5 THEN clock_timestamp() END WHERE id = $1",
        lease.task_id,
        state.value,
        lease.owner if running else None,
        await rows.connection.fetchval("SELECT clock_timestamp() - interval '1 s'") if running else None,
        ended,
    )
    await rows.connection.execute(
        "UPDATE job SET status = $2, finished_at = CASE WHEN $3 THEN clock_timestamp() END WHERE id = $1",
        claimed.job_id,
        _JOB_OF.get(state, "running"),
        ended,
    )
    return claimed.job_id, lease


async def apply(rows: Rows, verb: str, job_id: UUID, lease: Lease) -> None:
    c = rows.connection
    acts: dict[str, Any] = {
        "claim": lambda: claims.claim(c, rows.terms, [lease.task_id]),
        "complete": lambda: settlements.complete(c, [Completion(lease)]),
        "fail": lambda: settlements.fail(c, [Failure(lease, "error", "e", "m", True, 0.0)]),
        "snooze": lambda: settlements.snooze(c, [Snoozing(lease, 0.0)]),
        "suspend": lambda: settlements.suspend(c, [Suspending(lease, (), 0)]),
        "release": lambda: settlements.release(c, [lease]),
        "expire_lease": lambda: sweeps.expire_leases(c, [], 5),
        "replay": lambda: jobs.replay(c, job_id, "t"),
        "rewind": lambda: c.fetchval(jobs.REWIND, job_id, "only"),
        "resolve": lambda: jobs.resolve(c, job_id, "t", "only", {"known": True}, "anna"),
        "fan_out": lambda: settlements.fan_out(c, [FanningOut(lease, [Part("x", "default", 1, "one.only", 1)])]),
        "acknowledge_cancel": lambda: _acknowledge(rows, job_id, lease),
        "request_cancel": lambda: jobs.request_cancel(c, [job_id], "t", reason="r", by="b"),
        "admit": lambda: _admit(rows, job_id),
        "go_on": lambda: _go_on(rows, job_id, lease),
    }
    await acts[verb]()


async def _go_on(rows: Rows, job_id: UUID, lease: Lease) -> None:
    """After a step before it. If the task waits, it is a workflow that waits for that step."""
    await rows.connection.execute("UPDATE task SET wake_at = 1 WHERE id = $1", lease.task_id)
    before = new_id()
    await rows.connection.execute(
        "INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, status, waiting_on, unblocks,"
        " max_attempts, epoch, attempt, lease_owner, lease_until)"
        " VALUES ($1, $2, 't', 'before', -1, 'default', 1, 'running', 0, $3, 3, 1, 1, $4, clock_timestamp())",
        before, job_id, [lease.task_id], rows.terms.owner,
    )  # fmt: skip
    await rows.connection.execute(  # a job with a step that runs has not ended
        "UPDATE job SET steps_left = steps_left + 1, status = 'running', finished_at = NULL WHERE id = $1", job_id
    )
    held = Lease(before, rows.terms.owner, 1, 1, lease.trusted_until)
    await settlements.complete(rows.connection, [Completion(held, claim_next=True)], rows.terms)


async def _acknowledge(rows: Rows, job_id: UUID, lease: Lease) -> None:
    await rows.connection.execute(
        "UPDATE job SET status = 'cancel_requested' WHERE id = $1 AND finished_at IS NULL", job_id
    )
    await settlements.acknowledge_cancel(rows.connection, [lease])


async def _admit(rows: Rows, job_id: UUID) -> None:
    await rows.connection.execute(
        "UPDATE job SET held = true, status = 'pending' WHERE id = $1 AND finished_at IS NULL", job_id
    )
    async with rows.connection.transaction():
        job = SimpleNamespace(
            id=job_id, tenant_id="t", priority=1, limits=[ConcurrencyLimit("t", "k", 1)], not_before=None
        )
        await concurrency.write_limits(rows.connection, job.limits)
        await concurrency.queue_up(rows.connection, [job])
    await concurrency.admit(rows.connection, [("t", "k")])


@pytest.mark.parametrize("state", list(TaskState))
@pytest.mark.parametrize("verb", TASK_MOVES)
async def test_a_verb_moves_only_along_the_diagram(rows: Rows, verb: str, state: TaskState) -> None:
    job_id, lease = await put_into(rows, state)
    await apply(rows, verb, job_id, lease)
    after = TaskState((await rows.task(lease.task_id))["status"])
    sources, targets = TASK_MOVES[verb]
    if state in sources:
        assert after in targets
    else:
        assert after is state


async def test_nothing_is_claimed_before_it_is_due(rows: Rows) -> None:
    claimed = await rows.leased()
    await settlements.snooze(rows.connection, [Snoozing(claimed.lease, timedelta(hours=1).total_seconds())])
    assert await claims.claim(rows.connection, rows.terms, [claimed.lease.task_id]) == []
    assert await rows.claim_all() == []
