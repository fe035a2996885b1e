"""A worker dies at every point of a bulk operation, and the operation acts on each target once."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from leasehold.db.database import Connection, connect
from leasehold.domain.ids import new_id
from leasehold.pipelines.demo.pipeline import noop
from leasehold.pipelines.operations.pipeline import Action, Operation, bulk_operation
from leasehold.transitions import claims, jobs, settlements
from leasehold.transitions.jobs import NewJob
from leasehold.transitions.settlements import Failure
from tests.factories import assert_history
from tests.scenarios.fleet import Fleet, Process

JOBS = 30
#: The first poll claims the operation. Later polls would add commits, more of them the slower the machine is.
TERMS: dict[str, Any] = {"worker_queues": "operations", "poll_seconds": 30.0}
#: A worker with this failpoint stands still in its third batch.
HELD = "mid_batch:stop:3"
#: The kind of event that each action writes for a job.
EVENTS = {"retry": "replayed", "cancel": "cancel_requested"}
#: The failpoints at which the worker is killed. `commit.worker:kill:N`: after the Nth commit of its connections, which
#: is one of the operation or of a duty. A worker that starts makes about 15.
POINTS: list[tuple[Action, str]] = [
    ("retry", "commit.worker:kill:22"),
    ("retry", "after_commit:kill"),
    ("cancel", "commit.worker:kill:24"),
    ("delete", "commit.worker:kill:25"),
    ("delete", "mid_batch:kill:3"),
    ("cancel", "after_batch:kill:3"),
]


async def targets(fleet: Fleet, action: Action) -> list[UUID]:
    connection = fleet.rows.connection
    new = [NewJob(noop, "t") for _ in range(JOBS)]
    await jobs.submit(connection, new)
    if action != "cancel":
        tasks = [row["id"] for row in await connection.fetch("SELECT id FROM task")]
        claimed = await claims.claim(connection, fleet.rows.terms, tasks)
        await settlements.fail(
            connection, [Failure(claim.lease, "error", "broken", "It did not work.", False, 0.0) for claim in claimed]
        )
    return [job.id for job in new]


async def submit(fleet: Fleet, action: Action, rate: int = 20) -> UUID:
    """An operation that takes some seconds: two jobs in a batch, ten batches a second."""
    connection = fleet.rows.connection
    operation = Operation(
        action=action,
        filter="created:>0s",
        at=await connection.fetchval("SELECT clock_timestamp()"),
        of_tenant="t",
        pipelines=(),
        runs=True,
        client_id="tests",
        rate=rate,
    )
    new = NewJob(bulk_operation, "t", params=operation.model_dump(mode="json"))
    await jobs.submit(connection, [new])
    return new.id


async def acted_on(fleet: Fleet, action: Action) -> int:
    """The number of jobs that the operation has acted on."""
    connection = fleet.rows.connection
    if action == "delete":
        return int(await connection.fetchval("SELECT count(*) FROM tombstone"))
    kind = EVENTS[action]
    return int(await connection.fetchval("SELECT count(DISTINCT job_id) FROM history WHERE kind = $1", kind))


async def assert_each_once(fleet: Fleet, action: Action, job_ids: list[UUID], operation: UUID) -> None:
    connection = fleet.rows.connection

    async def ended() -> bool:
        return bool(await connection.fetchval("SELECT finished_at IS NOT NULL FROM job WHERE id = $1", operation))

    await fleet.until(ended)
    value = await connection.fetchval(
        "SELECT r.value FROM result r JOIN task t ON t.id = r.task_id WHERE t.job_id = $1", operation
    )
    assert value | {"longest_ms": 0} == {"acted": JOBS, "refused": 0, "codes": {}, "longest_ms": 0}
    if action == "delete":
        deleted = {row["job_id"] for row in await connection.fetch("SELECT job_id FROM tombstone")}
        assert deleted == set(job_ids)
        return
    rows = await connection.fetch(
        "SELECT job_id, count(*) AS n FROM history WHERE kind = $1 AND job_id = ANY($2) GROUP BY job_id",
        EVENTS[action],
        job_ids,
    )
    assert {row["job_id"]: row["n"] for row in rows} == dict.fromkeys(job_ids, 1)
    for job_id in job_ids:
        await assert_history(fleet.rows, job_id)


@pytest.mark.parametrize(("action", "point"), POINTS)
async def test_a_worker_killed_at_a_point_acts_on_each_target_once(fleet: Fleet, action: Action, point: str) -> None:
    job_ids = await targets(fleet, action)
    operation = await submit(fleet, action)
    for _ in range(5):  # on a busy machine the commits of duties alone may be as many
        victim = await fleet.worker(failpoints=point, **TERMS)
        assert await victim.wait() == -signal.SIGKILL
        if acted := await acted_on(fleet, action):
            break
    if point != "after_commit:kill":
        assert 0 < acted < JOBS, "the worker died too early or too late for the test"
    await fleet.worker(**TERMS)
    await assert_each_once(fleet, action, job_ids, operation)


async def _held_in_its_batch(fleet: Fleet, worker: Process, operation: UUID, holder: Connection) -> None:
    """Lock the operation's task in a transaction of `holder`, and wait until a batch waits for the lock. Then the batch
    has acted on its targets, and has committed nothing. The worker stands still in the batch until the task is locked:
    on a busy machine the operation could end before.
    """

    async def stands_still() -> bool:
        return (Path("/proc") / str(worker.pid) / "stat").read_text().rpartition(")")[2].split()[0] == "T"

    await fleet.until(stands_still, worker)
    assert await acted_on(fleet, "retry") > 0
    await holder.execute("SELECT 1 FROM task WHERE job_id = $1 FOR UPDATE", operation)
    worker.signal(signal.SIGCONT)

    async def waits() -> bool:
        return bool(
            await fleet.rows.connection.fetchval(
                "SELECT EXISTS (SELECT 1 FROM pg_stat_activity WHERE datname = current_database()"
                " AND wait_event_type = 'Lock' AND query LIKE '%-- note%')"
            )
        )

    await fleet.until(waits)


async def test_a_worker_killed_between_its_acts_and_their_commit_acts_on_each_target_once(fleet: Fleet) -> None:
    job_ids = await targets(fleet, "retry")
    operation = await submit(fleet, "retry")
    victim = await fleet.worker(failpoints=HELD, **TERMS)
    holder = await connect(fleet.settings, "holder")
    async with holder.transaction():
        await _held_in_its_batch(fleet, victim, operation, holder)
        before = await acted_on(fleet, "retry")
        await victim.kill()
    await holder.close()
    assert await acted_on(fleet, "retry") == before < JOBS
    await fleet.worker(**TERMS)
    await assert_each_once(fleet, "retry", job_ids, operation)


async def test_a_batch_of_a_lost_lease_changes_nothing(fleet: Fleet) -> None:
    job_ids = await targets(fleet, "retry")
    operation = await submit(fleet, "retry")
    worker: Process = await fleet.worker(failpoints=HELD, **TERMS)
    holder = await connect(fleet.settings, "holder")
    async with holder.transaction():
        await _held_in_its_batch(fleet, worker, operation, holder)
        before = await acted_on(fleet, "retry")
        await holder.execute(  # another worker takes the task over
            "UPDATE task SET epoch = epoch + 1, lease_owner = $2, lease_until = clock_timestamp() + interval '1 h'"
            " WHERE job_id = $1",
            operation,
            new_id(),
        )
        await holder.execute(  # and its claim is recorded, as each is
            "WITH j AS (UPDATE job SET event_seq = event_seq + 1 WHERE id = $1 RETURNING id, tenant_id, event_seq)"
            " INSERT INTO event (job_id, seq, tenant_id, kind, job_status) SELECT id, event_seq, tenant_id, 'claimed',"
            " 'running' FROM j",
            operation,
        )
    await holder.close()
    await asyncio.sleep(0.5)
    assert await acted_on(fleet, "retry") == before < JOBS
    await fleet.rows.connection.execute("UPDATE task SET lease_until = clock_timestamp() WHERE job_id = $1", operation)
    await assert_each_once(fleet, "retry", job_ids, operation)
    assert worker.process.returncode is None
