"""Writes the runs that workflows start (`ctx.start`, and `ctx.run` of limited tasks), and wakes workflows whose awaited
runs have ended. Also cancels the runs of a workflow that ended without success. Detached runs (`ctx.detached.start`) go
on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID

from leasehold.broker.outbox import RELAY_AT, Announcement
from leasehold.db.database import Connection, row_count, unindexed
from leasehold.domain.errors import LeaseLost
from leasehold.domain.lease import Lease
from leasehold.telemetry.duties import counted
from leasehold.transitions import jobs, runs
from leasehold.transitions.endings import JobEnded
from leasehold.transitions.quarantine import not_in, run_unit, run_units
from leasehold.transitions.runs import CreatedRuns, NewRun
from leasehold.transitions.workflows import recording
from leasehold.transitions.workflows.journal_sql import CLOSED
from leasehold.transitions.workflows.records import Call, Recording

#: DUTY is the name of the duty (a loop of the elected worker) that calls `wake_waiting`, `close_calls` and
#: `cancel_orphans`. In the table `quarantine`, the workflows that the duty could not wake have the name DUTY, and the
#: runs that it could not cancel have the name ORPHANS. `not_in` leaves both out until the duty tries them again.
#: `counted` returns the name, and creates the counters of the duty.
DUTY, ORPHANS = counted("workflow_children"), counted("workflow_orphans")

# Locks the workflow's job, if the lease (task $1, owner $2, epoch $3) is valid. _STARTED must be a separate statement
# that runs after this one in the same transaction. The reason: an earlier try of the same start may just be committing,
# and a statement that waits for the lock keeps its old snapshot. So it would not see the rows of the earlier try.
_LOCK = """
-- start_lock
SELECT j.id AS job_id, j.status = 'cancel_requested' AS cancelling, t.priority, j.trace
FROM task t JOIN job j ON j.id = t.job_id
WHERE t.id = $1 AND t.lease_owner = $2 AND t.epoch = $3
FOR UPDATE OF j
"""

# Whether the journal of the job $1 has a row at this place (branch $2, number $3).
_STARTED = """
-- start_written
SELECT EXISTS (SELECT FROM journal e WHERE e.job_id = $1 AND e.branch = $2 AND e.number = $3)
"""


async def start(
    connection: Connection, lease: Lease, call: Call, new: NewRun, wait: Call | None = None, *, again: bool = False
) -> CreatedRuns | None:
    """(new) -> pending. Under the workflow's lease, writes the run and the call's row of the journal, or neither. Safe
    to repeat. Call this in a transaction. Returns None if nothing was written, because the workflow is being cancelled.
    Exception: a detached run starts even then.

    `wait`: given if the run does the work of a step (`ctx.run` of a limited task). The journal then also gets the row
    `wait`, which waits for the end of the run, and the run gets the workflow's priority and trace.

    `again` (only together with `wait`): failed -> pending. A client has retried the workflow, whose journal already has
    the row of the call. So the run is retried, too. If the run is no longer failed, only `wait` is written, and the
    workflow then reads the run's state.

    Raises LeaseLost.
    """
    new = replace(new, is_step=wait is not None)
    by_tenant = None
    if again:
        await runs.lock_limits(connection, new)
    else:
        by_tenant = await runs.write_limits(connection, new)
    row = await connection.fetchrow(_LOCK, lease.task_id, lease.owner, lease.epoch)
    if row is None:
        raise LeaseLost
    # An earlier try, whose answer was lost, may have started the run. Check this before the cancel. Even if the cancel
    # came after that try, the run is in the journal, where the workflow's code finds it if the code runs again. So the
    # answer must not be None (nothing was written).
    last = call if wait is None else wait
    if await connection.fetchval(_STARTED, row["job_id"], last.branch, last.number):
        return CreatedRuns([], [])
    if row["cancelling"] and call.state == "open":  # a detached call is written as `done`
        return None
    if wait is not None:
        new = replace(new, priority=row["priority"], trace=row["trace"])
    calls = tuple(written for written in (None if again else call, wait) if written is not None)
    answers, _ = await recording.record(connection, [Recording(lease, calls, row["cancelling"])])
    if not answers[lease.task_id].committed:
        raise LeaseLost
    if not again:
        return await runs.create_together(connection, [new], by_tenant)
    revived = await runs.revive(connection, new)
    return CreatedRuns([], []) if revived is None else CreatedRuns(revived.hints, revived.limits)


# SQL: the instant at which the run that the journal's row `e` awaits has ended. For a deleted run it is in the year
# 1970, in which no run has ended.
_END_OF_RUN = "coalesce((SELECT child.finished_at FROM job child WHERE child.id = e.child_id), 'epoch')"
#: SQL: the run that the journal's row `e` awaits has ended, or is deleted, and `_WAKE_WAITING` has not woken the
#: workflow for this end. `due_at` is the end for which `_WAKE_WAITING` last woke the workflow. It is an instant and not
#: a flag, because a retried run may end again. The row stays open until the workflow has ended (see `_CLOSE`). So
#: without `due_at`, every turn of the duty would wake a workflow that has the result and waits for something else.
HAS_NEWS = f"""e.kind = 'result' AND e.state = 'open'
      AND NOT EXISTS (SELECT 1 FROM job child WHERE child.id = e.child_id AND {unindexed("child.finished_at IS NULL")})
      AND e.due_at IS DISTINCT FROM {_END_OF_RUN}"""

#: SQL: the task `t` is a workflow that waits, and is not due now. A workflow's own task is `journaled` (it has called
#: something) and not `contained` (started by a workflow).
IS_WAITING_WORKFLOW = f"""NOT t.contained AND t.journaled AND t.available_at > clock_timestamp()
      AND {unindexed("t.status = 'waiting'")}"""

# Locks workflows that wait for a run that has ended. A step of the workflow that snoozes is not woken, and keeps its
# delay. A workflow that runs now need not be woken. Either it reads that the run has ended, or it suspends while the
# journal's row is still open. In the second case this statement finds the workflow later.
#
# $1: at most this many workflows are locked. DISTINCT makes this number count workflows, because one workflow may await
# many runs. Workflows that other transactions have locked do not count, so they keep no other workflow waiting. $2:
# only this workflow; NULL: all workflows.
_LOCK_WAITING = f"""
-- awaited_lock
SELECT j.id FROM (
    SELECT DISTINCT e.job_id FROM journal e JOIN job parent ON parent.id = e.job_id
    WHERE {HAS_NEWS}
      AND {unindexed("parent.finished_at IS NULL")}
      AND EXISTS (SELECT 1 FROM task t WHERE t.job_id = e.job_id AND {IS_WAITING_WORKFLOW})
      AND ($2::uuid IS NULL OR e.job_id = $2) AND {not_in(DUTY, "e.job_id")}
) AS workflow JOIN job j ON j.id = workflow.job_id
LIMIT $1
FOR UPDATE OF j SKIP LOCKED
"""

# $1: the locked workflows. `told` sets `due_at` in the rows of all their ended runs, so that no end wakes a workflow
# twice. At its next claim a workflow reads its journal, which shows the ends of all these runs.
_WAKE_WAITING = f"""
-- awaited_wake
WITH woken_workflows AS (
    UPDATE task t SET news = t.news + 1, wake_at = NULL, available_at = clock_timestamp()
    WHERE t.job_id = ANY($1::uuid[]) AND {IS_WAITING_WORKFLOW}
      AND EXISTS (SELECT 1 FROM journal e WHERE e.job_id = t.job_id AND {HAS_NEWS})
    RETURNING t.id, t.job_id, t.queue, t.priority
), told AS (
    UPDATE journal e SET due_at = {_END_OF_RUN} FROM woken_workflows w WHERE e.job_id = w.job_id AND {HAS_NEWS}
)
INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
SELECT w.id, w.job_id, w.queue, w.priority, (SELECT j.trace FROM job j WHERE j.id = w.job_id),
       {RELAY_AT}
