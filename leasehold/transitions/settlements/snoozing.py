"""`snooze` ends the attempt of a step that snoozes, because its code asked for it, or because its worker lacks the
code. The lease ends, and the task is due again after a delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter

from leasehold.db.database import Connection
from leasehold.domain.backoff import capped
from leasehold.transitions.settlements.guard import HELD_OR_TO_SEE_CANCEL, lease_columns, settle_twice, settled_of
from leasehold.transitions.settlements.outputs_sql import outputs_column, write_outputs
from leasehold.transitions.settlements.records import Settled, Snoozing

# $1 to $3: the owners, the task ids and the epochs of the leases. $4: the delays in seconds. $5: the notes ('null'
# keeps the existing note). $6: the outputs. $7: for each task, the handler that the worker lacks (NULL: the worker has
# the code). $8: for each task, whether the code of the step asked to snooze.
#
# HELD_OR_TO_SEE_CANCEL gives `lease_batch` (the leases of this call) and `held` (those that are still valid). A job
# that is being cancelled ends when its `leased` count is 0. A workflow of such a job must run again to see the cancel.
# So a snooze of the workflow does not change the count, because otherwise the job would end first.
SNOOZE = f"""-- snooze
WITH {HELD_OR_TO_SEE_CANCEL}, snoozed_tasks AS (
    -- Writes only tasks that pass the guard (guard.py). The attempt does not count. If the step's own code asked to
    -- snooze, the step makes progress: its earlier losses (attempts whose worker was lost) no longer count.
    UPDATE task t
    SET status = 'waiting', lease_owner = NULL, lease_until = NULL, attempt = t.attempt - 1,
        available_at = clock_timestamp() + make_interval(secs => p.delay),
        losses = CASE WHEN p.by_step THEN 0 ELSE t.losses END
    FROM held
    JOIN unnest($4::float8[], $5::jsonb[], $7::text[], $8::bool[])
        WITH ORDINALITY AS p(delay, note, missing_handler, by_step, nth) ON p.nth = held.nth
    WHERE t.id = held.id
    RETURNING t.id, t.job_id, t.tenant_id, t.step, t.epoch, t.queue, t.available_at, p.note, p.missing_handler,
              p.by_step, held.nth AS place  -- as write_outputs names it
), notes AS (
    INSERT INTO note (task_id, value) SELECT id, note FROM snoozed_tasks WHERE jsonb_typeof(note) = 'object'
    ON CONFLICT (task_id) DO UPDATE SET value = excluded.value
), unknown_tasks AS (
    INSERT INTO unknown_task (task_id, epoch, queue, handler)
    SELECT id, epoch, queue, missing_handler FROM snoozed_tasks WHERE missing_handler IS NOT NULL
    ON CONFLICT (task_id) DO UPDATE
    SET epoch = excluded.epoch, queue = excluded.queue, handler = excluded.handler
), {write_outputs("snoozed_tasks", "$6")}, advanced_jobs AS (
    UPDATE job j
    SET event_seq = j.event_seq + per_job.snoozed_count,
        leased = j.leased - CASE j.status WHEN 'cancel_requested' THEN 0 ELSE per_job.snoozed_count END
    FROM (SELECT job_id, count(*)::int AS snoozed_count FROM snoozed_tasks GROUP BY job_id) AS per_job
    WHERE j.id = per_job.job_id
    RETURNING j.id, j.tenant_id, j.status, j.event_seq - per_job.snoozed_count AS seq
), events AS (
    -- An event of a snooze has the kind `parked`. `put_off`: the code of the step did not run, so a debounce
    -- (debounce.py) does not count the claim. In a job that is being cancelled, a failed workflow snoozes, too.
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT s.job_id, j.seq + row_number() OVER (PARTITION BY s.job_id ORDER BY s.id), j.tenant_id, 'parked',
           j.status, s.id, s.step, 'waiting', s.epoch, jsonb_strip_nulls(jsonb_build_object(
               'until', s.available_at,
               'put_off', CASE WHEN NOT s.by_step AND j.status <> 'cancel_requested' THEN true END))
    FROM snoozed_tasks s JOIN advanced_jobs j ON j.id = s.job_id
)
-- A repeated call finds the tasks waiting already: they are settled, too.
SELECT a.id AS task_id, 'waiting' AS state,
       coalesce(s.id IS NOT NULL OR (t.epoch = a.epoch AND t.status = 'waiting'), false) AS settled
FROM lease_batch a LEFT JOIN snoozed_tasks s ON s.id = a.id LEFT JOIN task t ON t.id = a.id
"""


async def snooze(connection: Connection, snoozings: Sequence[Snoozing]) -> Settled:
    """The task goes from running to waiting. The lease ends, the attempt does not count, and the note and the outputs
    are kept. If the step's code asked to snooze, the step's earlier losses (attempts whose worker was lost) no longer
    count.

    In a job that is being cancelled, only a workflow can snooze, because its code must still see the cancel. Any other
    step of such a job gets the verdict LOST and does not change. The same holds for a lease that is not valid any more.
    """
    return await settle_twice(partial(_snooze, connection), snoozings, attrgetter("lease"))


async def _snooze(connection: Connection, snoozings: Sequence[Snoozing]) -> Settled:
    rows = await connection.fetch(
        SNOOZE,
        *lease_columns([snoozing.lease for snoozing in snoozings]),
        [capped(snoozing.delay) for snoozing in snoozings],
        [snoozing.note for snoozing in snoozings],
        outputs_column([snoozing.outputs for snoozing in snoozings]),
        [snoozing.missing_handler for snoozing in snoozings],
        [snoozing.by_step for snoozing in snoozings],
    )
    return settled_of(rows)
