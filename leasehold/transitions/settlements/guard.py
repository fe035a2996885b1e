"""What all settlements have in common: the SQL that they begin with (the guard), its parameters, and their verdicts. A
settlement is a statement that writes how an attempt ended, and ends its lease.

The guard is this project's main rule: a settlement changes only a running task whose owner and epoch are those of the
lease.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from uuid import UUID

from leasehold.broker.outbox import Announcement
from leasehold.domain.lease import Lease
from leasehold.transitions.endings import ended_jobs
from leasehold.transitions.settlements.records import Settled, Verdict

_Settlement = TypeVar("_Settlement")  # how one attempt ended, with its lease, such as a Completion or a Failure

#: The CTEs `lease_batch` (the leases) and `jobs` (the jobs of these leases, locked). The parameters $1 (owners), $2
#: (task ids) and $3 (epochs) are the lists that `lease_columns` returns.
LOCKED_JOBS = """lease_batch AS MATERIALIZED (
    -- The leases. `nth` is the lease's position in every parameter array, counted from 1.
    SELECT a.owner, a.id, a.epoch, a.nth FROM unnest($1::uuid[], $2::uuid[], $3::int[])
        WITH ORDINALITY AS a(owner, id, epoch, nth)
), jobs AS MATERIALIZED (
    -- Locks each job row and reads its columns once; later CTEs reuse them (see claims.marking). The job's leases are
    -- arrays: `owners`, `ids`, `epochs`, and `places` (their `nth`). `leased`: how many of the job's tasks have a
    -- lease. `external`: how many of the job's steps are done by external workers. `single_task`: the id of the job's
    -- only task, if the view `history` derives events of this job (db/tables.py). Then no rows are written for these
    -- events.
    SELECT j.id, j.status, j.steps_left, j.leased, j.external, j.tenant_id, j.trace, j.event_seq, j.pipeline,
           j.created_at, j.single_task, leases.owners, leases.ids, leases.epochs, leases.places
    FROM (
        SELECT t.job_id, array_agg(a.owner) AS owners, array_agg(a.id) AS ids, array_agg(a.epoch) AS epochs,
               array_agg(a.nth) AS places
        FROM lease_batch a JOIN task t ON t.id = a.id GROUP BY t.job_id
    ) AS leases JOIN job j ON j.id = leases.job_id
    ORDER BY j.id
    FOR UPDATE OF j
), """

#: SQL for a LATERAL join with the CTE `jobs`: a row `a` for each lease of the job.
LEASES_OF_JOBS = "unnest(jobs.owners, jobs.ids, jobs.epochs, jobs.places) AS a(owner, id, epoch, nth)"

#: SQL condition: the lease `a` is valid for the task `t`. The CASE keeps the planner from reading an index of all
#: running tasks (see db.database.unindexed).
GUARD = "CASE WHEN t.lease_owner = a.owner AND t.epoch = a.epoch AND t.status = 'running' THEN true ELSE false END"


def _held(job_condition: str) -> str:
    """The SQL of the constants HELD_... below. `job_condition`: SQL that is appended to the condition of `held`."""
    return f"""{LOCKED_JOBS}held AS MATERIALIZED (
    -- The tasks that pass the guard, locked.
    SELECT t.id, a.nth, jobs.status AS job_status, jobs.steps_left, jobs.leased, jobs.external, jobs.tenant_id,
           jobs.trace, jobs.event_seq, jobs.pipeline, jobs.created_at
    FROM jobs
    CROSS JOIN LATERAL {LEASES_OF_JOBS}
    JOIN task t ON t.id = a.id
    WHERE {GUARD}{job_condition}
    ORDER BY t.id
    FOR UPDATE OF t
)"""


#: Most settlements begin with these CTEs:
#: `lease_batch`: the leases, with owner, id, epoch and nth;
#: `jobs`: the jobs of the leases, locked;
#: `held`: the tasks that pass the guard, locked. Its columns: id and nth of the lease; job_status, steps_left, leased,
#: external, tenant_id, trace, event_seq, pipeline and created_at of the job.
#: `held` leaves out the tasks of jobs that are being cancelled, because their attempts end by `acknowledge_cancel`, and
#: are not retried.
HELD_IN_LIVE_JOB = _held("\n      AND jobs.status <> 'cancel_requested'")
#: The same CTEs. If a job is being cancelled, `held` has only the job's workflow, and only if the workflow has made a
#: call (`journaled`). Such a workflow may release its lease and go on later. The next attempt then sees the cancel. The
#: job's `leased` counts this workflow until it has ended, even while it has no lease.
HELD_OR_TO_SEE_CANCEL = _held("\n      AND (jobs.status <> 'cancel_requested' OR t.journaled)")
#: The same CTEs. `held` has only the tasks of jobs that are being cancelled.
HELD_IN_CANCELLED_JOB = _held("\n      AND jobs.status = 'cancel_requested'")


def lease_columns(leases: Sequence[Lease]) -> tuple[list[UUID], list[UUID], list[int]]:
    """The parameters $1, $2 and $3 of every settlement: owners, task ids, epochs."""
    return [lease.owner for lease in leases], [lease.task_id for lease in leases], [lease.epoch for lease in leases]


async def settle_twice(
    settle: Callable[[Sequence[_Settlement]], Awaitable[Settled]],
    settlements: Sequence[_Settlement],
    lease_of: Callable[[_Settlement], Lease],
) -> Settled:
    """Run the statement `settle`, and run it again for the leases whose verdict is LOST.

    PostgreSQL may still be executing an earlier try of the same settlement, because the client of this try no longer
    waits for its answer, or has sent the request twice. The first run of `settle` then waits for the job's lock, which
    the earlier try has, and finds that it has nothing to write. But a statement that has waited for a lock still has
    its old snapshot. So the first run does not see that the earlier try has settled the task; the second run sees this.
    If the lease is lost, neither run changes anything.
    """
    outcome = await settle(settlements)
    lost = [one for one in settlements if outcome.verdicts[lease_of(one).task_id] is Verdict.LOST]
    if lost:
        outcome.add(await settle(lost))
    return outcome


def settled_of(rows: Sequence[Any], *, hints: bool = False, ends: bool = False) -> Settled:
    """The outcome that the `rows` of a settlement describe. A row has the verdict of one task, so a settlement must not
    have two leases of one task. `hints`: the statement also returns rows with an `outbox_id`. Such a row has a hint (a
    message that tells workers of a due task) and no verdict. `ends`: the rows also have the columns that `ended_jobs`
    reads.
    """
    outcome = Settled({}, ended=ended_jobs(rows) if ends else [])
    for row in rows:
        if hints and row["outbox_id"] is not None:
            outcome.announcements.append(Announcement.from_row(row))
            continue
        outcome.verdicts[row["task_id"]] = Verdict.SETTLED if row["settled"] else Verdict.LOST
        if row["settled"] and row["state"] is not None:
            outcome.states[row["task_id"]] = row["state"]
    return outcome
