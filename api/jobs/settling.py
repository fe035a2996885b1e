"""Settles the order of a job that has ended. An order is a step's request to a provider; here its outcome is unknown. A
person decides what happens: adopt the order (name its id, so that the job goes on with this order), order again, or
give up the order. A cancelled or expired job does not run again, so an order that such a job adopts is withdrawn at the
provider. The endpoint of /v1/unsettled and the console call `settle`.

If two people settle the same order, the first decides. The second gets a Conflict that names the decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leasehold.actions.retrying import revive
from leasehold.api.http.responses import publish_run_effects
from leasehold.api.jobs.access import JobAccess
from leasehold.api.jobs.ending import record
from leasehold.api.jobs.schemas import SettleRequest
from leasehold.api.process.services import Services
from leasehold.db.database import Connection
from leasehold.domain.errors import Conflict, Invalid
from leasehold.domain.sentences import to_the_second
from leasehold.domain.states import JobState
from leasehold.kinds.job_kinds import UnknownOrders
from leasehold.transitions.jobs import resolve, resolving
from leasehold.transitions.jobs.resolving import Unresolved
from leasehold.transitions.runs import CreatedRun

#: The action of a settlement -> the words for it in the Conflict that a second person gets.
_DECISIONS = {"adopt": "adopted the order {ref}", "again": "ordered again", "give_up": "gave the order up"}


async def settle(services: Services, access: JobAccess, body: SettleRequest) -> dict[str, str]:
    """Settle the job's order, and return the RateLimit headers. `access`: the job's row, its kind, and the caller.
    Raises the problems that the endpoint `settleJob` documents.
    """
    orders = access.kind.operations.unknown_orders  # how people settle the orders of this kind
    if orders is None:
        raise _nothing_to_settle(access)
    effects: CreatedRun | None = None  # what must be published after the commit
    limit_headers: dict[str, str] = {}
    async with services.pool.acquire() as connection, connection.transaction():
        holders: Sequence[Mapping[str, Any]] = ()
        if body.ref is not None:
            # Until the transaction ends, no other transaction can adopt an order with this id.
            await resolving.lock_order(connection, body.ref)
            holders = await _find_holders(services, connection, access, orders, body.ref)
        if body.action == "give_up":
            await _write_settlement(services, connection, access, orders, body)
        else:
            # `submitting` checks and charges the tenant's limits, as for a new job. Its argument `queues` is empty,
            # because `add_queues_of` adds the queues in which the job then waits.
            async with services.admission.submitting(connection, access.acting_caller.payer, {}) as charge:
                step = await _write_settlement(services, connection, access, orders, body, holders)
                effects = await _adopt_or_repeat(services, connection, access, orders, step, body)
                await services.admission.add_queues_of(connection, charge, access.id)
            limit_headers = charge.fields
        await record(
            connection, access, "job.settled", settlement=body.action, ref=body.ref, reason=body.reason or None
        )
    if effects is not None:
        await publish_run_effects(services, effects)
    return limit_headers


async def _find_holders(
    services: Services, connection: Connection, access: JobAccess, orders: UnknownOrders, ref: str
) -> Sequence[Mapping[str, Any]]:
    """The parameters of the other jobs whose step got the order as the provider's answer. The search may read thousands
    of rows, and other submissions wait for the locks of the rates. So call this before the transaction locks the job
    and the rates. Raises Invalid if the order cannot be adopted.
    """
    if orders.holders is None or not orders.is_of_installation(access.row["params"]):
        return ()
    step = await resolving.find(connection, access.id, access.acting_caller.tenant_id, orders.step, orders.intent)
    if step is None:  # `_write_settlement` raises Conflict
        return ()
    return await orders.holders(connection, access.id, _system_of_adopted_order(services, access, orders, step), ref)


async def _write_settlement(
    services: Services,
    connection: Connection,
    access: JobAccess,
    orders: UnknownOrders,
    body: SettleRequest,
    holders: Sequence[Mapping[str, Any]] = (),
) -> Unresolved:
    """Lock the job, and write the settlement. Returns the step whose order is settled. `holders`: the result of
    `_find_holders`.

    Raises Conflict if the job has no order to settle, if somebody has settled its order already, or if another job has
    the order. Raises Invalid if the order cannot be adopted.
    """
    caller = access.acting_caller
    step = await resolving.lock(connection, access.id, caller.tenant_id, orders.step, orders.intent)
    if step is not None:
        system = _system_of_adopted_order(services, access, orders, step) if body.action == "adopt" else None
        if await resolving.write(
            connection, access.id, caller.tenant_id, step, body.action, caller.client_id, system=system, ref=body.ref
        ):
            await _refuse_order_of_other_job(connection, access, orders, system, body.ref, holders)
            return step
    # The job has no order to settle, or somebody has settled its order. In the second case the error names the
    # decision.
    settlement = await resolving.latest(connection, access.id, caller.tenant_id)
    if settlement is None:
        raise _nothing_to_settle(access)
    decision = _DECISIONS[settlement["action"]].format(ref=settlement["ref"])
    actor, settled_at = settlement["actor"], to_the_second(settlement["at"])
    raise Conflict("already_settled", f"{actor} {decision} at {settled_at}.")


async def _refuse_order_of_other_job(
    connection: Connection,
    access: JobAccess,
    orders: UnknownOrders,
    system: str | None,
    ref: str | None,
    holders: Sequence[Mapping[str, Any]],
) -> None:
    """Raises Conflict if another job, of any tenant, has the order. A job has an order if it has adopted the order, or
    if its step got the order as the provider's answer. Only jobs that ordered with the installation's account count.
    Jobs with a tenant's own account do not, because orders of two accounts may have the same id.
    """
    if system is None or ref is None or not orders.is_of_installation(access.row["params"]):
        return
    others = await resolving.other_adopters(connection, access.acting_caller.tenant_id, system, ref)
    if any(orders.is_of_installation(params) for params in (*others, *holders)):
        raise Conflict("order_adopted", "Another job has this order.")


def _system_of_adopted_order(services: Services, access: JobAccess, orders: UnknownOrders, step: Unresolved) -> str:
    """The system that got the order, such as a provider. Raises Invalid if the platform cannot ask this system for an
    order.

    The job must have an order to settle, because other jobs of the kind may lack the parameters that this function
    needs. An example of such a job is a withdrawal, which cancels an order.
    """
    if not orders.adoptable(services.opened.get(access.kind.name), access.row["params"]):
        raise Invalid("order_not_adoptable", "The provider cannot be asked for an order by its id.")
    # `note`: what the step wrote down before it sent the order.
    return orders.sent(access.row["params"], step.note, access.id).system


def _nothing_to_settle(access: JobAccess) -> Conflict:
    return Conflict(
        "resource_invalid_state", f"The job is {access.row['status']}: it has no order whose outcome is unknown."
    )


async def _adopt_or_repeat(
    services: Services,
    connection: Connection,
    access: JobAccess,
    orders: UnknownOrders,
    step: Unresolved,
    body: SettleRequest,
) -> CreatedRun:
    """Let the failed job go on. If a person adopts the order, this order becomes the result of the job's step.
    Otherwise the step orders again. A cancelled or expired job does not go on, so its adopted order is withdrawn.
    Raises Conflict if the job cannot go on.
    """
    if step.job_status is not JobState.FAILED:
        return await _withdraw_adopted(services, connection, access, orders, step, body)
    if body.action == "adopt":
        assert body.ref is not None
        value = orders.adopted(body.ref, step.note)
        tenant_id, client_id = access.acting_caller.tenant_id, access.acting_caller.client_id
        if not await resolve(connection, access.id, tenant_id, orders.step, value, client_id):
            raise _cannot_go_on(step)
    else:
        await resolving.forget_note(connection, step)  # without the note, the step orders again
    effects = await revive(services.actions, connection, access.target, None)  # None: only a run has a template
    if effects is None:  # the error rolls back the settlement
        raise _nothing_to_settle(access)
    return effects


async def _withdraw_adopted(
    services: Services,
    connection: Connection,
    access: JobAccess,
    orders: UnknownOrders,
    step: Unresolved,
    body: SettleRequest,
) -> CreatedRun:
    """Record the adopted order of a cancelled or expired job. Then let the kind withdraw this order at the provider.
    (If the order's id is known when a job is cancelled or expires, the kind withdraws the order then, without a
    person.) Raises Conflict if the job cannot adopt the order, or cannot adopt it now.
    """
    after_adoption = access.kind.operations.after_adoption
    if body.ref is None or after_adoption is None:
        raise _cannot_go_on(step)
    await resolving.record(connection, step, orders.adopted(body.ref, step.note))
    hints = await after_adoption(connection, services.settings, access.id, access.acting_caller.tenant_id)
    return CreatedRun(access.id, hints, ())


def _cannot_go_on(step: Unresolved) -> Conflict:
    return Conflict("resource_invalid_state", f"The job is {step.job_status}: it cannot go on.")
