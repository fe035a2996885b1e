"""Makes rows for tests by the platform's own statements, and checks the invariants of rows and events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any
from uuid import UUID, uuid4

from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection
from leasehold.domain.lease import Lease
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.transitions import claims, jobs
from leasehold.transitions.claims import Claimed, LeaseTerms

ONE = Pipeline("one", module="tests.factories", steps=[Step("only", max_attempts=3)])
THREE = Pipeline(
    "three",
    module="tests.factories",
    steps=[Step("a"), Step("b", needs=("a",)), Step("c", needs=("b",))],
)
#: left and right need top; bottom needs both.
DIAMOND = Pipeline(
    "diamond",
    module="tests.factories",
    steps=[
        Step("top"),
        Step("left", needs=("top",)),
        Step("right", needs=("top",)),
        Step("bottom", needs=("left", "right")),
    ],
)
#: A schedule of it has no tick while a test runs, but on 29 February at midnight.
SELDOM = "0 0 29 2 *"


def terms(owner: UUID | None = None, *, ttl: float = 30.0, max_losses: int = 5) -> LeaseTerms:
    return LeaseTerms(owner or uuid4(), ttl, 5.0, max_losses)


@dataclass
class Rows:
    """Runs the platform's statements on one connection, and reads the rows."""

    connection: Connection
    terms: LeaseTerms = field(default_factory=terms)

    async def submit(
        self, pipeline: Pipeline = ONE, count: int = 1, tenant: str = "t", **columns: Any
    ) -> list[Announcement]:
        return await jobs.submit(self.connection, [jobs.NewJob(pipeline, tenant, **columns) for _ in range(count)])

    async def forget(self, announcements: Sequence[Announcement]) -> None:
        """Delete the rows of announcements that the test publishes itself, or nobody. TRUNCATE would lock both tables,
        and a relay that moves rows from one to the other would meet it in a deadlock.
        """
        await self.connection.execute(
            "WITH batches AS (DELETE FROM outbox_batch WHERE id = ANY($2)) DELETE FROM outbox WHERE id = ANY($1)",
            [one.outbox_id for one in announcements if one.outbox_id is not None],
            [one.batch.id for one in announcements if one.batch is not None],
        )

    async def claim_all(self) -> list[Claimed]:
        return await claims.claim_due(self.connection, self.terms, ["default"], 100)

    async def leased(self, pipeline: Pipeline = ONE, **columns: Any) -> Claimed:
        """Submit a job and claim its first step."""
        (hint,) = await self.submit(pipeline, **columns)
        (claimed,) = await claims.claim(self.connection, self.terms, [hint.hint.task_id])
        return claimed

    async def task(self, task_id: UUID) -> dict[str, Any]:
        return dict(await self.connection.fetchrow("SELECT * FROM task WHERE id = $1", task_id) or {})

    async def job(self, job_id: UUID) -> dict[str, Any]:
        return dict(await self.connection.fetchrow("SELECT * FROM job WHERE id = $1", job_id) or {})

    async def statuses(self, job_id: UUID) -> dict[str, str]:
        rows = await self.connection.fetch("SELECT step, status FROM task WHERE job_id = $1 ORDER BY position", job_id)
        return {row["step"]: row["status"] for row in rows}

    async def events(self, job_id: UUID) -> list[dict[str, Any]]:
        return [
            dict(r) for r in await self.connection.fetch("SELECT * FROM history WHERE job_id = $1 ORDER BY seq", job_id)
        ]

    async def lapse(self, task_id: UUID) -> None:
        """Let the lease of a running task pass."""
        await self.connection.execute(
            "UPDATE task SET lease_until = clock_timestamp() - interval '1 second' WHERE id = $1", task_id
        )


def stale(lease: Lease, **changes: Any) -> Lease:
    values: dict[str, Any] = {
        "task_id": lease.task_id,
        "owner": lease.owner,
        "epoch": lease.epoch,
        "attempt": lease.attempt,
        "trusted_until": monotonic(),
    }
    return Lease(**{**values, **changes})


async def assert_history(rows: Rows, job_id: UUID) -> None:
    """Assert that the events of a job have no gap, and that the rows are their sum (invariants I4 and I20)."""
    tasks = await rows.connection.fetch("SELECT id, step, status, epoch FROM task WHERE job_id = $1", job_id)
    _assert_history(await rows.job(job_id), await rows.events(job_id), tasks)
    await assert_sums(rows.connection)