FROM woken_workflows w
RETURNING id AS outbox_id, task_id, queue, priority, headers
"""


async def wake_waiting(connection: Connection, limit: int = 200) -> Sequence[Announcement]:
    """waiting -> waiting, due now: at most `limit` workflows whose awaited runs have ended, or are deleted. A workflow
    is woken once, even if several of its runs have ended. Returns a hint for each workflow.
    """

    # `run_units` passes None first. After an error, it passes each locked job alone.
    async def take(only_job: object | None) -> list[UUID]:
        return [row["id"] for row in await connection.fetch(_LOCK_WAITING, limit, only_job)]

    async def wake(job_ids: Sequence[UUID]) -> Sequence[Any]:
        return await connection.fetch(_WAKE_WAITING, list(job_ids))

    return [Announcement.from_row(row) for row in await run_units(connection, DUTY, take, wake)]


# Finds unfinished runs whose workflow is being cancelled, or has ended without success.
# $1: at most this many runs.
_ORPHANS = f"""
-- workflow_orphans
SELECT child.id, child.tenant_id, parent.id AS parent_id, parent.status
FROM journal e
JOIN job child ON child.id = e.child_id AND child.finished_at IS NULL AND child.status <> 'cancel_requested'
JOIN job parent ON parent.id = e.job_id
WHERE e.kind = 'start' AND e.state = 'open'
  AND parent.status IN ('cancel_requested', 'cancelled', 'failed', 'expired') AND {not_in(ORPHANS, "child.id")}
