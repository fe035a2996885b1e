"""`complete` writes that steps succeeded. It unblocks the steps that need them, and ends a job with its last step."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from operator import attrgetter
from time import monotonic
from typing import Any
from uuid import UUID

from leasehold.broker.outbox import RELAY_AT
from leasehold.db.database import Connection, unindexed
from leasehold.transitions.claims import LeaseTerms, claimed_of
from leasehold.transitions.claims.marking import output_prefix
from leasehold.transitions.settlements.guard import (
    GUARD,
    LEASES_OF_JOBS,
    LOCKED_JOBS,
    lease_columns,
    settle_twice,
    settled_of,
)
from leasehold.transitions.settlements.outputs_sql import outputs_column, write_outputs
from leasehold.transitions.settlements.records import Completion, Settled, Verdict

# A workflow waits with the status `waiting`. The column `news` counts the signals that have come for the workflow, and
# its steps that have ended. `wake_at` is a number of news: when `news` reaches `wake_at`, the workflow is due. While
# the workflow runs, a completion only raises `news`. `suspend` later compares `news` with the count that the worker has
# read.

#: A count that `news` never reaches. COMPLETE writes it in place of a `wake_at` of NULL if the workflow is not due. The
#: reason: in the row that its UPDATE returns, NULL means that the workflow is due now.
_NEVER = 2**31 - 1
#: SQL: the step `c` (a blocked step, or a waiting workflow) becomes due now. `dep.ended_needs`: how many more of the
#: steps for which it waits have ended.
_IS_READY = (
    "CASE c.status WHEN 'blocked' THEN c.waiting_on = dep.ended_needs"
    " WHEN 'waiting' THEN coalesce(c.news + dep.ended_needs >= c.wake_at, false) ELSE false END"
)

#: SQL of a column that says whether the worker may claim a next step of the job. `place`: the lease's position in the
#: parameter arrays. `external`: how many steps of the job are for external workers.
_CLAIM_NEXT = """,
           ($6::bool[])[d.place] AND d.external = 0 AND d.job_status <> 'cancel_requested' AS claim_next"""
#: SQL of a join that counts, for each job, the next steps that the statement claims.
_CLAIMED_NEXT = """    CROSS JOIN LATERAL (
        SELECT count(*)::int AS step_count FROM claimed_steps t WHERE t.job_id = per_job.job_id
    ) AS claimed_next
