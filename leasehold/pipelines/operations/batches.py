"""Acts on one batch of an operation: a few jobs of one tenant, in one transaction. The step `act` calls `act_on`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

import asyncpg
import structlog

from leasehold.actions import ending
from leasehold.actions.context import Target
from leasehold.actions.ending import Effects
from leasehold.actions.retrying import may_revive_together, revive, revive_together, template_of
from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection
from leasehold.domain.errors import Conflict, Invalid, NotFound
from leasehold.evaluation.templates import TemplateVersion
from leasehold.limits.admission import Payer
from leasehold.pipelines.operations.context import OperationContext
from leasehold.pipelines.operations.pipeline import Operation
from leasehold.runtime.transient import may_try_again
from leasehold.transitions import concurrency, operations
from leasehold.transitions.concurrency import ConcurrencyLimitName
from leasehold.transitions.endings import JobEnded
from leasehold.transitions.limits import tenant_rules
from leasehold.transitions.operations import Refusal

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Acting:
    """The operation that acts. `id`: of its job."""

    id: UUID
    operation: Operation

    @property
    def by(self) -> str:
        return f"client {self.operation.client_id}"


@dataclass(slots=True)
class Outcome:
    """The outcome of a batch. `acted`: the jobs that were changed. `busy`: the targets that another transaction held.

    After the commit the caller publishes `hints`, and counts the jobs in `ended`. It then admits waiting jobs at
    `limits`: the jobs in `departed` have left their places there.
    """

    acted: list[UUID] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    busy: list[UUID] = field(default_factory=list)
    ended: list[JobEnded] = field(default_factory=list)
    limits: set[ConcurrencyLimitName] = field(default_factory=set)
    departed: list[UUID] = field(default_factory=list)
    hints: list[Announcement] = field(default_factory=list)


async def act_on(
    context: OperationContext, connection: Connection, acting: Acting, job_ids: Sequence[UUID], tenant_id: str
) -> Outcome:
    """Act on jobs of one tenant, in the caller's transaction. The history of each job names the operation.

    Raises TooMany if a limit of the tenant is full. Then the caller rolls back, and tries again later or with fewer
    jobs.
    """
    operation = acting.operation
    if operation.action == "retry":
        return await _retry_charged(context, connection, acting, job_ids, tenant_id)
    rows, busy = await operations.lock(connection, operation.action, job_ids, tenant_id, operation.at)
    outcome = Outcome(busy=busy)
    targets = [_target(context, row) for row in rows]
    if targets:
        ids = [target.id for target in targets]
        outcome.limits |= set(await concurrency.limits_of(connection, ids))
        act = _cancel if operation.action == "cancel" else _delete
        await act(context, connection, acting, targets, outcome)
        outcome.departed += outcome.acted
    return outcome


def _target(context: OperationContext, row: asyncpg.Record) -> Target:
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
        else:  # the locked job has not ended, so only this reason is left
            sentence = "The template of this job does not support cancelling."
            outcome.refusals.append(Refusal(target.id, "cancel_not_supported", sentence))


async def _delete(
    context: OperationContext, connection: Connection, acting: Acting, targets: Sequence[Target], outcome: Outcome
) -> None:
    """Delete the jobs. Housekeeping deletes their objects and rows later: waiting for the store would take hours."""
    finished = [target for target in targets if target.row["finished_at"] is not None]

    async def delete_finished() -> None:
        await ending.delete_together(context.actions, connection, finished)

    remaining = targets
    if finished and await _act_together(connection, finished, outcome, delete_finished):
        remaining = [target for target in targets if target.row["finished_at"] is None]
    for target in remaining:
        effects = Effects()

        async def delete(target: Target = target, effects: Effects = effects) -> None:
            await ending.delete(context.actions, connection, target, acting.by, effects, acting.id)

        if await _act_alone(connection, target, outcome, delete):
            outcome.ended += effects.ended
            outcome.hints += effects.hints


async def _retry_charged(
    context: OperationContext, connection: Connection, acting: Acting, job_ids: Sequence[UUID], tenant_id: str
) -> Outcome:
    """Retry the jobs. Each retry is charged as a submission. As in every submission, the rates are locked first."""
    operation, cause = acting.operation, {"by": acting.by, "operation": str(acting.id)}
    payer = Payer(tenant_id, operation.payer_key)
    async with context.admission.submitting(connection, payer, {}, len(job_ids)) as charge:
        rows, busy = await operations.lock(connection, operation.action, job_ids, tenant_id, operation.at)
        outcome = Outcome(busy=busy)
        targets = [_target(context, row) for row in rows]
        templates = _Templates(context, connection)
        to_revive_together = await _jobs_to_revive_together(templates, connection, targets, tenant_id)

        async def retry_together() -> None:
            outcome.hints += await revive_together(context.actions, connection, to_revive_together, cause)
            for target in to_revive_together:
                await context.admission.add_queues_of(connection, charge, target.id)

        is_done = bool(to_revive_together) and await _act_together(
            connection, to_revive_together, outcome, retry_together
        )
        retried = {target.id for target in to_revive_together} if is_done else set()
        for target in targets:
            if target.id in retried:
                continue

            async def retry(target: Target = target) -> None:
                template_version = await templates.of(target)
                effects = await revive(context.actions, connection, target, template_version, cause=cause)
                if effects is None:  # although the job is locked and had failed
                    raise Conflict("resource_invalid_state", "The job's state does not allow this.")
                outcome.limits |= set(effects.limits)
                outcome.departed += effects.departed
                outcome.ended += effects.ended
                outcome.hints += effects.hints
                await context.admission.add_queues_of(connection, charge, target.id)

            await _act_alone(connection, target, outcome, retry)
        await context.admission.refund(connection, payer, len(job_ids) - len(outcome.acted))
    return outcome


class _Templates:
    """Reads the templates of a batch's runs, each once."""

    def __init__(self, context: OperationContext, connection: Connection) -> None:
        self.actions, self._connection = context.actions, connection
        self._known: dict[tuple[str, int], TemplateVersion | None] = {}

    async def of(self, target: Target) -> TemplateVersion | None:
        """The template of the job. None: the job is not a run. Raises NotFound or Conflict."""
        key = (target.row["template"], target.row["version"])
        if key not in self._known:
            self._known[key] = await template_of(self.actions, self._connection, target)
        return self._known[key]


