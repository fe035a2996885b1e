"""Taking and keeping leases: claim (by hint), claim_due (by looking), renew.

Lock order, here and in every transition: job rows by ascending id, then task rows. A task's status changes only
under its job's lock, so that order is never turned round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from types import MappingProxyType
from typing import Any
from uuid import UUID

from leasehold.db.database import Connection, lookback, unindexed
from leasehold.domain.lease import Lease
from leasehold.transitions.workers import is_of_gone


@dataclass(frozen=True, slots=True)
class Claimed:
    """A lease, and what is needed to run the attempt."""

    lease: Lease
    job_id: UUID
    tenant_id: str
    pipeline: str
    pipeline_version: int
    step: str
    queue: str
    priority: int
    errors: int
    crashes: int
    was: str  # the state it was taken from: `running` means taken over, `waiting` means parked before
    waited: float  # seconds since it could have been claimed; of no meaning for a task that was taken over
    params: dict[str, Any]
    inputs: dict[str, str]
    output_prefix: str
    trace: dict[str, str] | None
    handler: str | None  # `pipeline.step` of the code that does it, where the job's own pipeline has none
    timeout_seconds: int | None  # of one attempt, where the job's template says so
    gated: bool  # its job's end lets others in
    grace_seconds: int  # how long a cancelled attempt may take to stop


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """How leases are given out. Times in seconds."""

    owner: UUID
    ttl: float
    margin: float
    max_losses: int


# What a claim takes along of its job. It is read once, with the lock: to join it again, here or below, is to compare
# each task of a batch with each job of it, since the planner takes what a CTE returns for one row.
_OF_JOB = ("event_seq", "tenant_id", "pipeline", "pipeline_version", "params", "inputs", "output_prefix", "trace",
           "gated", "grace_seconds")  # fmt: skip


def _of_job(alias: str) -> str:
    return ", ".join(f"{alias}.{column}" for column in _OF_JOB)


# The hinted tasks. Waits for the job's lock: the holder is a short statement, and the hint is spent afterwards.
_HINTED = f"""
-- claim
WITH jobs AS MATERIALIZED (
    SELECT j.id, mine.tasks, {_of_job("j")}
    FROM (
        SELECT t.job_id, array_agg(t.id) AS tasks FROM task t WHERE t.id = ANY($1::uuid[]) GROUP BY t.job_id
    ) AS mine JOIN job j ON j.id = mine.job_id
    WHERE j.status IN ('pending', 'queued', 'running', 'waiting_worker')
    ORDER BY j.id
    FOR UPDATE OF j
), found AS MATERIALIZED (
    SELECT t.id, t.status AS was, {_of_job("jobs")}
    FROM jobs CROSS JOIN LATERAL unnest(jobs.tasks) AS hinted(id) JOIN task t ON t.id = hinted.id
    WHERE NOT EXISTS (SELECT 1 FROM paused_queue p WHERE p.queue = t.queue)
      -- A CASE, as `unindexed` has: by one of statuses the planner would read a whole backlog to find a few tasks.
      AND CASE WHEN t.status IN ('pending', 'retry', 'waiting') THEN t.available_at <= clock_timestamp()
               WHEN t.status = 'running' THEN t.losses < $4
                   AND (t.lease_until < clock_timestamp() OR (t.lease_owner = $2 AND $6) OR {is_of_gone("$5::uuid[]")})
               ELSE false END
    ORDER BY t.id
    FOR UPDATE OF t
)"""

_IS_DUE = """t.status IN ('pending', 'retry', 'waiting')
             AND t.available_at BETWEEN statement_timestamp() - $6::interval AND statement_timestamp()
             AND (t.status <> 'pending' OR t.available_at <= statement_timestamp() - x.overdue)"""

# The oldest due tasks of each queue, band and tenant, dealt out in turn: a tenant's first counts before everybody's
# second, and a tenant that has much running comes later. So a flood delays its own tenant. A band below ages into
# the one above in thirty seconds. What a hint tells of (`pending`) is ours only when it is overdue: by $5, or by $13
# where its tenant runs nothing with the asker.
# Of the tenants $9, who run $10 each with the asker, no more than $11 each are taken, of any other no more than $12
# (NULL: any number).
# Jobs that somebody else is working on are passed over, not waited for; hence more candidates than wanted.
_DUE = f"""
-- look
WITH RECURSIVE served AS MATERIALIZED (
    SELECT q.queue, band FROM unnest($1::text[]) AS q(queue) CROSS JOIN generate_series(0, 2) AS band
    WHERE NOT EXISTS (SELECT 1 FROM paused_queue p WHERE p.queue = q.queue)
), tenants(queue, band, tenant_id) AS (
    -- A loose index scan: one probe a tenant, however many tasks each has.
    SELECT s.queue, s.band, first.tenant_id
    FROM served s CROSS JOIN LATERAL (
        SELECT t.tenant_id FROM task t
        WHERE t.queue = s.queue AND t.priority = s.band AND t.status IN ('pending', 'retry', 'waiting')
          AND t.available_at >= statement_timestamp() - $6::interval
        ORDER BY t.tenant_id LIMIT 1
    ) AS first
    UNION ALL
    SELECT x.queue, x.band, next.tenant_id
    FROM tenants x CROSS JOIN LATERAL (
        SELECT t.tenant_id FROM task t
        WHERE t.queue = x.queue AND t.priority = x.band AND t.status IN ('pending', 'retry', 'waiting')
          AND t.tenant_id > x.tenant_id AND t.available_at >= statement_timestamp() - $6::interval
        ORDER BY t.tenant_id LIMIT 1
    ) AS next
), counting AS MATERIALIZED (
    -- Of no meaning to a tenant that is alone, and not free: what ran and is not vacuumed yet is read, too.
    SELECT $7::text[] IS NULL AND count(DISTINCT tenant_id) > 1 AS now FROM tenants
), busy AS MATERIALIZED (
    SELECT tenant_id, count(*) AS n FROM task
    WHERE status = 'running' AND (SELECT counting.now FROM counting)
    GROUP BY tenant_id
    UNION ALL
    SELECT known.tenant_id, known.n FROM unnest($7::text[], $8::bigint[]) AS known(tenant_id, n)
), shares AS MATERIALIZED (
    SELECT x.*, mine.n AS mine, CASE WHEN mine.tenant_id IS NULL THEN $12 ELSE mine.room END AS room,
           CASE WHEN mine.tenant_id IS NULL THEN $13::interval ELSE $5::interval END AS overdue
    FROM tenants x
    LEFT JOIN unnest($9::text[], $10::int[], $11::int[]) AS mine(tenant_id, n, room) ON mine.tenant_id = x.tenant_id
), heads AS MATERIALIZED (
    -- Of a tenant without room only how long it has waited is wanted.
    SELECT head.*, x.band, x.tenant_id, x.mine, x.room
    FROM shares x
    CROSS JOIN LATERAL (
        SELECT t.*, row_number() OVER (ORDER BY t.available_at) AS nth
        FROM (
            (SELECT t.id, t.job_id, t.status AS was, t.available_at FROM task t
             WHERE t.queue = x.queue AND t.priority = x.band AND t.tenant_id = x.tenant_id AND {_IS_DUE}
               AND x.room IS DISTINCT FROM 0
             ORDER BY t.available_at LIMIT 4 * $4)
            UNION ALL
            (SELECT t.id, t.job_id, t.status, t.available_at FROM task t
             WHERE t.queue = x.queue AND t.priority = x.band AND t.tenant_id = x.tenant_id AND {_IS_DUE}
               AND x.room = 0
             ORDER BY t.available_at LIMIT 1)
        ) AS t
    ) AS head
), roomy AS MATERIALIZED (
    SELECT h.*, coalesce(row_number() OVER (PARTITION BY h.tenant_id ORDER BY h.nth, h.available_at) <= h.room, true)
                AS has_room
    FROM heads h
), candidates AS MATERIALIZED (
    SELECT h.id, h.job_id, h.was, h.nth + greatest(busy.n, h.mine, 0) AS turn,
           h.available_at + h.band * interval '30 seconds' AS since
    FROM roomy h LEFT JOIN busy ON busy.tenant_id = h.tenant_id
    WHERE h.has_room
    ORDER BY turn, since
    LIMIT 8 * $4
), due AS MATERIALIZED (
    SELECT c.id, c.was, {_of_job("j")}
    FROM candidates c JOIN job j ON j.id = c.job_id
    WHERE {unindexed("j.status IN ('pending', 'queued', 'running', 'waiting_worker')")}
    ORDER BY c.turn, c.since
    LIMIT $4
    FOR UPDATE OF j SKIP LOCKED
), found AS MATERIALIZED (
    SELECT t.id, due.was, {_of_job("due")}
    FROM due JOIN task t ON t.id = due.id
    WHERE {unindexed("t.status IN ('pending', 'retry', 'waiting')")}
    ORDER BY t.id
    FOR UPDATE OF t
)"""

_MARK_CLAIMED = f"""
, claimed AS (
    UPDATE task t
    SET status = 'running',
        lease_owner = $2,
        lease_until = clock_timestamp() + $3::interval,
        epoch = t.epoch + 1,
        attempt = t.attempt + 1,
        losses = t.losses + (found.was = 'running')::int,
        started_at = clock_timestamp()
    FROM found
    WHERE t.id = found.id
    RETURNING t.id, t.job_id, t.step, t.queue, t.priority, t.epoch, t.attempt, t.errors, t.crashes, t.handler,
              t.timeout_seconds, found.was, extract(epoch FROM clock_timestamp() - t.available_at)::float8 AS waited,
              {_of_job("found")}
), counted AS MATERIALIZED (
    SELECT c.*, row_number() OVER (PARTITION BY job_id ORDER BY id) AS nth, (count(*) OVER job)::int AS n,
           (count(*) FILTER (WHERE was <> 'running') OVER job)::int AS leased,
           CASE WHEN bool_and(starts_with(queue, 'ext:')) OVER job THEN 'waiting_worker' ELSE 'running' END AS becomes
    FROM claimed c
    WINDOW job AS (PARTITION BY job_id)
), advanced AS (
    UPDATE job j
    SET status = mine.becomes,
        leased = j.leased + mine.leased,
        started_at = coalesce(j.started_at, clock_timestamp()),
        event_seq = j.event_seq + mine.n
    FROM counted mine
    WHERE mine.nth = 1 AND j.id = mine.job_id
), told AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT c.job_id, c.event_seq + c.nth, c.tenant_id, CASE WHEN c.was = 'running' THEN 'taken_over' ELSE 'claimed' END,
           c.becomes, c.id, c.step, 'running', c.epoch, jsonb_build_object('worker', $2::uuid, 'attempt', c.attempt)
    FROM counted c
)
"""

CLAIM = _HINTED + _MARK_CLAIMED + "SELECT * FROM counted ORDER BY id"
# At least one row, which says how long the oldest that is due has been so, what was counted, and whether somebody's
# tasks were left for want of room.
LOOK = (
    _DUE
    + _MARK_CLAIMED
    + """
