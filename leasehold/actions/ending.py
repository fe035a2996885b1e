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
    """What a transaction did. After the commit count `ended` and publish `hints`. `states`: of the jobs that it
    cancelled.
    """

    states: dict[UUID, JobState] = field(default_factory=dict)
    ended: list[JobEnded] = field(default_factory=list)
    hints: list[Announcement] = field(default_factory=list)


async def cancel(
    actions: Actions, connection: Connection, targets: Sequence[Target], reason: str, by: str, *, forced: bool = False
) -> Effects:
    """Request the cancel of jobs of one tenant. A job that is not among the `states` did not change: it has ended, is
    being cancelled already, or (unless `forced`) does not support cancelling.
    """
    cancels = await jobs.request_cancel(
        connection,
        [target.id for target in targets],
        targets[0].tenant_id,
        reason=reason,
        by=by,
        forced=forced,
    )
    effects = Effects(cancels.states, cancels.ended)
    for target in targets:
        after = target.kind.operations.after_cancel
        if after is not None and target.id in cancels.states:
            effects.hints += await after(connection, actions.settings, target.id, target.tenant_id)
    return effects


async def delete(actions: Actions, connection: Connection, target: Target, by: str, effects: Effects) -> str | None:
    """Delete the job, which is cancelled first if it has not ended. What happened is added to `effects`.

    Returns the prefix of the job's objects: the job is gone. A tombstone remembers it, and no reader finds it any more.
    Delete the objects and then the rows after the commit; what is left, retention deletes. None: a worker has the lease
    of a step, and retention deletes the job when it has ended.
    """
    job_id, tenant_id = target.id, target.tenant_id
    # Deliveries about the job's end are written before its row goes.
    effects.hints += await actions.dispatch(connection, job_id)
    prefix = await jobs.delete(connection, job_id, tenant_id)
    if prefix is None:
        cancelled = await cancel(actions, connection, [target], "the job was deleted", by, forced=True)
        effects.states |= cancelled.states
        effects.ended += cancelled.ended
        effects.hints += cancelled.hints
        await jobs.expire_early(connection, job_id, tenant_id)
        if cancelled.ended:
            effects.hints += await actions.dispatch(connection, job_id)
            prefix = await jobs.delete(connection, job_id, tenant_id)
    if prefix is not None:
        for of_kind in actions.before_jobs_go:
            await of_kind(connection, [job_id])
    return prefix


async def delete_together(actions: Actions, connection: Connection, targets: Sequence[Target]) -> list[UUID]:
    """As `delete`, for jobs of one tenant that have ended. Lock them first. Returns those that are gone."""
    for target in targets:
        if target.row["notify"]:
            await actions.dispatch(connection, target.id)
    gone = await jobs.delete_together(connection, [target.id for target in targets], targets[0].tenant_id)
    for of_kind in actions.before_jobs_go:
        await of_kind(connection, gone)
    return gone
