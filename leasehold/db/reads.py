"""Read-only queries of the API, each one statement: one round trip, one snapshot. Every query names the tenant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import ARRAY, ColumnElement, Select, Uuid, any_, bindparam, func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from leasehold.db.tables import failure, history, job, media, output, result, task


@dataclass(frozen=True, slots=True)
class StepView:
    """One step as its job's owner may see it. `failure` is the last failed attempt's {code, message, retryable}."""

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
    """A media row with what its job has come to. The job's fields are None before there is one."""

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


@dataclass(frozen=True, slots=True)
class EventView:
    seq: int
    at: datetime
    kind: str
    job_status: str
    step: str | None
    task_status: str | None
    data: Mapping[str, Any] | None


def _last_failure() -> ColumnElement[Any]:
    return (
        select(
            func.jsonb_build_object(
                "code", failure.c.code, "message", failure.c.message, "retryable", failure.c.retryable
            )
        )
        .where(failure.c.task_id == task.c.id)
        .order_by(failure.c.epoch.desc())
        .limit(1)
        .scalar_subquery()
    )


def _value() -> ColumnElement[Any]:
    return select(result.c.value).where(result.c.task_id == task.c.id).scalar_subquery()


def _steps() -> ColumnElement[Any]:
    row = func.jsonb_build_object(
        "name", task.c.step, "status", task.c.status, "attempt", task.c.attempt,
        "started_at", task.c.started_at, "finished_at", task.c.finished_at,
        "failure", _last_failure(), "value", _value(), "position", task.c.position,
    )  # fmt: skip
    return select(func.jsonb_agg(row)).where(task.c.job_id == job.c.id).correlate(job).scalar_subquery()


def _outputs() -> ColumnElement[Any]:
    row = func.jsonb_build_object("key", output.c.key, "size", output.c.size, "content_type", output.c.content_type)
    return select(func.jsonb_agg(row)).where(output.c.job_id == job.c.id).correlate(job).scalar_subquery()


def _changed_at() -> ColumnElement[Any]:
    return select(func.max(history.c.at)).where(history.c.job_id == job.c.id).correlate(job).scalar_subquery()


def _media_query() -> Select[Any]:
    return (
        select(
            media.c.id, media.c.status, media.c.original_key, media.c.content_type, media.c.size, media.c.error,
            media.c.created_at, media.c.updated_at, media.c.job_id,
            job.c.status.label("job_status"), job.c.event_seq, job.c.error.label("job_error"), job.c.output_prefix,
            _changed_at().label("changed_at"), _steps().label("steps"), _outputs().label("outputs"),
        )
        .select_from(media.outerjoin(job, job.c.id == media.c.job_id))
        .where(
            media.c.id == bindparam("media_id"),
            media.c.tenant_id == bindparam("tenant_id"),
            media.c.deleted_at.is_(None),
        )
    )  # fmt: skip


_MEDIA = _media_query()
_SEQS = select(job.c.id, job.c.event_seq).where(job.c.id == any_(bindparam("ids", type_=ARRAY(Uuid))))
_EVENTS = (
    select(*(history.c[name] for name in ("seq", "at", "kind", "job_status", "step", "task_status", "data")))
    .where(
        history.c.job_id == bindparam("job_id"),
        history.c.tenant_id == bindparam("tenant_id"),
        history.c.seq > bindparam("after"),
    )
    .order_by(history.c.seq)
    .limit(bindparam("most"))
)


def _instant(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text is not None else None


def _step(row: Mapping[str, Any]) -> StepView:
    return StepView(
        name=row["name"],
        status=row["status"],
        attempt=row["attempt"],
        started_at=_instant(row["started_at"]),
        finished_at=_instant(row["finished_at"]),
        failure=row["failure"],
        value=row["value"],
    )


async def find_media(engine: AsyncEngine, tenant_id: str, media_id: UUID) -> MediaView | None:
    """The media and everything that GET shows of it; None if there is none, or it is another tenant's."""
    async with engine.connect() as connection:
        found = (await connection.execute(_MEDIA, {"media_id": media_id, "tenant_id": tenant_id})).first()
    if found is None:
        return None
    row = found._mapping  # noqa: SLF001 - SQLAlchemy's public API in spite of its name
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
        job_seq=row["event_seq"] or 0,
        job_error=row["job_error"],
        output_prefix=row["output_prefix"],
        changed_at=max(row["updated_at"], row["changed_at"] or row["updated_at"]),
        steps=[_step(step) for step in sorted(row["steps"] or [], key=lambda step: step["position"])],
        outputs={made["key"]: OutputView(**made) for made in row["outputs"] or []},
    )


async def event_numbers(engine: AsyncEngine, job_ids: Iterable[UUID]) -> dict[UUID, int]:
    """The number of each job's last event: whether anything happened, for any number of jobs at once.

    Not by tenant: the callers have already found these jobs through a row of their own.
    """
    async with engine.connect() as connection:
        rows = await connection.execute(_SEQS, {"ids": list(job_ids)})
    return {row.id: row.event_seq for row in rows}


async def events_after(engine: AsyncEngine, tenant_id: str, job_id: UUID, after: int, most: int) -> list[EventView]:
    """The job's events numbered above `after`, oldest first, at most `most`."""
    async with engine.connect() as connection:
        rows = await connection.execute(
            _EVENTS, {"job_id": job_id, "tenant_id": tenant_id, "after": after, "most": most}
        )
    return [EventView(*row) for row in rows]