"""


def _completed(columns: str = "", condition: str = "") -> str:
    """SQL: the beginning of the statement, up to the CTE `numbered_tasks`, which has the tasks that the statement
    completes. `columns`: more columns of `numbered_tasks`. `condition`: SQL that restricts the tasks `t` that may be
    completed.
    """
    return f"""WITH {LOCKED_JOBS}leases AS MATERIALIZED (
    -- Each lease with its job. The sort reads all of `jobs` first: so all jobs are locked before the first task is.
    SELECT a.owner, a.id, a.epoch, a.nth AS place, jobs.status AS job_status, jobs.steps_left, jobs.leased,
           jobs.external, jobs.tenant_id, jobs.trace, jobs.event_seq, jobs.pipeline, jobs.created_at,
           CASE WHEN jobs.steps_left = 1 THEN jobs.single_task END AS last_task
    FROM jobs CROSS JOIN LATERAL {LEASES_OF_JOBS}
    ORDER BY a.id
), succeeded_tasks AS (
    -- The leases' tasks that pass the guard (guard.py) succeed. If a renewal of the lease, or a write of the attempt's
    -- note, has locked a task's row, this write waits, and then checks the guard on the newest version of the row.
    -- Other settlements lock the rows before they write. This statement does not, because each such lock is one more
    -- record in the WAL. If a job has a single task, and the task succeeds at its first claim, this statement writes no
    -- event. The view `history` derives the events of the claim and of the completion from `claim_seq`, `claimed_by`
    -- and `done_seq`.
    UPDATE task t
    SET status = 'succeeded', lease_owner = NULL, lease_until = NULL, finished_at = clock_timestamp(),
        claimed_by = CASE WHEN t.claim_seq IS NOT NULL AND t.epoch = 1 THEN t.lease_owner END,
        done_seq = CASE WHEN t.id = a.last_task AND t.epoch = 1 THEN a.event_seq + 1 END
    FROM leases a WHERE t.id = a.id AND {GUARD}{condition}
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, t.queue, t.priority, t.unblocks, t.done_seq, a.place,
              a.job_status, a.steps_left, a.leased, a.external, a.tenant_id, a.trace, a.event_seq, a.pipeline,
              a.created_at
), numbered_tasks AS MATERIALIZED (
    -- Each completed task is the `nth` of the `completed_count` tasks of its job that this statement completes.
    SELECT d.*, row_number() OVER (PARTITION BY job_id ORDER BY position) AS nth,
           (count(*) OVER (PARTITION BY job_id))::int AS completed_count{columns}
    FROM succeeded_tasks d
"""


#: SQL: the CTE `completed_tasks`, which has the completed tasks, each with the next status of its job.
_COMPLETED_TASKS = """), completed_tasks AS MATERIALIZED (
    -- The job's next status. A job with external steps is `waiting_worker` while one of them can run.
    SELECT c.*,
           CASE WHEN c.steps_left = c.completed_count THEN 'succeeded'
                WHEN c.job_status = 'cancel_requested' AND c.leased = c.completed_count THEN 'cancelled'
                WHEN c.external = 0 OR c.job_status = 'cancel_requested' THEN c.job_status
                WHEN EXISTS (
                    SELECT 1 FROM task o WHERE o.job_id = c.job_id AND starts_with(o.queue, 'ext:')
                      AND o.finished_at IS NULL AND o.id NOT IN (SELECT d.id FROM succeeded_tasks d)
                      AND o.waiting_on <= (SELECT count(*) FROM succeeded_tasks d WHERE o.id = ANY(d.unblocks)))
                THEN 'waiting_worker' ELSE 'running' END AS next_status
    FROM numbered_tasks c
"""


def _advanced_jobs(more: str = "", source: str = "") -> str:
    """SQL: the CTEs `advanced_jobs` and `events`. `more`: SQL that adds a further count to `leased` and `event_seq`;
    `source`: the join that yields this count.
    """
    return f"""), advanced_jobs AS (
    UPDATE job j
    SET steps_left = j.steps_left - per_job.completed_count,
        leased = j.leased - per_job.completed_count{more},
        status = per_job.next_status,
        finished_at = CASE WHEN per_job.next_status IN ('succeeded', 'cancelled') THEN clock_timestamp() END,
        expires_at = CASE WHEN per_job.next_status IN ('succeeded', 'cancelled')
                          THEN clock_timestamp() + make_interval(secs => j.keep_seconds) END,
        event_seq = j.event_seq + per_job.completed_count{more}
    FROM completed_tasks per_job
{source}    WHERE per_job.nth = 1 AND j.id = per_job.job_id
), events AS (
    -- A job shows its next status in its last event only.
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch)
    SELECT job_id, event_seq + nth, tenant_id, 'completed',
           CASE WHEN nth < completed_count THEN job_status ELSE next_status END, id, step, 'succeeded', epoch
    FROM completed_tasks WHERE done_seq IS NULL
"""


def _results(values: str) -> str:
    """SQL: the CTE `results`. `values`: the parameter with the steps' values."""
    return f"""results AS (
    INSERT INTO result (task_id, value)
    SELECT d.id, ({values}::jsonb[])[d.place] FROM succeeded_tasks d WHERE ({values}::jsonb[])[d.place] IS NOT NULL
"""


# SQL: a row for each completed task, and a row for each other lease of the call. In the row of another lease, `settled`
# shows whether its task had succeeded before, under the same epoch.
_VERDICTS = """)
SELECT d.id AS task_id, true AS settled, 'succeeded' AS state,
       CASE WHEN d.next_status IN ('succeeded', 'cancelled') THEN d.job_id END AS ended_job, d.pipeline,
       d.next_status AS outcome, extract(epoch FROM clock_timestamp() - d.created_at)::float8 AS seconds,
       NULL::bigint AS outbox_id, NULL::text AS queue, NULL::int AS priority, NULL::jsonb AS headers,
       NULL::jsonb AS next
FROM completed_tasks d
UNION ALL
SELECT a.id, coalesce(t.status = 'succeeded' AND t.epoch = a.epoch, false), 'succeeded', NULL, NULL, NULL, NULL, NULL,
       NULL, NULL, NULL, NULL
FROM lease_batch a LEFT JOIN task t ON t.id = a.id WHERE a.id NOT IN (SELECT d.id FROM succeeded_tasks d)
"""

