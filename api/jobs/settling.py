"""Settles a failed job whose order has an unknown outcome: adopts the order, orders again, or gives it up.

Of two people who settle the same order one wins, and the other sees what happened.
"""

from __future__ import annotations

from typing import Any

from leasehold.actions.retrying import revive
from leasehold.api.http.responses import publish_and_admit_run
from leasehold.api.jobs.access import Found
from leasehold.api.jobs.ending import record
from leasehold.api.jobs.schemas import SettleRequest
from leasehold.api.process.services import Services
from leasehold.db.database import Connection
from leasehold.domain.errors import Conflict, Invalid
from leasehold.kinds.operations import Settling
from leasehold.limits.admission import queues_waited_in
from leasehold.transitions.jobs import resolve, resolving
from leasehold.transitions.jobs.resolving import Unresolved
from leasehold.transitions.runs import CreatedRun

_DEEDS = {"adopt": "adopted the order {ref}", "again": "ordered again", "give_up": "gave the order up"}


async def settle(services: Services, found: Found, body: SettleRequest) -> dict[str, str]:
    """Settle the job, and return the RateLimit fields. Raises the problems of `settleJob`."""
    settling = found.kind.operations.settling
    if settling is None:
        raise _not_unsettled(found)
    effects: CreatedRun | None = None
    fields: dict[str, str] = {}
    async with services.pool.acquire() as connection, connection.transaction():
        step = await _settled_step(services, connection, found, settling, body)
        details: dict[str, Any] = {"settlement": body.action, "ref": body.ref, "reason": body.reason or None}
        if body.action == "give_up":
            await record(connection, found, "job.settled", **details)
        else:
            # Its limits may hold the job: then none of its tasks waits in the queue yet, and the depth is read now.
            queues = {row["queue"]: 1 for row in found.row["steps"] if row["id"] == settling.step}
            async with services.admission.submitting(connection, found.caller.payer, queues) as paid:
                effects = await _go_on(services, connection, found, settling, step, body)
                paid.queues |= await queues_waited_in(connection, found.id)
            fields = paid.fields
            await record(connection, found, "job.settled", **details)
    if effects is not None:
        await publish_and_admit_run(services, effects)
    return fields


async def _settled_step(
    services: Services, connection: Connection, found: Found, settling: Settling, body: SettleRequest
) -> Unresolved:
    """Lock the job and keep the settlement. Raises Conflict if there is nothing, or nothing any more, to settle, and
    Invalid if the order cannot be adopted.
    """
    caller = found.caller
    step = await resolving.lock(connection, found.id, caller.tenant_id, settling.step, settling.codes)
    if step is not None:
        system = None
        if body.action == "adopt":
            # Only now: a job that has no order, such as a withdrawal, has no parameters of one.
            if not settling.adoptable(services.opened.get(found.kind.name), found.row["params"]):
                raise Invalid("order_not_adoptable", "The provider cannot be asked for an order by its id.")
            system = settling.sent(found.row["params"], step.note, found.id).system
        if await resolving.write(
            connection, found.id, caller.tenant_id, step, body.action, caller.client_id, system=system, ref=body.ref
        ):
            return step
    settlement = await resolving.latest(connection, found.id, caller.tenant_id)
    if settlement is None:
        raise _not_unsettled(found)
    deed = _DEEDS[settlement["action"]].format(ref=settlement["ref"])
    raise Conflict("already_settled", f"{settlement['actor']} {deed} at {settlement['at'].isoformat()}.")


def _not_unsettled(found: Found) -> Conflict:
    return Conflict(
        "resource_invalid_state", f"The job is {found.row['status']}: it has no order whose outcome is unknown."
    )


async def _go_on(
    services: Services,
    connection: Connection,
    found: Found,
    settling: Settling,
    step: Unresolved,
    body: SettleRequest,
) -> CreatedRun | None:
    if body.action == "adopt":
        assert body.ref is not None
        value = settling.adopted(body.ref, step.note)
        await resolve(connection, found.id, found.caller.tenant_id, settling.step, value, found.caller.client_id)
    else:
        await resolving.forget_note(connection, step)
    return await revive(services.actions, connection, found.target, None)