LIMIT $1
"""


# Closes rows of the kinds `start` and `result`, so that the index of open rows leaves them out. Of a workflow that
# succeeded, it closes all these rows. Of a workflow that ended otherwise, it closes the rows whose run has ended, or is
# deleted. Of a workflow that has not ended, it closes only rows `start` whose run is deleted. So two kinds of rows stay
# open although their run has ended. While such a row is open and has no value, retention keeps the run
# (`forgettable_jobs` in sweeps.py).
# - A row `start`, because the workflow may still come to await the run. `write_calls` closes the row when the workflow
#   records the run's result. If the run failed, the row gets the value KNOWN instead, and stays open, because a
#   client may retry the run (`jobs.replay`), and the run must still be cancelled if its workflow ends without success.
# - A row `result`, because the workflow's function may run again and read the result again. A row whose result the
#   workflow has recorded is not open. If the run is deleted, _WAKE_WAITING wakes the workflow by this row.
#
# A client may also retry a workflow that failed. REPLAY then opens these two kinds of rows again. So when this
# statement closes a row `start` of a failed workflow, it marks the row (CLOSED). The row of a detached run, or of a run
# whose result is recorded, must stay closed, and has no mark. While REPLAY is under way, the lock of the job `p` makes
# this statement leave the workflow out. Otherwise this statement, which has read that the workflow has failed, would
# close again the rows that REPLAY has opened.
#
# $1: at most this many rows are closed. `closable` locks the rows, so that no other statement changes them before the
# UPDATE. `OFFSET 0` makes PostgreSQL begin with the open rows. Without it, PostgreSQL would sometimes read all jobs
# first, because of the LIMIT. `child.goes_on` is NULL for a deleted run.
_CLOSE = f"""
-- workflow_children_close
WITH closable AS (
    SELECT e.job_id, e.branch, e.number, e.kind = 'start' AND parent.status = 'failed' AS is_marked
    FROM journal e
    LEFT JOIN LATERAL (
        SELECT j.finished_at IS NULL AS goes_on FROM job j WHERE j.id = e.child_id OFFSET 0) AS child ON true
    CROSS JOIN LATERAL (SELECT j.status, j.finished_at FROM job j WHERE j.id = e.job_id OFFSET 0) AS parent
    WHERE e.kind IN ('start', 'result') AND e.state = 'open'
      AND CASE WHEN parent.status = 'succeeded' THEN true
               WHEN child.goes_on THEN false
               WHEN parent.status = 'failed' THEN EXISTS (
                   SELECT FROM job p WHERE p.id = e.job_id AND {unindexed("p.status = 'failed'")} FOR SHARE SKIP LOCKED)
               WHEN parent.finished_at IS NOT NULL THEN true
               ELSE e.kind = 'start' AND child.goes_on IS NULL END
    LIMIT $1 FOR NO KEY UPDATE OF e
)
UPDATE journal e SET state = 'done', value = CASE WHEN c.is_marked THEN {CLOSED} ELSE e.value END
FROM closable c WHERE e.job_id = c.job_id AND e.branch = c.branch AND e.number = c.number
"""


async def close_calls(connection: Connection, limit: int = 5000) -> bool:
    """open -> done, for at most `limit` calls whose run has ended, or whose workflow no longer needs the run. Returns
    whether more may have to be closed.
    """
    return row_count(await connection.execute(_CLOSE, limit)) >= limit


async def cancel_orphans(connection: Connection, limit: int = 100) -> tuple[list[JobEnded], list[Announcement], bool]:
    """Request the cancel of at most `limit` runs whose workflow has ended without success, or is being cancelled.
    Detached runs go on, because their rows in the journal are `done` from the beginning. Returns three values. The
    first has the runs that have ended immediately. The second has the hints (messages that tell workers of due tasks)
    of the cancelled runs that are workflows. The third is whether more runs may have to be cancelled.
    """
    ended_jobs: list[JobEnded] = []
    hints: list[Announcement] = []
    rows = await connection.fetch(_ORPHANS, limit)
    for row in rows:
        reason = f"its workflow, run {row['parent_id']}, is {row['status']}"
        if row["status"] == "failed":  # a retry of the workflow would await the run again
            reason += "; a retry of the workflow does not run it again, a rerun starts it anew"
        cancel = partial(
            jobs.request_cancel,
            connection,
            [row["id"]],
            row["tenant_id"],
            reason=reason,
            by="its workflow",
            forced=True,
        )
        if (cancels := await run_unit(connection, ORPHANS, row["id"], cancel)) is not None:
            ended_jobs += cancels.ended
            hints += cancels.hints
    return ended_jobs, hints, len(rows) == limit
