"""Cancels, retries or deletes one batch of jobs for a bulk operation: a few jobs of one tenant, in one transaction. The
step `act` (steps.py) calls `act_on`. A target is a job that the operation may change, with its row locked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from uuid import UUID

import asyncpg
import structlog

from leasehold.actions import ending
from leasehold.actions.context import Target
from leasehold.actions.ending import Effects
from leasehold.actions.retrying import limits_of_retry, may_revive_together, revive, revive_together, template_of
from leasehold.broker.outbox import Announcement
from leasehold.db import handler_reads
from leasehold.db.database import Connection
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.errors import Conflict, Invalid, NotFound
from leasehold.evaluation.templates import TemplateVersion
from leasehold.limits.admission import Paid, Payer
from leasehold.pipelines.operations.context import OperationContext
from leasehold.pipelines.operations.pipeline import QUEUE, Operation
from leasehold.runtime.transient import may_try_again
from leasehold.transitions import concurrency, debounce, operations
from leasehold.transitions.concurrency import ConcurrencyLimitName
from leasehold.transitions.endings import JobEnded
from leasehold.transitions.limits import tenant_rules
from leasehold.transitions.operations import Refusal

log = structlog.get_logger(__name__)

#: The errors with which an action refuses a job.
_REFUSED = (Conflict, Invalid, NotFound)
#: The errors that a row with unforeseen values may cause in Python code. `_BROKEN_ROW` also has PostgreSQL's errors.
_BROKEN_HERE = (ValueError, KeyError, TypeError)
_BROKEN_ROW = (asyncpg.PostgresError, *_BROKEN_HERE)


@dataclass(frozen=True, slots=True)
class Acting:
    """The bulk operation whose batch this is. `id`: the id of the operation's own job."""

    id: UUID
    operation: Operation

    @property
    def by(self) -> str:
        return f"client {self.operation.client_id}"


@dataclass(slots=True)
class Outcome:
    """The outcome of a batch. `acted`: the jobs that were changed. `refusals`: the jobs that were not changed, each
    with the reason. `busy`: the jobs that were left out, because another transaction had locked their rows. `left`: the
    targets whose code this process lacks but another worker has, each with the name of one handler (`pipeline.step`) of
    that code.

    After the commit the caller publishes `hints` (messages that tell workers of new tasks), and counts the jobs in
    `ended`. The jobs in `departed` may have ended, and so may have made room in the concurrency limits `limits`. So the
    caller then admits jobs that wait for these limits.
    """

    acted: list[UUID] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    busy: list[UUID] = field(default_factory=list)
    left: dict[UUID, str] = field(default_factory=dict)
    ended: list[JobEnded] = field(default_factory=list)
    limits: set[ConcurrencyLimitName] = field(default_factory=set)
    departed: list[UUID] = field(default_factory=list)
    hints: list[Announcement] = field(default_factory=list)


async def act_on(
    context: OperationContext, connection: Connection, acting: Acting, job_ids: Sequence[UUID], tenant_id: str
) -> Outcome:
    """Act on jobs of one tenant, in the caller's transaction. `operation.at` is the time at which the operation was
    submitted. A cancel or delete leaves out jobs that were created later, and a retry leaves out jobs that failed
    later. The history of each job names the operation.

    Raises TooMany if a limit of the tenant is full. Then the caller rolls back, and tries again later or with fewer
    jobs.
    """
    operation = acting.operation
    if operation.action == "retry":
        return await _retry_charged(context, connection, acting, job_ids, tenant_id)
    rows, busy = await operations.lock(connection, operation.action, job_ids, tenant_id, operation.at)
    outcome = Outcome(busy=busy)
    targets = [_target_of(context, row) for row in rows]
    if targets:
        ids = [target.id for target in targets]
        outcome.limits |= set(await concurrency.limits_of(connection, ids))
        act = _cancel if operation.action == "cancel" else _delete
        await act(context, connection, acting, targets, outcome)
        outcome.departed += outcome.acted
    return outcome


def _target_of(context: OperationContext, row: asyncpg.Record) -> Target:
    kind = context.actions.kinds.of(row["pipeline"], is_run=row["is_run"])
    return Target(row, kind, row["queue"] or "")


async def _cancel(
    context: OperationContext, connection: Connection, acting: Acting, targets: Sequence[Target], outcome: Outcome
) -> None:
    effects = await ending.cancel(
        context.actions, connection, targets, acting.operation.reason, acting.by, operation_id=acting.id
    )
    outcome.ended += effects.ended
    outcome.hints += effects.hints
    for target in targets:
        if target.id in effects.states:
            outcome.acted.append(target.id)
        else:  # the only possible reason, because `lock` leaves out jobs that have ended or are being cancelled
            sentence = "The template of this job does not support cancelling."
            outcome.refusals.append(Refusal(target.id, "cancel_not_supported", sentence))