async def assert_histories(connection: Connection) -> None:
    """Assert the same of all jobs."""
    events, tasks = defaultdict(list), defaultdict(list)
    for row in await connection.fetch("SELECT * FROM history ORDER BY job_id, seq"):
        events[row["job_id"]].append(row)
    for row in await connection.fetch("SELECT job_id, id, step, status, epoch FROM task"):
        tasks[row["job_id"]].append(row)
    for row in await connection.fetch("SELECT * FROM job"):
        _assert_history(row, events[row["id"]], tasks[row["id"]])
    await assert_sums(connection)


async def assert_sums(connection: Connection) -> None:
    """Assert for every job that its counters fit its steps, and that a blocked step waits for as many steps as it
    needs. A step has had at most as many attempts as leases: one that was given back counts no more.

    The first steps of a held job wait for one more: for the job's limits. A workflow needs none of the steps that it
    started. Exception: a job with a requested cancel ends with its last open step, so its counter of steps that are
    left is not counted down, and a workflow that has yet to see the cancel counts as leased.
    """
    wrong = await connection.fetch("""
        SELECT j.id, j.status, j.leased, steps.running, j.steps_left, steps.missing, steps.open,
               j.finished_at, j.expires_at, j.keep_seconds
        FROM job j CROSS JOIN LATERAL (
            SELECT count(*) FILTER (WHERE t.status = 'running') AS running,
                   count(*) FILTER (WHERE t.status NOT IN ('succeeded', 'skipped')
                                      AND NOT (t.contained AND t.status = 'failed')) AS missing,
                   count(*) FILTER (WHERE t.finished_at IS NULL) AS open
            FROM task t WHERE t.job_id = j.id
        ) AS steps
        WHERE j.leased <> CASE j.status WHEN 'cancel_requested' THEN steps.open ELSE steps.running END
           OR j.finished_at IS NULL AND j.status <> 'cancel_requested' AND j.steps_left <> steps.missing
           OR j.finished_at IS NOT NULL AND steps.open > 0
           OR (j.finished_at IS NOT NULL AND j.keep_seconds IS NOT NULL) <> (j.expires_at IS NOT NULL)
           OR j.expires_at > j.finished_at + make_interval(secs => j.keep_seconds + 1)
    """)
    assert not wrong, [dict(row) for row in wrong]
    waits = await connection.fetch("""
        SELECT c.id, c.step, c.waiting_on, needed.n FROM task c JOIN job j ON j.id = c.job_id CROSS JOIN LATERAL (
            SELECT greatest(count(*), j.held::int) AS n FROM task p
            WHERE p.job_id = c.job_id AND c.id = ANY(p.unblocks) AND p.status NOT IN ('succeeded', 'skipped')
              AND NOT p.contained
        ) AS needed
        WHERE c.status = 'blocked' AND c.waiting_on <> needed.n
    """)
    assert not waits, [dict(row) for row in waits]
    wrong_tasks = await connection.fetch(
        "SELECT id, step, status, attempt, epoch, lease_until, started_at FROM task"
        " WHERE attempt NOT BETWEEN 0 AND epoch OR (lease_until IS NOT NULL) <> (status = 'running')"
        " OR (started_at IS NOT NULL) <> (epoch > 0)"
    )
    assert not wrong_tasks, [dict(row) for row in wrong_tasks]


def _assert_history(job: Any, events: Sequence[Any], tasks: Sequence[Any]) -> None:
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert job["event_seq"] == len(events)
    assert events[-1]["job_status"] == job["status"]
    last: dict[UUID, tuple[str, int]] = {}  # by task: a step that fans out anew has other tasks of the same names
    for event in events:
        if event["task_id"] is not None:
            last[event["task_id"]] = (event["task_status"], event["epoch"])
    for row in tasks:
        if row["id"] in last:
            # No event records that the last part of a step has freed the step.
            freed = last[row["id"]][0] == "blocked" and row["status"] == "pending"
            assert last[row["id"]] == ("blocked" if freed else row["status"], row["epoch"]), row["step"]
        else:
            without_event = (
                "pending",
                "blocked",
                "waiting",
                "skipped",
            )  # not started yet, or skipped by the parameters
            assert row["status"] in without_event, row["step"]
            assert row["epoch"] == 0, row["step"]
