"""`poll`: a worker finds due tasks without a hint (a message that names a task), and claims them so that tenants take
turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from types import MappingProxyType

from leasehold.db.database import Connection, unindexed, window_interval
from leasehold.transitions.claims.marking import job_columns, mark_claimed
from leasehold.transitions.claims.records import Claimed, LeaseTerms, claimed_of

#: SQL: the task `t` is due within the poll window ($5). A `pending` task has a hint, so the poll skips the task until
#: it has been due for the time `share.overdue` (see the CTE `shares`).
_IS_DUE = """t.status IN ('pending', 'retry', 'waiting')
             AND t.available_at BETWEEN statement_timestamp() - $5::interval AND statement_timestamp()
             AND (t.status <> 'pending' OR t.available_at <= statement_timestamp() - share.overdue)"""

#: SQL: the task `t` of `job_tasks` is still due. Since the statement began, another worker may have claimed the task,
#: and may even have snoozed it. In a job that is being cancelled, only a workflow (`journaled`) starts, because its
#: code must see the cancel. PostgreSQL finds the task by its id: `unindexed` keeps the planner from reading a partial
#: index of the status instead.
_IS_STILL_DUE = f"""{unindexed("t.status IN ('pending', 'retry', 'waiting')")}
      AND t.available_at <= clock_timestamp() AND (t.journaled OR NOT job_tasks.cancelling)"""

# The tenants take turns: the first task of each tenant comes before the second task of any tenant. The tasks of one
# tenant come in the order of their priority, and then of the time at which they became due. After each thirty seconds,
# a due task counts as a task of the next higher priority. A tenant with many running tasks comes later, so a flood of
# tasks delays only its own tenant. (In `candidates`, the first task of a tenant with three running tasks has `turn` 4.)
#
# $1: the queues to poll. $2: the owner of the new leases. $3: the duration of a lease. $4: claim at most this many
# tasks.
# $5: the poll window. The statement does not read tasks that have been due for longer than this.
# $6: tenants. $7: how many tasks each of them has running. If both are NULL, the statement counts the running tasks.
# $8: the tenants with tasks on this worker. $9: how many tasks each of them has on this worker. $10: how many more
# tasks each of them may get (NULL: any number).
# $11: how many tasks any other tenant may get (NULL: any number).
# $12: for how long the poll skips a due `pending` task of the tenants $8, because the task has a hint. $13: the same
# time for any other tenant.
#
# The statement leaves out jobs that another statement has locked, so it reads more candidates than it claims. It
# returns at least one row, with the age of the oldest due task, the counts of running tasks, and whether the statement
# left out due tasks because their tenants have no room.
# The CTEs of `mark_claimed` claim the tasks of `job_tasks` that are still due. The last of these CTEs,
# `numbered_tasks`, has a row for each claimed task. The statement's first line is the name under which statistics show
# the statement.
POLL = f"""
-- look
WITH RECURSIVE served_queues AS MATERIALIZED (
    -- The queues that are not paused, and the priorities (`band`) of each.
    SELECT q.queue, band FROM unnest($1::text[]) AS q(queue) CROSS JOIN generate_series(0, 2) AS band
    WHERE NOT EXISTS (SELECT 1 FROM paused_queue p WHERE p.queue = q.queue)
), tenants(queue, band, tenant_id) AS (
    -- The tenants with open tasks, by a loose index scan: one probe for each tenant, however many tasks it has.
    SELECT s.queue, s.band, first_task.tenant_id
    FROM served_queues s CROSS JOIN LATERAL (
        SELECT t.tenant_id FROM task t
        WHERE t.queue = s.queue AND t.priority = s.band AND t.status IN ('pending', 'retry', 'waiting')
          AND t.available_at >= statement_timestamp() - $5::interval
        ORDER BY t.tenant_id LIMIT 1
    ) AS first_task
    UNION ALL
    SELECT tenants.queue, tenants.band, next_task.tenant_id
    FROM tenants CROSS JOIN LATERAL (
        SELECT t.tenant_id FROM task t
        WHERE t.queue = tenants.queue AND t.priority = tenants.band AND t.status IN ('pending', 'retry', 'waiting')
          AND t.tenant_id > tenants.tenant_id AND t.available_at >= statement_timestamp() - $5::interval
        ORDER BY t.tenant_id LIMIT 1
    ) AS next_task
), counting AS MATERIALIZED (
    -- Whether this statement counts the running tasks. A single tenant needs no turns. Counting is slow, because it
    -- also reads the rows of tasks that have run and are not vacuumed yet.
    SELECT $6::text[] IS NULL AND count(DISTINCT tenant_id) > 1 AS is_needed FROM tenants
), running_counts AS MATERIALIZED (
    -- How many tasks each tenant has running: counted here, or passed by the caller.
    SELECT tenant_id, count(*) AS n FROM task
    WHERE status = 'running' AND (SELECT counting.is_needed FROM counting)
    GROUP BY tenant_id
    UNION ALL
    SELECT passed.tenant_id, passed.n FROM unnest($6::text[], $7::bigint[]) AS passed(tenant_id, n)
), shares AS MATERIALIZED (
    -- For each tenant: how many tasks run on this worker (`running_here`), and how many more the worker may claim
    -- (`room`). `overdue`: for how long the poll skips a due `pending` task, because the task has a hint.
    SELECT tenants.*, worker_share.n AS running_here,
           CASE WHEN worker_share.tenant_id IS NULL THEN $11 ELSE worker_share.room END AS room,
           CASE WHEN worker_share.tenant_id IS NULL THEN $13::interval ELSE $12::interval END AS overdue
    FROM tenants
    LEFT JOIN unnest($8::text[], $9::int[], $10::int[]) AS worker_share(tenant_id, n, room)
        ON worker_share.tenant_id = tenants.tenant_id
), heads AS MATERIALIZED (
    -- The oldest due tasks of each queue, priority and tenant. If a tenant has no room, the statement reads only the
    -- oldest task, for its age. `since`: when the task became due, plus half a minute for each lower priority.
    SELECT head.*, head.available_at + share.band * interval '30 seconds' AS since,
           share.tenant_id, share.running_here, share.room
    FROM shares share
    CROSS JOIN LATERAL (
        (SELECT t.id, t.job_id, t.status AS was, t.available_at FROM task t
         WHERE t.queue = share.queue AND t.priority = share.band AND t.tenant_id = share.tenant_id
           AND {_IS_DUE} AND share.room IS DISTINCT FROM 0
         ORDER BY t.available_at LIMIT 4 * $4)
        UNION ALL
        (SELECT t.id, t.job_id, t.status, t.available_at FROM task t
         WHERE t.queue = share.queue AND t.priority = share.band AND t.tenant_id = share.tenant_id
           AND {_IS_DUE} AND share.room = 0
         ORDER BY t.available_at LIMIT 1)
    ) AS head
), numbered_heads AS MATERIALIZED (
    -- `nth` numbers the tasks of each tenant, in all queues and priorities together.
    SELECT h.*, row_number() OVER (PARTITION BY h.tenant_id ORDER BY h.since) AS nth FROM heads h
), room_of_heads AS MATERIALIZED (
    -- Whether each task is within the room of its tenant.
    SELECT h.*, coalesce(h.nth <= h.room, true) AS has_room FROM numbered_heads h
), candidates AS MATERIALIZED (
    -- The tasks in the order in which tenants take turns. `turn`: the task's number within its tenant. The numbers
    -- begin after the tenant's running tasks.
    SELECT h.id, h.job_id, h.was, h.nth + greatest(running_counts.n, h.running_here, 0) AS turn, h.since
    FROM room_of_heads h LEFT JOIN running_counts ON running_counts.tenant_id = h.tenant_id
    WHERE h.has_room
    ORDER BY turn, since
    LIMIT 8 * $4
), job_tasks AS MATERIALIZED (
    -- Locks the jobs that no other statement has locked.
    SELECT c.id, c.was, {job_columns()}
    FROM candidates c JOIN job j ON j.id = c.job_id
    WHERE {unindexed("j.finished_at IS NULL")}
    ORDER BY c.turn, c.since
    LIMIT $4
    FOR UPDATE OF j SKIP LOCKED
){mark_claimed(_IS_STILL_DUE)}
SELECT numbered_tasks.*, oldest.seconds AS oldest,
       CASE WHEN counting.is_needed
            THEN coalesce((SELECT jsonb_object_agg(tenant_id, n) FROM running_counts), '{{}}') END AS running,
       EXISTS (SELECT 1 FROM room_of_heads WHERE NOT has_room) AS held_back
