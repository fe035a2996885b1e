"""`fan_out`: a step divides its work into parts. The step runs again when all parts have succeeded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter

from leasehold.broker.outbox import RELAY_AT
from leasehold.db.database import Connection
from leasehold.domain.ids import new_id
from leasehold.transitions.settlements.guard import HELD_IN_LIVE_JOB, lease_columns, settle_twice, settled_of
from leasehold.transitions.settlements.outputs_sql import outputs_column, write_outputs
from leasehold.transitions.settlements.records import FanningOut, Settled

# $1 to $3: the owners, the task ids and the epochs of the leases. $4: the parts, as JSON records {parent, id, part,
# number, queue, max_attempts, handler, value}. `parent`: the task that fans out. `part`: the name of the declared step
# that each part runs. A part's task gets the step name `part.number`. But if another step of the job has fanned out
# into parts of that name, it gets the step name `step.part.number`, where `step` is the name of its parent step. $5:
# the outputs of the steps that fan out, as `write_outputs` reads them. HELD_IN_LIVE_JOB gives `lease_batch` (the leases
# of this call) and `held` (those that are still valid). `settled` is also true if an earlier try, whose answer was
# lost, has blocked the task.
FAN_OUT = f"""-- fan_out
WITH {HELD_IN_LIVE_JOB}, parts AS MATERIALIZED (
    -- Only the parts of tasks whose lease is still valid.
    SELECT p.*, held.nth AS place,
           CASE WHEN EXISTS (
               SELECT 1 FROM task o JOIN item i ON i.task_id = o.id
               WHERE o.job_id = t.job_id AND o.step = p.part || '.0' AND i.parent_id <> p.parent
           ) AND NOT EXISTS (SELECT 1 FROM item i WHERE i.parent_id = p.parent) THEN t.step || '.' ELSE '' END
           || p.part || '.' || p.number AS step
    FROM jsonb_to_recordset($4::jsonb) AS p(
        parent uuid, id uuid, part text, number int, queue text, max_attempts smallint, handler text, value jsonb)
    JOIN held ON held.id = p.parent JOIN task t ON t.id = held.id
), parent AS (
    -- Writes only tasks that pass the guard (guard.py): the step waits for its parts, and the attempt does not count.
    UPDATE task t
    SET status = 'blocked', lease_owner = NULL, lease_until = NULL, attempt = t.attempt - 1,
        waiting_on = per_parent.part_count
    FROM (SELECT parent, place, count(*)::int AS part_count FROM parts GROUP BY parent, place) AS per_parent
    WHERE t.id = per_parent.parent
    RETURNING t.id, t.job_id, t.tenant_id, t.step, t.position, t.priority, t.epoch, t.cancelable,
              per_parent.part_count, per_parent.place
), {write_outputs("parent", "$5")}, part_tasks AS (
    INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, status, unblocks, max_attempts,
                      handler, cancelable)
    SELECT p.id, parent.job_id, parent.tenant_id, p.step, parent.position, p.queue, parent.priority, 'pending',
           ARRAY[parent.id], p.max_attempts, p.handler, parent.cancelable
    FROM parts p JOIN parent ON parent.id = p.parent
    RETURNING id, job_id, queue, priority
), items AS (
    -- jsonb_to_recordset makes NULL of the JSON null.
    INSERT INTO item (task_id, parent_id, number, value)
    SELECT id, parent, number, coalesce(value, 'null') FROM parts
), advanced_jobs AS (
    UPDATE job j
    SET leased = j.leased - per_job.step_count, steps_left = j.steps_left + per_job.part_count,
        event_seq = j.event_seq + per_job.step_count
    FROM (
        SELECT job_id, count(*)::int AS step_count, sum(part_count)::int AS part_count FROM parent GROUP BY job_id
    ) AS per_job
    WHERE j.id = per_job.job_id
    RETURNING j.id, j.tenant_id, j.status, j.trace, j.event_seq - per_job.step_count AS seq
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT p.job_id, a.seq + row_number() OVER (PARTITION BY p.job_id ORDER BY p.id), a.tenant_id, 'fanned_out',
           a.status, p.id, p.step, 'blocked', p.epoch, jsonb_build_object('parts', p.part_count)
    FROM parent p JOIN advanced_jobs a ON a.id = p.job_id
), hints AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT m.id, m.job_id, m.queue, m.priority, a.trace, {RELAY_AT}
    FROM part_tasks m JOIN advanced_jobs a ON a.id = m.job_id
    RETURNING id, task_id, queue, priority, headers
)
SELECT a.id AS task_id, coalesce(p.id IS NOT NULL OR (t.epoch = a.epoch AND t.status = 'blocked'), false) AS settled,
       'blocked' AS state,
       NULL::bigint AS outbox_id, NULL::text AS queue, NULL::int AS priority, NULL::jsonb AS headers
FROM lease_batch a LEFT JOIN parent p ON p.id = a.id LEFT JOIN task t ON t.id = a.id
UNION ALL
SELECT h.task_id, NULL, NULL, h.id, h.queue, h.priority, h.headers FROM hints h
"""


async def fan_out(connection: Connection, fan_outs: Sequence[FanningOut]) -> Settled:
    """running -> blocked, until the new tasks of all parts have succeeded. Then the step runs again. The outputs that
    the step has written so far are kept.

    Raises asyncpg.UniqueViolationError in two cases. First: the step has fanned out before, so tasks with its parts'
    names exist. Second: at the same moment another step has fanned out into parts of the same name. In the second case,
    repeat the call, because the tasks then get other names.
    """
    return await settle_twice(partial(_fan_out, connection), fan_outs, attrgetter("lease"))


async def _fan_out(connection: Connection, fan_outs: Sequence[FanningOut]) -> Settled:
    parts = [
        {
            "parent": fanning_out.lease.task_id,
            "id": new_id(),
            "part": part.step,
            "number": number,
            "queue": part.queue,
            "max_attempts": part.max_attempts,
            "handler": part.handler,
            "value": part.value,
        }
        for fanning_out in fan_outs
        for number, part in enumerate(fanning_out.parts)
    ]
    leases = lease_columns([fanning_out.lease for fanning_out in fan_outs])
    outputs = outputs_column([fanning_out.outputs for fanning_out in fan_outs])
    return settled_of(await connection.fetch(FAN_OUT, *leases, parts, outputs), hints=True)
