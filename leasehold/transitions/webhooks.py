"""Webhooks of runs that ended: each run gets a delivery job for each webhook that subscribes to it. One transaction
writes the delivery jobs and clears the run's `notify`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import asyncpg

from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection
from leasehold.domain.pipeline import Pipeline
from leasehold.transitions.jobs import NewJob, submit
from leasehold.transitions.quarantine import each, not_in

#: The duty's name in the quarantine.
DUTY = "webhooks"

# Runs that ended and whose webhooks have no delivery yet. $2 one run alone, or NULL.
_ENDED = f"""
-- webhooks_due
SELECT j.id, j.tenant_id, j.status, j.error, j.finished_at, r.template, r.version, r.scope, r.scope_id
FROM job j JOIN run r ON r.job_id = j.id
WHERE j.notify AND j.finished_at IS NOT NULL
  AND ($2::uuid IS NULL OR j.id = $2) AND {not_in(DUTY, "j.id")}
ORDER BY j.finished_at LIMIT $1
FOR UPDATE OF j SKIP LOCKED
"""

_WATCHING = "SELECT id, tenant_id, events FROM webhook WHERE enabled AND tenant_id = ANY($1::text[])"

_CLEAR_NOTIFY = "UPDATE job SET notify = false WHERE id = ANY($1::uuid[])"

# Unfinished runs of a tenant, by id, that were submitted before the tenant had a webhook.
_WATCH = """
-- webhooks_watch
WITH found AS MATERIALIZED (
    SELECT j.id FROM job j
    WHERE j.tenant_id = $1 AND j.finished_at IS NULL AND j.id > $2 AND NOT j.notify
      AND EXISTS (SELECT 1 FROM run r WHERE r.job_id = j.id)
    ORDER BY j.id LIMIT $3 FOR UPDATE OF j
), watched AS (
    UPDATE job j SET notify = true FROM found WHERE j.id = found.id
)
SELECT id FROM found ORDER BY id DESC LIMIT 1
"""
#: Rows locked at once.
_BATCH = 500


async def watch(connection: Connection, tenant_id: str) -> None:
    """Notify the tenant's webhook of the end of older runs, too. Call it once the webhook is committed, outside a
    transaction: it locks rows a few at a time.
    """
    last: UUID | None = UUID(int=0)
    while last is not None:
        last = await connection.fetchval(_WATCH, tenant_id, last, _BATCH)


async def dispatch(
    connection: Connection, pipeline: Pipeline, keep_seconds: int, limit: int = 100, job_id: UUID | None = None
) -> list[Announcement]:
    """Write a delivery for each ended run, or for `job_id` alone, and each webhook that subscribes to it. Returns hints
    to be published. A run whose deliveries cannot be written holds back no other run.
    """

    async def take(only: object | None) -> list[asyncpg.Record]:
        return await connection.fetch(_ENDED, limit, job_id if only is None else only)

    async def write_deliveries(ended: Sequence[asyncpg.Record]) -> list[Announcement]:
        watching = await connection.fetch(_WATCHING, sorted({row["tenant_id"] for row in ended}))
        deliveries = [
            _delivery(pipeline, hook["id"], row, keep_seconds)
            for row in ended
            for hook in watching
            if hook["tenant_id"] == row["tenant_id"] and f"run.{row['status']}" in hook["events"]
        ]
        hints = await submit(connection, deliveries) if deliveries else []
        await connection.execute(_CLEAR_NOTIFY, [row["id"] for row in ended])
        return hints

    return await each(connection, DUTY, take, write_deliveries, key=lambda row: row["id"])


def _delivery(pipeline: Pipeline, webhook_id: UUID, row: Any, keep_seconds: int) -> NewJob:
    data = {
        "id": str(row["id"]),
        "template": row["template"],
        "version": row["version"],
        "scope": row["scope"],
        "scope_id": row["scope_id"],
        "status": row["status"],
        "error": row["error"],
    }
    event = {"type": f"run.{row['status']}", "timestamp": row["finished_at"].isoformat(), "data": data}
    params = {"webhook_id": str(webhook_id), "event": event}
    return NewJob(pipeline, row["tenant_id"], params=params, keep_seconds=keep_seconds)


async def disable(connection: Connection, webhook_id: UUID, tenant_id: str, reason: str) -> None:
    await connection.execute(
        "UPDATE webhook SET enabled = false, disabled_because = $3 WHERE id = $1 AND tenant_id = $2",
        webhook_id,
        tenant_id,
        reason,
    )


async def find(connection: Connection, webhook_id: UUID, tenant_id: str) -> Any:
    """The webhook's row, or None."""
    return await connection.fetchrow("SELECT * FROM webhook WHERE id = $1 AND tenant_id = $2", webhook_id, tenant_id)