FROM (SELECT extract(epoch FROM max(statement_timestamp() - available_at))::float8 AS seconds FROM heads) AS oldest
CROSS JOIN counting
LEFT JOIN numbered_tasks ON true
ORDER BY numbered_tasks.id
"""


# The default of `poll`'s parameter `shares`: the worker runs no task.
_NOTHING_RUNS: Mapping[str, tuple[int, int | None]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Polled:
    """The tasks that a poll claimed. `oldest`: for how many seconds the oldest task in the poll window has been due;
    None: no task is due. `running`: how many tasks each tenant has running; None: PostgreSQL did not count them.
    `held_back`: whether the poll left out due tasks because their tenants may get no more now.
    """

    claimed: list[Claimed]
    oldest: float | None = None
    running: dict[str, int] | None = None
    held_back: bool = False


async def poll(
    connection: Connection,
    terms: LeaseTerms,
    queues: Sequence[str],
    limit: int,
    *,
    overdue: float = 0.0,
    back: float | None = None,
    running: Mapping[str, int] | None = None,
    shares: Mapping[str, tuple[int, int | None]] = _NOTHING_RUNS,
    other_room: int | None = None,
    other_overdue: float | None = None,
) -> Polled:
    """pending | retry | waiting (due) -> running, for up to `limit` tasks without any hint; tenants take turns.

    `overdue`: the poll skips a `pending` task, which has a hint, until the task has been due for this many seconds.
    `back`: the poll window in seconds. The poll does not read tasks that have been due for longer. None: no bound.
    `running`: how many tasks each tenant has running, which decides the order of the tenants. None: PostgreSQL counts,
    if several tenants have work.
    `shares`: for each tenant, how many of its tasks run on this worker, and how many more this poll may claim (None:
    any number).
    `other_room`: how many tasks this poll may claim for a tenant that is not in `shares`. None: any number.
    `other_overdue`: for tenants that are not in `shares`, the poll uses this value in place of `overdue` if it is
    smaller. None: the poll uses `overdue` for all tenants.
    """
    requested_at = monotonic()
    rows = await connection.fetch(
        POLL,
        list(dict.fromkeys(queues)),  # a queue that is named twice would yield each of its tasks twice
        terms.owner,
        timedelta(seconds=terms.ttl),
        limit,
        window_interval(back),
        None if running is None else list(running.keys()),
        None if running is None else list(running.values()),
        list(shares.keys()),
        [running_here for running_here, _ in shares.values()],
        [room for _, room in shares.values()],
        other_room,
        timedelta(seconds=overdue),
        timedelta(seconds=overdue if other_overdue is None else min(overdue, other_overdue)),
    )
    claimed = [claimed_of(row, terms, requested_at) for row in rows if row["id"] is not None]
    return Polled(claimed, rows[0]["oldest"], rows[0]["running"], rows[0]["held_back"])


async def claim_due(connection: Connection, terms: LeaseTerms, queues: Sequence[str], limit: int) -> list[Claimed]:
    """Do what `poll` does, without a poll window and without shares. Returns only the claims."""
    return (await poll(connection, terms, queues, limit)).claimed
