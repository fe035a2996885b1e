"""Cancelling and deleting one job of any kind."""

from __future__ import annotations

from typing import Any

import structlog

from leasehold.actions import ending
from leasehold.actions.ending import Effects
from leasehold.api.auth import audit
from leasehold.api.http.responses import publish_and_admit
from leasehold.api.jobs.access import Found
from leasehold.api.process.services import Services
from leasehold.db.database import Connection
from leasehold.domain.errors import Conflict, StoreError
from leasehold.domain.states import JOB_TERMINAL, JobState
from leasehold.exporter.jobs import count_ended_jobs
from leasehold.limits import uploads
from leasehold.transitions import concurrency, sweeps

log = structlog.get_logger(__name__)


def invalid_state(status: JobState | str) -> Conflict:
    return Conflict("resource_invalid_state", f"The job is {status}: its state does not allow this.")


async def cancel(services: Services, found: Found, reason: str) -> JobState:
    """Request the cancel, and return the job's status. Raises Conflict `resource_invalid_state` for a job that has
    ended, `cancel_not_supported`.
    """
    async with services.pool.acquire() as connection:
        names = await concurrency.limits_of(connection, [found.id])
        async with connection.transaction():
            effects = await ending.cancel(services.actions, connection, [found.target], reason, _by(found))
            status = effects.states.get(found.id)
            if status is not None:
                await record(connection, found, "job.cancelled", reason=reason or None, status=status)
        if status is None:
            status = JobState(
                await connection.fetchval(
                    "SELECT status FROM job WHERE id = $1 AND tenant_id = $2", found.id, found.caller.tenant_id
                )
                or found.row["status"]
            )
            if status in JOB_TERMINAL:
                raise invalid_state(status)
            if status is not JobState.CANCEL_REQUESTED:
                raise Conflict("cancel_not_supported", "The template of this job does not support cancelling.")
    count_ended_jobs(effects.ended)
    await publish_and_admit(services, effects.hints, names if effects.ended else (), [found.id])
    return status


def _by(found: Found) -> str:
    return f"client {found.caller.client_id}"


async def record(connection: Connection, found: Found, action: str, **details: Any) -> None:
    """Add the row of an act on the job to the audit, in the transaction of the act."""
    await audit.record(connection, found.caller, action, found.id, kind=found.kind.name, **details)


async def delete(services: Services, found: Found) -> JobState | None:
    """Delete the job, which is cancelled first if it has not ended. None: it is gone. Else its status: a worker has the
    lease of a step, and retention deletes the job when it has ended.

    The transaction leaves the tombstone, so that no reader finds the job from then on. Its objects go after the commit,
    with no connection held, and then its rows. If the store is away, retention deletes both.
    """
    effects = Effects()
    async with services.pool.acquire() as connection:
        names = await concurrency.limits_of(connection, [found.id])
        async with connection.transaction():
            prefix = await ending.delete(services.actions, connection, found.target, _by(found), effects)
            await record(connection, found, "job.deleted", waits=True if prefix is None else None)
    count_ended_jobs(effects.ended)
    await publish_and_admit(services, effects.hints, names, [found.id])
    if prefix is None:
        return effects.states.get(found.id, JobState.CANCEL_REQUESTED)
    await _remove(services, found, prefix)
    return None


async def _remove(services: Services, found: Found, prefix: str) -> None:
    try:
        await uploads.remove_below(services.store, f"{prefix}/")
    except StoreError as error:
        log.warning("objects of a deleted job are left for retention", error=type(error).__name__)
        return
    async with services.pool.acquire() as connection:
        await sweeps.forget_jobs(connection, [found.id], services.actions.before_jobs_go)
