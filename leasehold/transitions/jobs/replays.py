"""`replay`: a failed job runs again, from its failed step or from another step that the caller names. `replay_together`
replays several simple jobs in one statement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from leasehold.broker.base import BANDS
from leasehold.broker.outbox import RELAY_AT, Announcement
from leasehold.db.database import Connection, unindexed
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.errors import Invalid
from leasehold.transitions import concurrency
from leasehold.transitions.workflows.journal_sql import CLOSED

#: The band (priority class of hints, the messages that tell workers of due tasks) that workers serve last.
_LAST_BAND = len(BANDS) - 1

# SQL: the step `t` was skipped at submission, because of the job's parameters. Such a step has no event. A step that
# was skipped because another step failed has an event.
_SKIPPED_BY_PARAMETERS = """(t.status = 'skipped' AND t.epoch = 0
    AND NOT EXISTS (SELECT 1 FROM history e WHERE e.job_id = t.job_id AND e.task_id = t.id))"""

# SQL: the step `t` must stay failed, because the journal of a workflow (the rows of its calls) depends on the failure.
# The workflow started the step (`contained`). Since the step failed, the workflow has made another call, or has
# recorded the failure in the journal.
_JOURNAL_DEPENDS = """(t.contained AND t.status = 'failed'
    AND EXISTS (SELECT 1 FROM journal e WHERE e.job_id = t.job_id
                AND (e.at > t.finished_at OR (e.child_id = t.id AND e.state = 'failed'))))"""


def _is_of_own_run(row: str) -> str:
    """SQL condition: the row of the journal belongs to a call whose work is done by a run of its own (`ctx.run` of a
    limited task). The name in such a row contains `#`. The driver recognises the row in the same way (`is_own_run` in
    workflows/journal.py).
    """
    return f"strpos({row}.name, '#') > 0"


def _is_called_again(status: str) -> str:
    """SQL condition: the row `e` of the journal must be deleted, so that the workflow makes the call again. The row
    belongs to a call whose work is done by a run of its own. The call's row `result` is always deleted. Its row `start`
    stays if the run failed, because the workflow then retries the run. `status`: SQL of the run's status.
    """
    return f"(e.kind = 'result' OR (e.kind = 'start' AND {status} IS DISTINCT FROM 'failed'))"


# SQL: the job `j` of the tenant $2 can be replayed. `unindexed`: PostgreSQL uses no partial index for the condition.
_REPLAYABLE = unindexed(
    "j.tenant_id = $2 AND j.status = 'failed' AND (j.expires_at IS NULL OR j.expires_at > clock_timestamp())"
)

# Only a failed job can be replayed. Its failed, skipped and cancelled steps run again, with their counters reset. Each
# step runs immediately, or after the steps that it needs. Exceptions: the steps of _SKIPPED_BY_PARAMETERS and
# _JOURNAL_DEPENDS do not run again. When the job ends again, webhooks are sent again.
#
# A workflow runs a limited task in a run of its own. Such a call has two rows in the journal, `start` and `result`,
# both with the name of a step (`charge#1`). `calls_again` handles the calls whose runs have ended without success, if
# the workflow has not recorded this end yet. If the run failed, `calls_again` deletes only the row `result`, and the
# workflow retries the run. A run that was cancelled, has expired or was deleted cannot be retried. Then `calls_again`
# deletes both rows, and the workflow starts another run.
#
# `reopened_calls` opens two kinds of rows that a duty has closed (_CLOSE in transitions/workflows/children.py), because
# the duty reads only open rows. By a row `result` without a value, the duty wakes the workflow when the awaited run
# ends. By a row `start` with the value CLOSED, the duty cancels the run if the workflow ends without success again.
#
# $1: the jobs. $2: their tenant. $3: the new parameters (NULL: the job keeps its parameters).
# $4: whether the job must wait at its concurrency limits (is `held`) first. `waiting_on` counts the steps for which a
# task waits. In a held job it becomes 1 for each step that could run now. This 1 represents all limits.
# $5: whether $6 replaces the exclusive key.
# $7: the pipelines whose failures start a run of their `on_failure` pipeline.
# $8: the band of the hints (NULL: the step's priority). $9: the data of the events (NULL: none).
#
# `uncounted`: a workflow started the step, and the step failed. END_FAILED_JOBS (endings.py) has subtracted such a step
# from the job's `steps_left`, so this statement adds it again.
REPLAY = f"""
-- replay
WITH locked_jobs AS MATERIALIZED (
    SELECT j.id FROM job j
    WHERE j.id = ANY($1::uuid[]) AND {_REPLAYABLE}
    ORDER BY j.id
    FOR UPDATE
), outlived_workflows AS (
    -- If the workflow that started the job has ended, a duty (transitions/workflows/children.py) cancels the jobs of
    -- the workflow's open calls. This UPDATE closes the call, so that the duty does not cancel the job that now goes
    -- on. Exception: the workflow is replayed, too.
    UPDATE journal e SET state = 'done', value = {CLOSED}
    FROM locked_jobs, job AS parent
    WHERE e.child_id = locked_jobs.id AND e.kind = 'start' AND e.state = 'open'
      AND parent.id = e.job_id AND {unindexed("parent.finished_at IS NOT NULL")}
      AND parent.id NOT IN (SELECT id FROM locked_jobs)
), calls_again AS (
    DELETE FROM journal e USING (
        SELECT w.job_id, w.child_id, child.status
        FROM locked_jobs
        JOIN journal w ON w.job_id = locked_jobs.id AND w.kind = 'result' AND {_is_of_own_run("w")}
        LEFT JOIN job child ON child.id = w.child_id
        WHERE w.value IS NULL
          AND coalesce(child.status, 'cancelled') IN ('failed', 'cancelled', 'expired', 'cancel_requested')
    ) AS ended
    WHERE e.job_id = ended.job_id AND e.child_id = ended.child_id
      AND {_is_called_again("ended.status")}
    RETURNING e.job_id, e.branch, e.number
), reopened_calls AS (
    -- A replayed workflow waits again for the runs whose results it has not recorded: a duty wakes it only for open
    -- calls. Its runs that had failed are cancelled with it again. The duty has closed these calls (_CLOSE in
    -- transitions/workflows/children.py).
    UPDATE journal e SET state = 'open', value = NULL
    FROM locked_jobs
    WHERE e.job_id = locked_jobs.id AND e.state = 'done'
      AND CASE e.kind WHEN 'result' THEN e.value IS NULL WHEN 'start' THEN e.value = {CLOSED} ELSE false END
      AND NOT EXISTS (SELECT FROM calls_again a
                      WHERE a.job_id = e.job_id AND a.branch = e.branch AND a.number = e.number)
), revived_steps AS (
    -- The steps that run again.
    UPDATE task t
    SET status = CASE WHEN t.waiting_on = 0 AND NOT $4 THEN 'pending' ELSE 'blocked' END,
        waiting_on = CASE WHEN t.waiting_on = 0 AND $4 THEN 1 ELSE t.waiting_on END,
        errors = 0, crashes = 0, losses = 0, finished_at = NULL, available_at = clock_timestamp()
    FROM locked_jobs, task AS before
    WHERE t.job_id = locked_jobs.id AND t.status IN ('failed', 'skipped', 'cancelled') AND NOT {_SKIPPED_BY_PARAMETERS}
      AND NOT {_JOURNAL_DEPENDS} AND before.id = t.id
    RETURNING t.id, t.job_id, t.step, t.position, t.queue, t.priority, t.status, t.epoch,
              t.contained AND before.status = 'failed' AS uncounted
), step_counts AS MATERIALIZED (
    SELECT locked_jobs.id, count(r.id)::int AS steps, (count(*) FILTER (WHERE r.uncounted))::int AS uncounted,
           coalesce(bool_or(r.status = 'pending' AND NOT starts_with(r.queue, 'ext:')), false) AS runnable,
           coalesce(bool_or(r.status = 'pending' AND starts_with(r.queue, 'ext:')), false) AS runnable_externally
    FROM locked_jobs LEFT JOIN revived_steps r ON r.job_id = locked_jobs.id GROUP BY locked_jobs.id
), advanced_jobs AS (
    UPDATE job j
    SET status = CASE WHEN step_counts.runnable THEN 'queued' WHEN step_counts.runnable_externally THEN 'waiting_worker'
                      ELSE 'pending' END,
        error = NULL, finished_at = NULL, expires_at = NULL, leased = 0,
        params = coalesce($3::jsonb, j.params), held = $4, gated = j.gated OR $4,
        exclusive_key = CASE WHEN $5 THEN $6 ELSE j.exclusive_key END,
        -- The job gets as much time as it had at its submission, or at its last replay.
        deadline_at = clock_timestamp() + CASE
            WHEN j.timeout_seconds IS NOT NULL OR j.start_within_seconds IS NOT NULL
            THEN make_interval(secs => CASE WHEN $4 THEN j.start_within_seconds ELSE j.timeout_seconds END)
            WHEN j.deadline_at IS NULL THEN NULL
            ELSE j.deadline_at - coalesce(
                (SELECT max(e.at) FROM history e WHERE e.job_id = j.id AND e.kind = 'replayed'),
                (SELECT r.scheduled_at FROM run r WHERE r.job_id = j.id),
                j.created_at) END,
        notify = j.pipeline = ANY($7::text[])
            OR EXISTS (SELECT 1 FROM webhook w WHERE w.tenant_id = j.tenant_id AND w.enabled)
            OR EXISTS (SELECT 1 FROM job_callback c WHERE c.job_id = j.id),
        steps_left = j.steps_left + step_counts.uncounted,
        event_seq = j.event_seq + step_counts.steps
    FROM step_counts WHERE j.id = step_counts.id
    RETURNING j.id, j.tenant_id, j.status, j.trace, j.event_seq - step_counts.steps AS seq
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT r.job_id, a.seq + row_number() OVER (PARTITION BY r.job_id ORDER BY r.position), a.tenant_id, 'replayed',
           a.status, r.id, r.step, r.status, r.epoch, $9::jsonb
    FROM revived_steps r JOIN advanced_jobs a ON a.id = r.job_id
)
INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
SELECT r.id, r.job_id, r.queue, coalesce($8::int, r.priority), a.trace, {RELAY_AT}
FROM revived_steps r JOIN advanced_jobs a ON a.id = r.job_id
WHERE r.status = 'pending' AND NOT starts_with(r.queue, 'ext:')
RETURNING id AS outbox_id, task_id, queue, priority, headers
"""


# $1: the job. $2: the name of a step. This step, and all steps that need it directly or indirectly, run again. This
# statement deletes their outputs, results and notes. It changes succeeded steps to `skipped`, so that REPLAY revives
# them. Each step that runs again then waits for those of its needed steps that also run again, or that have not
# succeeded (REPLAY also revives the latter).
#
# Exception: $2 keeps its note (what an attempt has left for the next one) if $2 has not succeeded, as in a retry from
# the failed step. The note may say that the step has ordered something, and that nobody knows the outcome.
#
# If a step had fanned out and runs again from its beginning, its parts are deleted with their rows. Otherwise the step
# would join their old results, and could not fan out into parts of the same names. The objects of the parts stay until
# the job is deleted. If $2 is a part, the other parts of its step stay.
REWIND = f"""
-- rewind
WITH RECURSIVE again(id) AS (
    -- The step, and all steps after it.
    SELECT t.id FROM task t WHERE t.job_id = $1 AND t.step = $2 AND NOT {_SKIPPED_BY_PARAMETERS}
    UNION
    SELECT t.id FROM again JOIN task p ON p.id = again.id JOIN task t ON t.id = ANY(p.unblocks)
    WHERE NOT {_SKIPPED_BY_PARAMETERS}
), parts(id) AS (
    -- The parts of a step that fans out again, and the parts of these parts. The table `item` names the parent of each
    -- part. A step whose part runs again keeps its parts.
    SELECT i.task_id FROM again JOIN item i ON i.parent_id = again.id JOIN task t ON t.id = i.task_id
    WHERE NOT t.contained
      AND NOT EXISTS (SELECT 1 FROM item other JOIN again a ON a.id = other.task_id WHERE other.parent_id = i.parent_id)
    UNION
    SELECT i.task_id FROM parts JOIN item i ON i.parent_id = parts.id
), forgotten_parts AS (
    DELETE FROM task t USING parts WHERE t.id = parts.id RETURNING t.status
), forgotten_streams AS (
    DELETE FROM job_stream s USING parts WHERE s.task_id = parts.id
), forgotten_outputs AS (
    DELETE FROM output o USING again WHERE o.task_id = again.id
), forgotten_results AS (
    DELETE FROM result r USING again WHERE r.task_id = again.id
), forgotten_notes AS (
    DELETE FROM note n USING again JOIN task t ON t.id = again.id
    WHERE n.task_id = again.id AND (t.step <> $2 OR t.status = 'succeeded')
), rewound AS (
    UPDATE task t
    SET status = CASE WHEN t.status = 'succeeded' THEN 'skipped' ELSE t.status END,
        waiting_on = (SELECT count(*) FROM task p
                      WHERE p.job_id = t.job_id AND t.id = ANY(p.unblocks) AND NOT p.contained
                        AND p.id NOT IN (SELECT id FROM parts)
                        AND (p.status <> 'succeeded' OR p.id IN (SELECT id FROM again)))
    FROM again, task AS before
    WHERE t.id = again.id AND before.id = t.id AND t.finished_at IS NOT NULL
    RETURNING before.status AS was
)
-- `steps_left` counts the steps that have not succeeded. So succeeded steps are added, and the deleted parts that it
-- still counts are subtracted.
UPDATE job j SET steps_left = j.steps_left + (SELECT count(*) FROM rewound WHERE was = 'succeeded')
                                  - (SELECT count(*) FROM forgotten_parts WHERE status <> 'succeeded')