# $1 to $3 the leases (guard.py), $4 outputs, $5 values, $6 whether the worker may claim a next step, $7 the duration of
# the lease on that step.
#
# With its completion a worker may claim a step that this commit unblocks. The step then gets no hint, which saves a
# message through the broker and a commit. The statement does not claim a step of another queue, of a paused queue, or
# of a job that is being cancelled. The statement does not claim a less urgent step, because more urgent tasks may be
# due. The statement does not claim a step of a job with external workers, because the status of such a job has other
# rules.
#
# While this statement waits for the row of a workflow, a suspension or a claim may change the row. `updated_dependents`
# then reads the new version of the row, so it must handle every status of a task that has not ended. In the rows that
# `updated_dependents` returns, `wake_at` is NULL if this statement made the workflow due; otherwise it is a count.
#
# The snapshot of this statement is older than its lock of the job. Another statement may have completed steps of the
# job in between. So `dependents` may read an older `waiting_on` of a step than `updated_dependents`. If the step is
# ready only by the newer value, this statement does not claim the step. Instead it writes a hint for the step (a
# message that tells workers of a due task).
COMPLETE = f"""-- complete
{_completed(_CLAIM_NEXT)}), dependents AS MATERIALIZED (
    -- Each step (`child`) that needs `ended_needs` of the completed tasks. `place`: the place of the lease whose worker
    -- may claim the step. `is_claimed`: the worker claims the step, because it is the first that the worker may claim.
    SELECT dep.*, claim.is_possible
               AND row_number() OVER (PARTITION BY dep.place, claim.is_possible ORDER BY c.position, c.id) = 1
               AS is_claimed
    FROM (
        SELECT child, count(*)::int AS ended_needs, (array_agg(d.trace))[1] AS trace,
               (array_agg(d.event_seq + d.completed_count))[1] AS seq,
               (array_agg(d.place) FILTER (WHERE d.claim_next))[1] AS place,
               (array_agg(d.queue) FILTER (WHERE d.claim_next))[1] AS queue,
               (array_agg(d.priority) FILTER (WHERE d.claim_next))[1] AS priority
        FROM numbered_tasks d, unnest(d.unblocks) AS child GROUP BY child
    ) AS dep JOIN task c ON c.id = dep.child
    CROSS JOIN LATERAL (
        SELECT dep.place IS NOT NULL AND c.queue = dep.queue AND c.priority <= dep.priority
               AND {_IS_READY}
               AND NOT EXISTS (SELECT 1 FROM paused_queue q WHERE q.queue = c.queue) AS is_possible
    ) AS claim
), updated_dependents AS (
    -- Counts, in the row of each dependent step, the needs that have ended. Two statements cannot do this at once for
    -- steps of one job: each statement locks the job first.
    UPDATE task c
    SET waiting_on = CASE c.status WHEN 'blocked' THEN c.waiting_on - dep.ended_needs ELSE c.waiting_on END,
        news = CASE c.status WHEN 'blocked' THEN c.news ELSE c.news + dep.ended_needs END,
        wake_at = CASE WHEN {_IS_READY} THEN NULL WHEN c.status = 'blocked' THEN c.wake_at
                       ELSE coalesce(c.wake_at, {_NEVER}) END,
        status = CASE WHEN NOT {_IS_READY} THEN c.status WHEN dep.is_claimed THEN 'running'
                      WHEN c.status = 'waiting' THEN 'waiting' ELSE 'pending' END,
        lease_owner = CASE WHEN {_IS_READY} AND dep.is_claimed THEN ($1::uuid[])[dep.place] ELSE c.lease_owner END,
        lease_until = CASE WHEN {_IS_READY} AND dep.is_claimed THEN clock_timestamp() + $7::interval
                           ELSE c.lease_until END,
        epoch = c.epoch + ({_IS_READY} AND dep.is_claimed)::int,
        attempt = c.attempt + ({_IS_READY} AND dep.is_claimed)::int,
        started_at = CASE WHEN {_IS_READY} AND dep.is_claimed THEN clock_timestamp() ELSE c.started_at END,
        available_at = CASE WHEN {_IS_READY} THEN clock_timestamp() ELSE c.available_at END
    FROM dependents dep
    WHERE c.id = dep.child AND {unindexed("c.finished_at IS NULL")}
    RETURNING c.id, c.job_id, c.tenant_id, c.step, c.position, c.queue, c.priority, c.status, c.epoch, c.attempt,
              c.errors, c.crashes, c.handler, c.timeout_seconds, c.unblocks, c.wake_at, c.journaled, c.contained,
              dep.trace, dep.seq, dep.place
), claimed_steps AS MATERIALIZED (
    -- The steps that this statement claims.
    SELECT f.*, row_number() OVER (PARTITION BY job_id ORDER BY position, id) AS nth FROM updated_dependents f
    WHERE f.status = 'running' AND f.wake_at IS NULL
{_COMPLETED_TASKS}{_advanced_jobs(" + claimed_next.step_count", _CLAIMED_NEXT)}), claim_events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT t.job_id, t.seq + t.nth, t.tenant_id, 'claimed', 'running', t.id, t.step, 'running', t.epoch,
           jsonb_build_object('worker', ($1::uuid[])[t.place], 'attempt', t.attempt)
    FROM claimed_steps t
), {write_outputs("succeeded_tasks", "$4")}, {_results("$5")}), hints AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT f.id, f.job_id, f.queue, f.priority, f.trace, {RELAY_AT}
    FROM updated_dependents f
    WHERE (f.status = 'pending' OR (f.status = 'waiting' AND f.wake_at IS NULL)) AND NOT starts_with(f.queue, 'ext:')
    RETURNING id, task_id, queue, priority, headers
{_VERDICTS}UNION ALL
SELECT h.task_id, NULL, NULL, NULL, NULL, NULL, NULL, h.id, h.queue, h.priority, h.headers, NULL
FROM hints h
UNION ALL
SELECT ($2::uuid[])[t.place], NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, jsonb_build_object(
    'id', t.id, 'epoch', t.epoch, 'attempt', t.attempt, 'job_id', t.job_id, 'tenant_id', t.tenant_id, 'step', t.step,
    'queue', t.queue, 'priority', t.priority, 'errors', t.errors, 'crashes', t.crashes,
    'was', CASE WHEN t.journaled THEN 'waiting' ELSE 'blocked' END, 'waited', 0,
    'handler', t.handler, 'timeout_seconds', t.timeout_seconds, 'pipeline', j.pipeline,
    'pipeline_version', j.pipeline_version, 'params', j.params, 'inputs', j.inputs,
    'output_prefix', {output_prefix("j")},
    'trace', j.trace, 'gated', j.gated, 'grace_seconds', j.grace_seconds,
    'cancelling', false, 'is_last', t.unblocks = '{{}}')
FROM claimed_steps t JOIN job j ON j.id = t.job_id
"""

