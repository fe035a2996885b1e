"""`suspend`: a workflow waits. Its calls are committed and its lease ends. A signal, a step's end or a time makes it
due again.

`task.news` counts what came for a workflow: each signal, and each step of its own that ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leasehold.db.database import Connection
from leasehold.domain.backoff import capped
from leasehold.domain.lease import Lease
from leasehold.transitions.settlements.guard import HELD_IN_LIVE_JOB, lease_columns, settled_of
from leasehold.transitions.settlements.records import Settled
from leasehold.transitions.workflows.journal_sql import WRITE_CALLS
from leasehold.transitions.workflows.records import Call, calls_column

# $4: calls. $5: `news` when the worker read it; if it is higher now, the workflow is due at once. $6: the workflow is
# due when `news` has grown by so much (NULL: it waits for a time only). $7: seconds until it is due in any case (NULL:
# never).
SUSPEND = f"""-- suspend
WITH {HELD_IN_LIVE_JOB}{WRITE_CALLS}, suspended AS (
    -- The guarded write: the attempt does not count, and what went wrong before it is forgotten.
    UPDATE task t
    SET status = 'waiting', lease_owner = NULL, lease_until = NULL, attempt = t.attempt - 1, losses = 0, errors = 0,
        journaled = true,
        wake_at = CASE WHEN t.news = p.seen THEN t.news + p.ends END,
        available_at = CASE WHEN t.news <> p.seen THEN clock_timestamp()
                            WHEN p.delay IS NULL THEN 'infinity'
                            ELSE statement_timestamp() + make_interval(secs => p.delay) END
    FROM held JOIN unnest($5::int[], $6::int[], $7::float8[]) WITH ORDINALITY AS p(seen, ends, delay, nth)
        ON p.nth = held.nth
    WHERE t.id = held.id
    RETURNING t.id, t.job_id, t.step, t.epoch, t.queue, t.priority, t.available_at, t.news <> p.seen AS is_due
), advanced AS (
    UPDATE job j
    SET event_seq = j.event_seq + mine.n, leased = j.leased - mine.n, steps_left = j.steps_left + mine.steps
    FROM (
        SELECT job_id, sum(n)::int AS n, sum(steps)::int AS steps
        FROM (SELECT job_id, 1 AS n, 0 AS steps FROM suspended UNION ALL SELECT job_id, 0, 1 FROM steps) AS each
        GROUP BY job_id
    ) AS mine
    WHERE j.id = mine.job_id
    RETURNING j.id, j.tenant_id, j.status, j.trace, j.event_seq - mine.n AS seq, mine.steps
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT s.job_id, a.seq + row_number() OVER (PARTITION BY s.job_id ORDER BY s.id), a.tenant_id, 'suspended',
           a.status, s.id, s.step, 'waiting', s.epoch,
           jsonb_build_object('until', nullif(s.available_at, 'infinity'), 'steps', a.steps)
    FROM suspended s JOIN advanced a ON a.id = s.job_id
), hinted AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT s.id, s.job_id, s.queue, s.priority, a.trace, clock_timestamp() + interval '1 second'
    FROM (SELECT id, job_id, queue, priority FROM steps
          UNION ALL SELECT id, job_id, queue, priority FROM suspended WHERE is_due) AS s
    JOIN advanced a ON a.id = s.job_id
    RETURNING id, task_id, queue, priority, headers
)
SELECT a.id AS task_id, 'waiting' AS state,
       coalesce(s.id IS NOT NULL OR (t.epoch = a.epoch AND t.status = 'waiting'), false) AS settled,
       NULL::bigint AS outbox_id, NULL::text AS queue, NULL::int AS priority, NULL::jsonb AS headers
FROM asked a LEFT JOIN suspended s ON s.id = a.id LEFT JOIN task t ON t.id = a.id
UNION ALL
SELECT h.task_id, NULL, NULL, h.id, h.queue, h.priority, h.headers FROM hinted h
"""


@dataclass(frozen=True, slots=True)
class Suspending:
    """A workflow that waits. `seen`: Journal.news as the worker read it. `ends`: it is due when this many more of its
    steps have ended; None: no step makes it due. `delay`: seconds until it is due in any case.
    """

    lease: Lease
    calls: tuple[Call, ...]
    seen: int
    ends: int | None = None
    delay: float | None = None


async def suspend(connection: Connection, suspendings: Sequence[Suspending]) -> Settled:
    """running -> waiting: writes the calls and the steps that they start. The attempt does not count."""
    rows = await connection.fetch(
        SUSPEND,
        *lease_columns([suspending.lease for suspending in suspendings]),
        calls_column([suspending.calls for suspending in suspendings]),
        [suspending.seen for suspending in suspendings],
        [suspending.ends for suspending in suspendings],
        [None if suspending.delay is None else capped(suspending.delay) for suspending in suspendings],
    )
    return settled_of(rows, hints=True)