async def _jobs_to_revive_together(
    templates: _Templates, connection: Connection, targets: Sequence[Target], tenant_id: str
) -> list[Target]:
    """The jobs that can be retried together. The caller retries the others one by one."""
    rules = (await tenant_rules(connection, {tenant_id}))[tenant_id]
    to_revive_together = []
    for target in targets:
        try:
            template_version = await templates.of(target)
        except (Conflict, NotFound):
            continue
        if may_revive_together(templates.actions, target, template_version, rules):
            to_revive_together.append(target)
    return to_revive_together


async def _act_together(
    connection: Connection, targets: Sequence[Target], outcome: Outcome, act: Callable[[], Awaitable[None]]
) -> bool:
    """Call `act` for all jobs at once. False: PostgreSQL refused a row and nothing changed; the caller then acts on
    each job by itself.
    """
    try:
        async with connection.transaction():  # a savepoint
            await act()
    except asyncpg.PostgresError as error:
        if connection.is_closed() or may_try_again(error):
            raise
        return False
    outcome.acted += [target.id for target in targets]
    return True


async def _act_alone(
    connection: Connection, target: Target, outcome: Outcome, act: Callable[[], Awaitable[None]]
) -> bool:
    """Call `act` for one job, and record the outcome. A job that is refused or has an invalid row does not stop others.
    Returns whether `act` succeeded.
    """
    try:
        async with connection.transaction():  # a savepoint
            await act()
    except (Conflict, Invalid, NotFound) as error:
        outcome.refusals.append(Refusal(target.id, error.code, error.message))
        return False
    except (asyncpg.PostgresError, ValueError, KeyError, TypeError) as error:
        if connection.is_closed() or may_try_again(error):
            raise
        log.exception("an operation could not act on a job", target=str(target.id))
        sentence = f"{type(error).__name__}; the worker's log has more"
        outcome.refusals.append(Refusal(target.id, "unforeseen", sentence))
        return False
    outcome.acted.append(target.id)
    return True