SELECT counted.*, oldest.seconds AS oldest,
       CASE WHEN counting.now THEN coalesce((SELECT jsonb_object_agg(tenant_id, n) FROM busy), '{}') END AS running,
       EXISTS (SELECT 1 FROM roomy WHERE NOT has_room) AS held_back
FROM (SELECT extract(epoch FROM max(statement_timestamp() - available_at))::float8 AS seconds FROM heads) AS oldest
CROSS JOIN counting
LEFT JOIN counted ON true
ORDER BY counted.id
"""
)

# A row that another statement holds at this moment is passed over (it is being settled): still held, not renewed.
RENEW = f"""
-- renew
WITH held AS (
    SELECT l.id, l.epoch FROM unnest($2::uuid[], $3::int[]) AS l(id, epoch)
), mine AS MATERIALIZED (
    SELECT t.id
    FROM held JOIN task t ON t.id = held.id
    WHERE t.lease_owner = $1 AND t.epoch = held.epoch AND {unindexed("t.status = 'running'")}
    ORDER BY t.id
    FOR UPDATE OF t SKIP LOCKED
), renewed AS (
    UPDATE task t SET lease_until = clock_timestamp() + $4::interval
    FROM mine WHERE t.id = mine.id
    RETURNING t.id
)
SELECT held.id,
       renewed.id IS NOT NULL AS renewed,
       coalesce(t.status = 'running' AND t.lease_owner = $1 AND t.epoch = held.epoch, false) AS still_ours,
       coalesce(j.status = 'cancel_requested' AND t.cancelable, false) AS cancel
