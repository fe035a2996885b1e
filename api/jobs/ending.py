"""Cancelling and deleting a job of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog

from leasehold.api.auth import audit
from leasehold.api.http.responses import follow_up
from leasehold.api.jobs.access import Found
from leasehold.api.jobs.deliveries import dispatch_of
from leasehold.api.process.services import Services
from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection
from leasehold.domain.errors import Conflict, StoreError
from leasehold.domain.states import JOB_TERMINAL, JobState
from leasehold.exporter.jobs import jobs_ended
from leasehold.kinds.housekeeping import BeforeJobsGo, HousekeepingContext, housekeeping_of
from leasehold.limits import uploads
from leasehold.transitions import concurrency, jobs, sweeps
from leasehold.transitions.endings import JobEnded

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
            status, ended, hints = await _cancel(connection, services, found, reason, forced=False)
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
    jobs_ended(ended)
    await follow_up(services, hints, names if ended else (), [found.id])
    return status


async def _cancel(
    connection: Connection, services: Services, found: Found, reason: str, *, forced: bool
) -> tuple[JobState | None, list[JobEnded], Sequence[Announcement]]:
    """In the caller's transaction: the new status (None: nothing changed), what ended, and hints to publish."""
    caller = found.caller
    cancels = await jobs.request_cancel(
        connection, [found.id], caller.tenant_id, reason=reason, by=f"client {caller.client_id}", forced=forced
    )
    if not cancels.states:
        return None, [], []
    after = found.kind.operations.after_cancel
    hints = [] if after is None else await after(connection, services.settings, found.id, caller.tenant_id)
    return cancels.states[found.id], cancels.ended, hints


async def record(connection: Connection, found: Found, action: str, **details: Any) -> None:
    """Add the row of an act on the job to the audit, in the transaction of the act."""
    await audit.record(connection, found.caller, action, found.id, kind=found.kind.name, **details)


async def delete(services: Services, found: Found) -> JobState | None:
    """Delete the job, which is cancelled first if it has not ended. None: it is gone. Else its status: a worker has the
    lease of a step, and retention deletes the job when it has ended.

    The transaction leaves the tombstone, so that no reader finds the job from then on. Its objects go after the commit,
    with no connection held, and then its rows. If the store is away, retention deletes both.
    """
    tenant_id = found.caller.tenant_id
    before = _before_jobs_go(services)
    ended: list[JobEnded] = []
    async with services.pool.acquire() as connection:
        names = await concurrency.limits_of(connection, [found.id])
        async with connection.transaction():
            # Deliveries about the job's end are written before its row goes.
            hints = await dispatch_of(services, connection, found.id)
            prefix = await jobs.delete(connection, found.id, tenant_id)
            status: JobState | None = None
            if prefix is None:
                status, ended, more = await _cancel(connection, services, found, "the job was deleted", forced=True)
                hints = [*hints, *more]
                await jobs.expire_early(connection, found.id, tenant_id)
                if ended:
                    hints = [*hints, *await dispatch_of(services, connection, found.id)]
                    prefix = await jobs.delete(connection, found.id, tenant_id)
            if prefix is not None:
                for of_kind in before:
                    await of_kind(connection, [found.id])
            await record(connection, found, "job.deleted", waits=True if prefix is None else None)
    jobs_ended(ended)
    await follow_up(services, hints, names, [found.id])
    if prefix is None:
        return status or JobState.CANCEL_REQUESTED
    await _remove(services, found, prefix, before)
    return None


async def _remove(services: Services, found: Found, prefix: str, before: Sequence[BeforeJobsGo]) -> None:
    try:
        await uploads.remove_below(services.store, f"{prefix}/")
    except StoreError as error:
        log.warning("objects of a deleted job are left for retention", error=type(error).__name__)
        return
    async with services.pool.acquire() as connection:
        await sweeps.forget_jobs(connection, [found.id], before)


def _before_jobs_go(services: Services) -> list[BeforeJobsGo]:
    context = HousekeepingContext(services.settings, services.pool.acquire, services.store)
    hooks = (kind.before_jobs_go for kind in housekeeping_of(services.kinds, context))
    return [hook for hook in hooks if hook is not None]
