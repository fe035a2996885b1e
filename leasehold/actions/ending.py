"""Cancels and deletes jobs of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

from leasehold.actions.context import Actions, Target
from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection
from leasehold.domain.states import JobState
from leasehold.transitions import jobs
from leasehold.transitions.endings import JobEnded


@dataclass(slots=True)
class Effects:
    """What a transaction changed. `states`: the new states of cancelled jobs. After the commit, the caller counts the
    jobs in `ended` and publishes `hints` (messages that tell workers of due tasks).
    """

    states: dict[UUID, JobState] = field(default_factory=dict)
    ended: list[JobEnded] = field(default_factory=list)
    hints: list[Announcement] = field(default_factory=list)


async def cancel(
    actions: Actions,
    connection: Connection,
    targets: Sequence[Target],
    reason: str,
    by: str,
    *,
    forced: bool = False,
    operation_id: UUID | None = None,
) -> Effects:
    """Request the cancel of jobs of one tenant. `forced`: also cancel jobs that do not support cancelling. The jobs'
    histories show `reason`, `by` (who cancels) and `operation_id` (the bulk operation that cancels).

    If `Effects.states` lacks a job, the job did not change, because it had ended, was being cancelled already, or does
    not support cancelling.
    """
    cancellation = await jobs.request_cancel(
        connection,
        [target.id for target in targets],
        targets[0].tenant_id,
        reason=reason,
        by=by,
        forced=forced,
        operation_id=operation_id,
    )
    effects = Effects(cancellation.states, cancellation.ended, cancellation.hints)
    for target in targets:
        after_cancel = target.kind.operations.after_cancel  # a hook: what the kind must also do after a cancel
        if after_cancel is not None and target.id in cancellation.states:
            effects.hints += await after_cancel(connection, actions.settings, target.id, target.tenant_id)
    return effects


async def delete(
    actions: Actions,
    connection: Connection,
    target: Target,
    by: str,
    effects: Effects,
    operation_id: UUID | None = None,
) -> str | None:
    """Delete the job. If the job has not ended, cancel it first. `effects` gets what the cancel changed, and the hints
    of webhook deliveries. `operation_id`: as in `cancel`.

    Returns the prefix of the job's objects in the store. The job then has a tombstone, and clients get 410. After the
    commit, the caller deletes the objects, and then the rows. If the caller fails, retention deletes what remains.

    Returns None in two cases. Either a worker still has the lease of a step, and retention will delete the job once the
    job has ended. Or the job's row was deleted after the caller had read it.
    """
    job_id, tenant_id = target.id, target.tenant_id
    # If the job has ended, the deliveries to webhooks and to its callback URL may not be written yet. They are made
    # from the job's row, so `dispatch` writes them before the job is deleted. Exception: for a failed job whose code
    # this process lacks, but a worker may have, `dispatch` writes nothing. Then `jobs.delete` hides the job, but its
    # row stays until that worker has written the deliveries.
    effects.hints += await actions.dispatch(connection, job_id, deletes=True)
    prefix = await jobs.delete(connection, job_id, tenant_id)
    if prefix is None:  # the job has not ended, or its row is deleted
        cancel_effects = await cancel(
            actions, connection, [target], "the job was deleted", by, forced=True, operation_id=operation_id
        )
        effects.states |= cancel_effects.states
        effects.ended += cancel_effects.ended
        effects.hints += cancel_effects.hints
        # `expire_early` makes retention delete the job as soon as the job ends. If `expire_early` returns a value, the
        # job has ended already, because of the cancel or by itself. Then delete the job here.
        if await jobs.expire_early(connection, job_id, tenant_id) is not None:
            effects.hints += await actions.dispatch(connection, job_id, deletes=True)
            prefix = await jobs.delete(connection, job_id, tenant_id)
    if prefix is not None:  # `jobs.delete` has written a tombstone; the job's row is deleted later
        # These hooks change further rows that belong to the job (kinds/housekeeping.py).
        for hook in actions.before_jobs_go:
            await hook(connection, [job_id])
    return prefix


async def delete_together(actions: Actions, connection: Connection, targets: Sequence[Target]) -> list[UUID]:
    """Do the same as `delete`, for jobs of one tenant that have ended. The caller has locked them. Returns the ids of
    the deleted jobs.
    """
    for target in targets:
        if target.row["notify"]:  # a webhook or a callback URL waits for the job's end
            # Ignore the hints that `dispatch` returns. No client waits for these deliveries, and the relay publishes
            # their hints.
            await actions.dispatch(connection, target.id, deletes=True)
    deleted_ids = await jobs.delete_together(connection, [target.id for target in targets], targets[0].tenant_id)
    for hook in actions.before_jobs_go:
        await hook(connection, deleted_ids)
    return deleted_ids