async def _delete(
    context: OperationContext, connection: Connection, acting: Acting, targets: Sequence[Target], outcome: Outcome
) -> None:
    """Delete the finished jobs together. Delete each unfinished job separately, because it must first be cancelled. If
    the finished jobs cannot be deleted together, this function deletes them separately, too. Housekeeping (a loop of a
    worker) deletes the objects and rows of these jobs later, because to wait for the store would take hours.
    """
    finished = [target for target in targets if target.row["finished_at"] is not None]
    unfinished = [target for target in targets if target.row["finished_at"] is None]
    delete_finished = partial(ending.delete_together, context.actions, connection, finished)
    remaining = targets
    if finished and await _act_together(connection, finished, outcome, delete_finished):
        remaining = unfinished
    for target in remaining:
        effects = Effects()
        delete = partial(ending.delete, context.actions, connection, target, acting.by, effects, acting.id)
        if await _act_alone(connection, target, outcome, delete):
            outcome.ended += effects.ended
            outcome.hints += effects.hints


async def _retry_charged(
    context: OperationContext, connection: Connection, acting: Acting, job_ids: Sequence[UUID], tenant_id: str
) -> Outcome:
    """Retry the jobs together where that is possible, and the other jobs one by one. `admission` charges each retry to
    the operation's client as a submission, and refunds a refused retry. `submitting` locks the rows of the rate limits
    before the jobs are locked, because every submission uses this order.
    """
    operation = acting.operation
    payer = Payer(tenant_id, operation.payer_key)
    # No queues are known yet, hence the empty mapping. `_Retries` adds the queues of the retried jobs, and `submitting`
    # checks the depths of these queues at the end.
    async with context.admission.submitting(connection, payer, {}, len(job_ids)) as charge:
        rows, busy = await operations.lock(connection, operation.action, job_ids, tenant_id, operation.at)
        outcome = Outcome(busy=busy)
        retries = _Retries(context, connection, acting, charge, outcome)
        targets = await retries.leave_to_others([_target_of(context, row) for row in rows])
        # Lock the dedupe keys of all jobs before any concurrency limit. A debounced submission also uses this order,
        # and another order could lead to a deadlock. The retry of each job may lock limits, because it may first have
        # to write the `on_failure` run that follows the job's failure.
        await debounce.lock_keys_of_jobs(connection, tenant_id, [target.id for target in targets])
        retried = await retries.retry_together(targets, tenant_id)
        remaining = [target for target in targets if target.id not in retried]
        await retries.lock_limits(remaining, tenant_id)
        for target in remaining:
            await _act_alone(connection, target, outcome, partial(retries.retry, target))
        await context.admission.refund(connection, payer, len(job_ids) - len(outcome.acted))
    return outcome