# SQL: no other step needs the task `t`. `unindexed` hides the condition from the planner. Otherwise, while a new table
# has no statistics, the planner expects only one such row, and begins the join with a read of all such rows.
_IS_LAST = unindexed("t.unblocks = '{}'")

# $1 to $3 the leases (guard.py), $4 values. Completes steps that have no outputs, and that no other step needs. Most
# jobs end with such a step. This statement has only the CTEs that such steps need. For a small batch, PostgreSQL takes
# as long to start the many CTEs of COMPLETE as to complete the steps.
COMPLETE_LAST = f"""-- complete_last
{_completed(condition=f" AND {_IS_LAST}")}{_COMPLETED_TASKS}{_advanced_jobs()}), {_results("$4")}{_VERDICTS}"""


async def complete(
    connection: Connection, completions: Sequence[Completion], terms: LeaseTerms | None = None
) -> Settled:
    """Mark running tasks as succeeded. Unblock the steps that need them, and write hints for these steps. The last step
    of a job ends the job.

    With `terms`, each completion with `claim_next` also claims a step that it unblocks, if such a step may be claimed.
    The step then goes from blocked to running without a hint.
    """
    if all(completion.is_last and not completion.outputs for completion in completions):
        return await _complete_last(connection, completions, terms)
    return await settle_twice(partial(_complete, connection, terms), completions, attrgetter("lease"))


async def _complete_last(
    connection: Connection, completions: Sequence[Completion], terms: LeaseTerms | None
) -> Settled:
    """Run COMPLETE_LAST, and then COMPLETE for the completions that COMPLETE_LAST has not settled. The lease of such a
    completion is lost, or another step needs the completed step, although the worker did not know this.
    """
    leases = lease_columns([completion.lease for completion in completions])
    rows = await connection.fetch(COMPLETE_LAST, *leases, [completion.value for completion in completions])
    outcome = settled_of(rows, ends=True)
    unsettled = [completion for completion in completions if outcome.verdicts[completion.lease.task_id] is Verdict.LOST]
    if unsettled:
        outcome.add(await _complete(connection, terms, unsettled))
    return outcome


async def _complete(connection: Connection, terms: LeaseTerms | None, completions: Sequence[Completion]) -> Settled:
    requested_at = monotonic()
    outputs = outputs_column([completion.outputs for completion in completions])
    values = [completion.value for completion in completions]
    leases = lease_columns([completion.lease for completion in completions])
    claim_next = [completion.claim_next and terms is not None for completion in completions]
    ttl = timedelta(seconds=0.0 if terms is None else terms.ttl)
    rows = await connection.fetch(COMPLETE, *leases, outputs, values, claim_next, ttl)
    outcome = settled_of([row for row in rows if row["next"] is None], hints=True, ends=True)
    if terms is not None:
        for row in rows:
            if row["next"] is not None:
                outcome.next_steps[row["task_id"]] = claimed_of(_with_ids(row["next"]), terms, requested_at)
    return outcome


def _with_ids(next_step: dict[str, Any]) -> dict[str, Any]:
    """The row of the next step, with its ids as UUIDs. In JSON they are texts."""
    return next_step | {"id": UUID(next_step["id"]), "job_id": UUID(next_step["job_id"])}
