"""Deliveries about a job's end that are written now, before the job's row changes again or goes."""

from __future__ import annotations

from uuid import UUID

from leasehold.api.process.services import Services
from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection
from leasehold.transitions import webhooks


async def dispatch_of(services: Services, connection: Connection, job_id: UUID) -> list[Announcement]:
    """Write the deliveries that the job's end still owes, inside the caller's transaction. Returns hints to publish."""
    pipeline = services.templates.pipelines.find("webhook")
    if pipeline is None:
        return []
    keep_seconds = services.settings.retention_days * 86_400
    return await webhooks.dispatch(connection, pipeline, keep_seconds, services.job_kinds.subjects, job_id=job_id)