FROM held
LEFT JOIN renewed ON renewed.id = held.id
LEFT JOIN task t ON t.id = held.id
LEFT JOIN job j ON j.id = t.job_id
"""


def claimed_of(row: Any, terms: LeaseTerms, asked_at: float) -> Claimed:
    """`asked_at`: the monotonic time just before the statement that answered `row`."""
    return Claimed(
        lease=Lease(row["id"], terms.owner, row["epoch"], row["attempt"], asked_at + terms.ttl - terms.margin),
        job_id=row["job_id"],
        tenant_id=row["tenant_id"],
        pipeline=row["pipeline"],
        pipeline_version=row["pipeline_version"],
        step=row["step"],
        queue=row["queue"],
        priority=row["priority"],
        errors=row["errors"],
        crashes=row["crashes"],
        was=row["was"],
        waited=row["waited"],
        params=row["params"],
        inputs=row["inputs"],
        output_prefix=row["output_prefix"],
        trace=row["trace"],
        handler=row["handler"],
        timeout_seconds=row["timeout_seconds"],
        gated=row["gated"],
        grace_seconds=row["grace_seconds"],
    )


async def claim(
    connection: Connection,
    terms: LeaseTerms,
    task_ids: Sequence[UUID],
    gone: Sequence[UUID] = (),
    *,
    mine: bool = False,
) -> list[Claimed]:
    """pending | retry | waiting (due), or running with an expired lease or an owner in `gone` -> running.

    `mine`: also what the asker has claimed itself, without having heard of it.

    What is not returned was finished, not due, unknown, or leased by somebody alive: the hint is spent.
    """
    asked_at = monotonic()
    rows = await connection.fetch(
        CLAIM, list(task_ids), terms.owner, timedelta(seconds=terms.ttl), terms.max_losses, list(gone), mine
    )
    return [claimed_of(row, terms, asked_at) for row in rows]


# Of the completed tasks $1, a step each that $2 has claimed with their completion; not those of $3.
_CLAIMED_WITH = """
-- claimed_with
SELECT DISTINCT ON (t.id) t.id AS task_id, c.id AS next
FROM task t JOIN task c ON c.id = ANY(t.unblocks)
WHERE t.id = ANY($1::uuid[]) AND c.status = 'running' AND c.lease_owner = $2 AND c.id <> ALL($3::uuid[])
ORDER BY t.id, c.position
"""


async def claim_again(
    connection: Connection, task_ids: Sequence[UUID], terms: LeaseTerms, held: Sequence[UUID]
) -> dict[UUID, Claimed]:
    """running -> running, at a new epoch: what the completion of `task_ids` claimed, when its answer was lost. Without
    those in `held`, of which this worker knows.
    """
    rows = await connection.fetch(_CLAIMED_WITH, list(task_ids), terms.owner, list(held))
    parents = {row["next"]: row["task_id"] for row in rows}
    found = await claim(connection, terms, sorted(parents), mine=True) if parents else []
    return {parents[claimed.lease.task_id]: claimed for claimed in found}


_NOTHING_RUNS: Mapping[str, tuple[int, int | None]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Polled:
    """What a look claimed. `oldest`: seconds that the oldest task has been due, of those that it saw; None: of none.
    `running`: how much each tenant has running, if it was counted. `held_back`: more is due, of tenants without room.
    """

    claimed: list[Claimed]
    oldest: float | None = None
    running: dict[str, int] | None = None
    held_back: bool = False


async def look(
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
    """Claim up to `limit` due tasks without any hint, tenants in turn.

    Tasks that a hint tells of are left to it until they have been due for `overdue` seconds. What has been due for
    more than `back` seconds is not seen; None: everything is. `running`: how much each tenant has running, for turns;
    None: it is counted, if several tenants have work. `shares`: of each tenant, how much it has running
    with the asker, which nobody counted a while ago, and the most tasks that may be claimed for it; `other_room`: the
    most for one that is not named there; None: any number. `other_overdue`: in place of `overdue` for such a one.
    """
    asked_at = monotonic()
    rows = await connection.fetch(
        LOOK,
        list(queues),
        terms.owner,
        timedelta(seconds=terms.ttl),
        limit,
        timedelta(seconds=overdue),
        lookback(back),
        None if running is None else list(running.keys()),
        None if running is None else list(running.values()),
        list(shares.keys()),
        [running for running, _ in shares.values()],
        [room for _, room in shares.values()],
        other_room,
        timedelta(seconds=overdue if other_overdue is None else min(overdue, other_overdue)),
    )
    claimed = [claimed_of(row, terms, asked_at) for row in rows if row["id"] is not None]
    return Polled(claimed, rows[0]["oldest"], rows[0]["running"], rows[0]["held_back"])


async def claim_due(connection: Connection, terms: LeaseTerms, queues: Sequence[str], limit: int) -> list[Claimed]:
    """As `look`, at everything that is due."""
    return (await look(connection, terms, queues, limit)).claimed


@dataclass(frozen=True, slots=True)
class Renewal:
    """`renewed` is False while another statement holds the row; `still_ours` False means the lease is lost."""

    task_id: UUID
    renewed: bool
    still_ours: bool
    cancel: bool


async def renew(connection: Connection, owner: UUID, leases: Sequence[Lease], ttl: float) -> list[Renewal]:
    """running -> running with a later `lease_until`, for each lease that is still its owner's."""
    rows = await connection.fetch(
        RENEW, owner, [x.task_id for x in leases], [x.epoch for x in leases], timedelta(seconds=ttl)
    )
    return [Renewal(row["id"], row["renewed"], row["still_ours"], row["cancel"]) for row in rows]


CANCELLED = f"""
-- cancelled
SELECT t.id FROM unnest($2::uuid[]) AS held(id) JOIN task t ON t.id = held.id JOIN job j ON j.id = t.job_id
WHERE t.lease_owner = $1 AND t.cancelable AND {unindexed("t.status = 'running'")}
  AND {unindexed("j.cancel_by IS NOT NULL AND j.finished_at IS NULL")}
"""


async def to_cancel(connection: Connection, owner: UUID, held: Iterable[UUID]) -> list[UUID]:
    """Those of the tasks `held` by the owner whose job was asked to stop. Cheap enough to ask twice a second."""
    return [row["id"] for row in await connection.fetch(CANCELLED, owner, list(held))]