WHERE j.id = $1
RETURNING (SELECT count(*) FROM rewound)
"""

# Used if REWIND finds no step $2. Then $2 may name a call of the workflow $1 whose work was done by a run of its own
# (see REPLAY). The statement deletes the call's rows, so that the workflow makes the call again. But the rows stay
# while that run is unfinished and not being cancelled. Returns whether the workflow has this call.
_REWIND_CALL = f"""
-- rewind_call
WITH called AS (
    SELECT e.child_id FROM journal e
    WHERE e.job_id = $1 AND e.kind = 'start' AND {_is_of_own_run("e")} AND e.branch || e.name = $2
), forgotten AS (
    DELETE FROM journal e USING called LEFT JOIN job child ON child.id = called.child_id
    WHERE e.job_id = $1 AND e.child_id = called.child_id
      AND NOT coalesce({unindexed("child.finished_at IS NULL")} AND child.status <> 'cancel_requested', false)
      AND {_is_called_again("child.status")}
)
SELECT EXISTS (SELECT FROM called)
"""


@dataclass(frozen=True, slots=True)
class AdmissionTerms:
    """What a job needs to be admitted: room at its concurrency limits, and its exclusive key."""

    limits: Sequence[ConcurrencyLimit] = ()
    exclusive_key: str | None = None


@dataclass(frozen=True, slots=True)
class _ReplayedJob:
    """A replayed job that waits at its concurrency limits. It implements the protocol `concurrency.LimitedJob`.
    `not_before`: the time of the job's submission. A limit admits jobs of one priority in the order of these times, so
    the job does not wait behind jobs that were submitted later.
    """

    id: UUID
    tenant_id: str
    priority: int
    limits: Sequence[ConcurrencyLimit]
    not_before: datetime | None


async def replay(
    connection: Connection,
    job_id: UUID,
    tenant_id: str,
    params: Mapping[str, Any] | None = None,
    from_step: str | None = None,
    terms: AdmissionTerms | None = None,
    *,
    followed: Sequence[str] = (),
    cause: Mapping[str, str] | None = None,
) -> list[Announcement] | None:
    """failed -> pending, queued or waiting_worker, from the failed step on; steps that succeeded stay succeeded.
    Returns the hints to be published after the commit, or None if there is no such failed job.

    `params`: the job's new parameters, which the caller has validated; None: the job keeps its parameters. `from_step`:
    the job goes on from this step instead of the failed step, and the steps that need `from_step` run again as well. A
    step that had fanned out then fans out again, unless `from_step` is one of its parts. `terms`: the job's limits and
    exclusive key from now on; None: the job waits at no limits and keeps its exclusive key. `followed`: the pipelines
    whose failures start a run of their `on_failure` pipeline. `cause`: who retries the job, for its history. The job
    always keeps its dedupe key. If the job has limits, it waits until the caller calls `concurrency.admit`, after the
    commit.

    Raises Invalid `unknown_step`. Raises asyncpg.UniqueViolationError while another job has the same exclusive or
    dedupe key.
    """
    async with connection.transaction():
        # An expired job does not run again, because its objects may be deleted.
        failed_job = await connection.fetchrow(
            "SELECT priority, created_at FROM job WHERE id = $1 AND tenant_id = $2 AND status = 'failed'"
            " AND (expires_at IS NULL OR expires_at > clock_timestamp()) FOR UPDATE",
            job_id,
            tenant_id,
        )
        if failed_job is None:
            return None
        if from_step is not None and not await _rewind(connection, job_id, from_step):
            raise Invalid("unknown_step", "The run has no such step, or its parameters skip it.")
        new_terms = terms or AdmissionTerms()
        if terms is not None:
            await concurrency.forget_admission(connection, job_id, new_terms.limits)
        rows = await connection.fetch(
            REPLAY, [job_id], tenant_id, params, bool(new_terms.limits), terms is not None, new_terms.exclusive_key,
            list(followed), None, cause,
        )  # fmt: skip
        if new_terms.limits:
            replayed_job = _ReplayedJob(
                job_id, tenant_id, failed_job["priority"], new_terms.limits, failed_job["created_at"]
            )
            await concurrency.queue_up(connection, [replayed_job])
    return [Announcement.from_row(row) for row in rows]


async def _rewind(connection: Connection, job_id: UUID, step: str) -> bool:
    """Let the step run again. Returns False if the job has no such step, or if its parameters skip the step."""
    if await connection.fetchval(REWIND, job_id, step):
        return True
    return bool(await connection.fetchval(_REWIND_CALL, job_id, step))


async def state_of(connection: Connection, job_id: UUID) -> str:
    """The state of the job. The job must exist."""
    status: str = await connection.fetchval("SELECT status FROM job WHERE id = $1", job_id)
    return status


async def replay_together(
    connection: Connection,
    job_ids: Sequence[UUID],
    tenant_id: str,
    followed: Sequence[str] = (),
    cause: Mapping[str, str] | None = None,
) -> list[Announcement]:
    """failed -> queued or waiting_worker, for several jobs that have never had a limit, an exclusive key or a dedupe
    key, and that get none of these now. Each job is replayed from its failed step, as by `replay`.

    The hints get the last band, because the many hints of a batch must not delay the hints of other jobs.
    """
    rows = await connection.fetch(
        REPLAY, list(job_ids), tenant_id, None, False, False, None, list(followed), _LAST_BAND, cause
    )
    return [Announcement.from_row(row) for row in rows]
