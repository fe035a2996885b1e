"""Reads a picture (a row of `media`) with its job, steps and outputs, for the endpoints. One statement reads all of
them, so the read needs only one round trip, and all values come from one snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from leasehold.db.database import Connection
from leasehold.db.job_reads import LIVES


@dataclass(frozen=True, slots=True)
class StepView:
    """One step. `failure`: {code, message, retryable} of the last failed attempt."""

    name: str
    status: str
    attempt: int
    started_at: datetime | None
    finished_at: datetime | None
    failure: Mapping[str, Any] | None
    value: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class OutputView:
    key: str
    size: int
    content_type: str


@dataclass(frozen=True, slots=True)
class MediaView:
    """A media row with the state of its job. The job's fields are None before the job exists.

    `job_seq`: the number of the job's last event; 0: there is no job yet, or it has no event. `updated_at`: when the
    media row changed. `changed_at`: when the row or the job changed last.
    """

    id: UUID
    status: str
    original_key: str
    content_type: str
    size: int | None
    error: Mapping[str, Any] | None
    created_at: datetime
    updated_at: datetime
    job_id: UUID | None
    job_status: str | None
    job_seq: int
    job_error: Mapping[str, Any] | None
    output_prefix: str | None
    changed_at: datetime
    steps: Sequence[StepView]
    outputs: Mapping[str, OutputView]  # by key


# $1 the picture, $2 the tenant.
FIND_MEDIA = f"""
-- media_find
SELECT m.id, m.status, m.original_key, m.content_type, m.size, m.error, m.created_at, m.updated_at, m.job_id,
    j.status AS job_status, j.event_seq AS job_seq, j.error AS job_error, j.output_prefix,
    (SELECT max(e.at) FROM history e WHERE e.job_id = j.id) AS job_changed_at,
    (SELECT jsonb_agg(jsonb_build_object(
        'name', t.step, 'status', t.status, 'attempt', t.attempt, 'started_at', t.started_at,
        'finished_at', t.finished_at,
        'failure', (SELECT jsonb_build_object('code', f.code, 'message', f.message, 'retryable', f.retryable)
                    FROM failure f WHERE f.task_id = t.id ORDER BY f.epoch DESC LIMIT 1),
        'value', (SELECT x.value FROM result x WHERE x.task_id = t.id)
     ) ORDER BY t.position) FROM task t WHERE t.job_id = j.id) AS steps,
    (SELECT jsonb_agg(jsonb_build_object('key', o.key, 'size', o.size, 'content_type', o.content_type))
     FROM output o WHERE o.job_id = j.id) AS outputs
FROM media m LEFT JOIN job j ON j.id = m.job_id
WHERE m.id = $1 AND m.tenant_id = $2 AND m.deleted_at IS NULL AND {LIVES}
"""


def _parse_instant(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text is not None else None


def _step_view(row: Mapping[str, Any]) -> StepView:
    return StepView(
        name=row["name"],
        status=row["status"],
        attempt=row["attempt"],
        started_at=_parse_instant(row["started_at"]),
        finished_at=_parse_instant(row["finished_at"]),
        failure=row["failure"],
        value=row["value"],
    )


async def find_media(connection: Connection, tenant_id: str, media_id: UUID) -> MediaView | None:
    """Read the picture and its job. Returns None if there is no such picture, if it belongs to another tenant, or if
    its job is deleted or past its retention.
    """
    row = await connection.fetchrow(FIND_MEDIA, media_id, tenant_id)
    if row is None:
        return None
    return MediaView(
        id=row["id"],
        status=row["status"],
        original_key=row["original_key"],
        content_type=row["content_type"],
        size=row["size"],
        error=row["error"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        job_id=row["job_id"],
        job_status=row["job_status"],
        job_seq=row["job_seq"] or 0,
        job_error=row["job_error"],
        output_prefix=row["output_prefix"],
        changed_at=max(row["updated_at"], row["job_changed_at"] or row["updated_at"]),
        steps=[_step_view(step) for step in row["steps"] or []],
        outputs={output["key"]: OutputView(**output) for output in row["outputs"] or []},
    )
