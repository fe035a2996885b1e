"""Functions for endpoints to call after their commit. They publish hints (messages that tell workers of due tasks),
admit jobs that wait at concurrency limits, and encode the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import orjson
from fastapi import Response

from leasehold.api.process.best_effort import best_effort
from leasehold.api.process.metrics import SUBMITTED
from leasehold.api.process.services import Services
from leasehold.broker.outbox import Announcement
from leasehold.exporter.jobs import count_ended_jobs
from leasehold.transitions import concurrency
from leasehold.transitions.concurrency import ConcurrencyLimitName
from leasehold.transitions.runs import CreatedRun


def encoded(content: Any) -> bytes:
    """The content as JSON. asyncpg's own UUID type is written as text, because orjson does not know it."""
    return orjson.dumps(content, option=orjson.OPT_UTC_Z, default=str)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response with JSON. `content`: the JSON itself in bytes, or a value to encode."""
    body = content if isinstance(content, bytes) else encoded(content)
    return Response(body, status, headers, media_type="application/json")


async def publish_and_admit(
    services: Services,
    hints: Sequence[Announcement],
    limits: Sequence[ConcurrencyLimitName] = (),
    departed: Sequence[UUID] = (),
) -> None:
    """Call this after a commit: publish the commit's hints, and admit the jobs that wait at `limits`.

    `departed`: the jobs that the commit may have taken out of these limits. During an outage this function raises
    nothing, because the request is committed, and the workers publish the hints and admit the jobs later.
    """
    services.announcer.announce(hints)
    if limits:
        with best_effort("admissions after a commit"):
            async with services.pool.acquire() as connection:
                services.announcer.announce(await concurrency.admit(connection, limits, departed))


async def publish_run_effects(services: Services, effects: CreatedRun) -> None:
    """Call this after the commit that created a run or retried one. It counts the older runs that this run replaced and
    thereby ended, then calls `publish_and_admit`.
    """
    count_ended_jobs(effects.ended)
    await publish_and_admit(services, effects.hints, effects.limits, effects.departed)


async def publish_submitted_run(services: Services, created_run: CreatedRun, template: str) -> None:
    """Call this in place of `publish_run_effects` for a new run that a client has submitted. In addition, it counts the
    run in the metric `jobs_submitted_total`.
    """
    await publish_run_effects(services, created_run)
    SUBMITTED.labels(template).inc()
