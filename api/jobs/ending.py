"""Cancels or deletes one job of any kind. The endpoints of `/v1/jobs` and `/v1/runs` use this module."""

from __future__ import annotations

from typing import Any

import structlog

from leasehold.actions import ending
from leasehold.actions.ending import Effects
from leasehold.api.auth import audit
from leasehold.api.http.responses import publish_and_admit
from leasehold.api.jobs.access import JobAccess, state_now
from leasehold.api.process.best_effort import best_effort
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


async def cancel(services: Services, access: JobAccess, reason: str) -> JobState:
    """Request the cancel, and return the job's status. Raises Conflict `resource_invalid_state` if the job has ended,
    and Conflict `cancel_not_supported` if its template does not allow cancels.
    """
    async with services.pool.acquire() as connection:
        limit_names = await concurrency.limits_of(connection, [access.id])  # the job's concurrency limits
        async with connection.transaction():
            effects = await ending.cancel(services.actions, connection, [access.target], reason, _client_name(access))
            status = effects.states.get(access.id)
            if status is not None:
                await record(connection, access, "job.cancelled", reason=reason or None, status=status)
        if status is None:
            status = await state_now(connection, access)
            if status in JOB_TERMINAL:
                raise invalid_state(status)
            if status is not JobState.CANCEL_REQUESTED:
                raise Conflict("cancel_not_supported", "The template of this job does not support cancelling.")
    count_ended_jobs(effects.ended)
    # `hints`: messages that tell workers of due tasks. If the cancel has ended the job, there is room for other jobs at
    # its concurrency limits.
    await publish_and_admit(services, effects.hints, limit_names if effects.ended else (), [access.id])
    return status


def _client_name(access: JobAccess) -> str:
    """The name by which the events of the job show the caller."""
    return f"client {access.acting_caller.client_id}"


async def record(connection: Connection, access: JobAccess, action: str, **details: Any) -> None:
    """Write into the audit what the caller did with the job. Call this in the transaction of the caller's act."""
    await audit.record(connection, access.acting_caller, action, access.id, kind=access.kind.name, **details)


async def delete(services: Services, access: JobAccess) -> JobState | None:
    """Delete the job. A job that has not ended is cancelled first.

    Returns None if the job is deleted. Returns the job's status if a worker still has the lease of a step. In this case
    retention (a maintenance loop of the workers) deletes the job when it has ended. Raises Gone or NotFound if another
    request, or retention, has deleted the job since the caller read it.

    If no worker has a lease, the transaction writes a tombstone, so that requests for the job get 410 after the commit.
    Then this function deletes first the job's objects (without holding a connection), and then its rows. If the object
    store fails, retention deletes objects and rows later.
    """
    effects = Effects()  # `ending.delete` fills it
    async with services.pool.acquire() as connection:
        limit_names = await concurrency.limits_of(connection, [access.id])
        async with connection.transaction():
            # The prefix of the job's objects. None: a worker still has the lease of a step, or the job is gone.
            prefix = await ending.delete(services.actions, connection, access.target, _client_name(access), effects)
            if prefix is None:
                # `states` lacks the job if an earlier request has cancelled it, or if the job is gone. If the job is
                # gone, `state_now` raises, and the transaction rolls back.
                status = effects.states.get(access.id) or await state_now(connection, access)
            await record(connection, access, "job.deleted", waits=True if prefix is None else None)
    count_ended_jobs(effects.ended)
    await publish_and_admit(services, effects.hints, limit_names, [access.id])
    if prefix is None:
        return status
    await _remove_objects_and_rows(services, access, prefix)
    return None


async def _remove_objects_and_rows(services: Services, access: JobAccess, prefix: str) -> None:
    """Remove the objects and the rows of a deleted job. If this fails, retention removes them later."""
    try:
        await uploads.remove_below(services.store, f"{prefix}/")
    except StoreError as error:
        log.warning("objects of a deleted job are left for retention", error=type(error).__name__)
        return
    with best_effort("rows of a deleted job"):
        async with services.pool.acquire() as connection:
            await sweeps.forget_jobs(connection, [access.id], services.actions.before_jobs_go)
