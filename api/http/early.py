"""Refuses a submission that is over the caller's limits, before the API does expensive work for it. Such work is to
read a large body, to check a payload, or to use the store.
"""

from __future__ import annotations

from collections.abc import Mapping

from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services
from leasehold.db.idempotency import is_answered
from leasehold.limits.admission import Charge


async def refuse_early(
    services: Services,
    caller: Caller,
    queues: Mapping[str, int],
    idempotency_key: str | None = None,
    charged_as: Charge = "submissions",
) -> None:
    """Raise the error that the submission would raise now. Exception: a tenant that has exactly reached its bound on
    unfinished jobs passes (see `Admission.check`). This function charges nothing. `queues`: how many tasks the
    submission adds to each queue. `charged_as`: the rate that counts the submission.

    A request that repeats an answered request (with the same `idempotency_key`) is not refused, because it creates
    nothing.
    """
    async with services.pool.acquire() as connection:
        if idempotency_key is None or not await is_answered(connection, caller.tenant_id, idempotency_key):
            await services.admission.check(connection, caller.payer, queues, charged_as)
