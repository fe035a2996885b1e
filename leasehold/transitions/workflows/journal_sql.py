"""The SQL that writes a workflow's calls to its journal. Two statements contain it: `record_calls` and `suspend`."""

from __future__ import annotations

from leasehold.db.database import unindexed

#: SQL: the value by which a retry of a failed workflow finds the rows that it must open again. A row of the kind
#: `start` is a run that the workflow started. `_CLOSE` (children.py) or a replay of this run (jobs/replays.py) gives
#: the row this value when it closes the row. The row of a detached run has no such value, because it is `done` from its
#: beginning.
CLOSED = """'{"closed": true}'::jsonb"""

#: SQL: the value of an open row `start` whose run has failed, if the workflow has recorded the failure. The workflow no
#: longer needs such a run, so retention may delete it.
KNOWN = """'{"known": true}'::jsonb"""

#: SQL: whether the statement claims the step of the call `w` (a row of the CTE `calls`, below). `held.external`: how
#: many of the job's steps external workers do. $8: the ids of the steps that the worker would claim.
_IS_CLAIMED = """coalesce(w.child = ($8::uuid[])[held.nth], false) AND held.external = 0
               AND NOT EXISTS (SELECT FROM paused_queue q WHERE q.queue = w.queue)"""


def write_calls(*, claims: bool) -> str:
    """SQL to append to a statement that has the CTE `held` of settlements.guard. This CTE has the leases that are still
    valid, and the position `nth` of each in the arrays of the statement's parameters. $4: for each lease a JSON object
    {"of": [...]} with the records of its calls (records.Call.record).

    A repeated statement writes nothing twice, because the journal has one row for each place (branch and number of a
    call), and a step has one task. With `claims`, the statement also claims one step for each lease. $8 has for each
    lease the id of this step, or NULL. $9 is the duration of the step's lease. The step's lease has the same owner as
    the workflow's.
    """
    if claims:
        is_claimed = _IS_CLAIMED
        value_by_column = {
            "status": "CASE WHEN is_claimed THEN 'running' ELSE 'pending' END",
            "lease_owner": "CASE WHEN is_claimed THEN owner END",
            "lease_until": "CASE WHEN is_claimed THEN clock_timestamp() + $9::interval END",
            "epoch": "is_claimed::int",
            "attempt": "is_claimed::int",
            "started_at": "CASE WHEN is_claimed THEN clock_timestamp() END",
        }
    else:
        is_claimed, value_by_column = "false", {"status": "'pending'"}
    columns, values = ", ".join(value_by_column), ", ".join(value_by_column.values())
    return f""", calls AS MATERIALIZED (
    -- The calls of the workflows in `held`.
    SELECT w.*, held.id AS workflow, t.job_id, t.tenant_id, t.lease_owner AS owner, t.epoch, t.position, t.priority,
           {is_claimed} AS is_claimed
    FROM held JOIN task t ON t.id = held.id
    CROSS JOIN LATERAL jsonb_to_recordset(($4::jsonb[])[held.nth] -> 'of') AS w(
        branch text, number int, kind text, name text, state text, value jsonb, delay float8, child uuid,
        signal bigint, step text, queue text, max_attempts smallint, handler text, timeout_seconds int,
        cancelable bool, argument jsonb)
), entries AS (
    -- A row that has its result never changes again.
    INSERT INTO journal AS e (job_id, branch, number, kind, name, state, value, child_id, due_at, epoch)
    SELECT job_id, branch, number, kind, name, state, value, child,
           statement_timestamp() + make_interval(secs => delay), epoch
    FROM calls
    ON CONFLICT (job_id, branch, number) DO UPDATE
    SET state = excluded.state, value = excluded.value, epoch = excluded.epoch
    WHERE e.state = 'open' AND excluded.state <> 'open'
), known_starts AS (
    -- The rows `start` of the runs whose results the calls record. The workflow no longer needs such a run. If it has
    -- failed, its row only gets a mark: the run may be retried, and must then be cancelled with its workflow.
    UPDATE journal e SET state = CASE w.state WHEN 'done' THEN 'done' ELSE e.state END,
                         value = CASE w.state WHEN 'failed' THEN {KNOWN} ELSE e.value END
    FROM calls w
    CROSS JOIN LATERAL (SELECT x.child_id FROM journal x WHERE x.job_id = w.job_id AND x.branch = w.branch
                        AND x.number = w.number LIMIT 1) AS awaited
    CROSS JOIN LATERAL (SELECT x.job_id, x.branch, x.number FROM journal x
                        WHERE x.child_id = awaited.child_id AND {unindexed("x.job_id = w.job_id")}
                          AND x.kind = 'start' AND x.state = 'open' LIMIT 1) AS started
    WHERE w.kind = 'result' AND w.state IN ('done', 'failed')
      AND e.job_id = started.job_id AND e.branch = started.branch AND e.number = started.number
), consumed_signals AS (
    DELETE FROM signal s USING calls w WHERE s.id = w.signal AND s.job_id = w.job_id
), steps AS (
    -- `contained`: the workflow started the task. So the workflow handles the task's failure, which is no dead letter.
    INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, unblocks, max_attempts, handler,
                      timeout_seconds, cancelable, contained, {columns})
    SELECT child, job_id, tenant_id, step, position, queue, priority, ARRAY[workflow], max_attempts, handler,
           timeout_seconds, cancelable, true, {values}
    FROM calls WHERE step IS NOT NULL
    ON CONFLICT (job_id, step) DO NOTHING
    RETURNING id, job_id, step, queue, priority, status, lease_owner, epoch, attempt, handler, timeout_seconds
), arguments AS (
    INSERT INTO item (task_id, parent_id, number, value)
    SELECT child, workflow, number, argument FROM calls WHERE step IS NOT NULL
    ON CONFLICT (task_id) DO NOTHING
)"""