class _Retries:
    """The retries of one batch. They write to `outcome`, and add the queues of the retried jobs to `charge`. At the
    end, `submitting` checks the depth of these queues.
    """

    def __init__(
        self, context: OperationContext, connection: Connection, acting: Acting, charge: Paid, outcome: Outcome
    ) -> None:
        self._context = context
        self._connection = connection
        self._pipelines = acting.operation.pipelines
        self._cause = {"by": acting.by, "operation": str(acting.id)}
        self._charge = charge
        self._outcome = outcome
        self._templates: dict[tuple[str, int], TemplateVersion | None] = {}  # by name and version, each read once

    async def leave_to_others(self, targets: Sequence[Target]) -> Sequence[Target]:
        """Find the jobs whose code this process lacks, and leave them to other workers that have the code and do
        operations. Returns the jobs to retry here. These include a job whose code no worker has, because `retry` must
        refuse this job.
        """
        without_code = [target for target in targets if await self._is_without_code(target)]
        pipelines = {target.row["pipeline"] for target in without_code}
        handlers = await handler_reads.handlers_of_pipelines(self._connection, QUEUE, pipelines)
        self._outcome.left = {
            target.id: handlers[target.row["pipeline"]] for target in without_code if target.row["pipeline"] in handlers
        }
        return [target for target in targets if target.id not in self._outcome.left]

    async def _is_without_code(self, target: Target) -> bool:
        """Whether this process lacks the code of the job. A process has the code if it has the job's pipeline or, for a
        run, if the tenant wrote the run's template.

        Exception: some jobs are no runs, but became targets because this process does not know their kind, and so
        treated them as runs. If the pipeline of such a job is not in `operation.pipelines`, the operation may not
        change the job. So the answer is then False, and the job is not left to another worker.
        """
        pipeline = target.row["pipeline"]
        if self._context.actions.kinds.pipeline(pipeline) is not None:
            return False
        if not target.row["is_run"]:
            return pipeline in self._pipelines
        try:
            await self._template_of(target)
        except NotFound:
            return True
        except (*_REFUSED, *_BROKEN_HERE):  # `retry` raises the error again, and it becomes the job's refusal
            pass
        return False

    async def retry_together(self, targets: Sequence[Target], tenant_id: str) -> set[UUID]:
        """Retry the jobs that can be retried together, and return their ids. The caller retries all other jobs one by
        one. If one of the jobs to retry together is refused or has an invalid row, this function changes nothing and
        returns no ids.
        """
        joint_targets = await self._jobs_to_retry_together(targets, tenant_id)
        revive_all = partial(self._revive_together, joint_targets)
        if joint_targets and await _act_together(self._connection, joint_targets, self._outcome, revive_all):
            return {target.id for target in joint_targets}
        return set()

    async def _jobs_to_retry_together(self, targets: Sequence[Target], tenant_id: str) -> list[Target]:
        rules = (await tenant_rules(self._connection, {tenant_id}))[tenant_id]
        joint_targets = []
        for target in targets:
            try:
                template_version = await self._template_of(target)
            except (*_REFUSED, *_BROKEN_HERE):
                continue  # `retry` raises the error again, and it becomes the job's refusal
            if may_revive_together(self._context.actions, target, template_version, rules):
                joint_targets.append(target)
        return joint_targets

    async def _revive_together(self, targets: Sequence[Target]) -> None:
        """Make these failed jobs pending again, and add their queues to the charge."""
        hints = await revive_together(self._context.actions, self._connection, targets, self._cause)
        for target in targets:
            await self._context.admission.add_queues_of(self._connection, self._charge, target.id)
        # Add the hints last, because after an error above, the savepoint undoes the retries, and then none of their
        # hints may be published.
        self._outcome.hints += hints

    async def lock_limits(self, targets: Sequence[Target], tenant_id: str) -> None:
        """Lock all limits at which these jobs will wait. One call locks them in the order of their names, as an
        admission does.
        """
        rules = (await tenant_rules(self._connection, {tenant_id}))[tenant_id]
        limits: list[ConcurrencyLimit] = []
        for target in targets:
            with suppress(*_REFUSED, *_BROKEN_HERE):  # `retry` raises the error again, and it becomes the job's refusal
                template_version = await self._template_of(target)
                limits += await limits_of_retry(
                    self._context.actions, self._connection, target, template_version, rules
                )
        await concurrency.lock_limits(self._connection, limits)

    async def retry(self, target: Target) -> None:
        """Retry one job. Raises NotFound, Conflict or Invalid."""
        template_version = await self._template_of(target)
        effects = await revive(self._context.actions, self._connection, target, template_version, cause=self._cause)
        if effects is None:  # not expected, because the job is locked and had failed
            raise Conflict("resource_invalid_state", "The job's state does not allow this.")
        await self._context.admission.add_queues_of(self._connection, self._charge, target.id)
        self._outcome.limits |= set(effects.limits)
        self._outcome.departed += effects.departed
        self._outcome.ended += effects.ended
        self._outcome.hints += effects.hints

    async def _template_of(self, target: Target) -> TemplateVersion | None:
        """The template of the job, or None if the job is not a run. Raises NotFound or Conflict."""
        key = (target.row["template"], target.row["version"])
        if key not in self._templates:
            self._templates[key] = await template_of(self._context.actions, self._connection, target)
        return self._templates[key]


async def _act_together(
    connection: Connection, targets: Sequence[Target], outcome: Outcome, act: Callable[[], Awaitable[object]]
) -> bool:
    """Call `act` for all jobs at once. Returns False if one of the jobs was refused or has an invalid row. Then nothing
    has changed, and the caller acts on each job by itself.
    """
    try:
        async with connection.transaction():  # a savepoint
            await act()
    except (*_REFUSED, *_BROKEN_ROW) as error:
        if _is_outage(connection, error):
            raise
        return False
    outcome.acted += [target.id for target in targets]
    return True


async def _act_alone(
    connection: Connection, target: Target, outcome: Outcome, act: Callable[[], Awaitable[object]]
) -> bool:
    """Call `act` for one job, and record the outcome. If the job is refused or has an invalid row, this becomes the
    job's refusal, and the other jobs go on. Returns whether `act` succeeded.
    """
    try:
        async with connection.transaction():  # a savepoint
            await act()
    except _REFUSED as error:
        outcome.refusals.append(Refusal(target.id, error.code, error.message))
        return False
    except _BROKEN_ROW as error:
        if _is_outage(connection, error):
            raise
        log.exception("an operation could not act on a job", target=str(target.id))
        sentence = f"{type(error).__name__}; the worker's log has more"
        outcome.refusals.append(Refusal(target.id, "unforeseen", sentence))
        return False
    outcome.acted.append(target.id)
    return True


def _is_outage(connection: Connection, error: Exception) -> bool:
    """Whether the error is an outage, such as a lost connection or a deadlock, and not the fault of a row. The caller
    then rolls back, and tries the batch again.
    """
    return connection.is_closed() or may_try_again(error)
