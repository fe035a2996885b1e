"""The duties of the leading worker (the worker that is elected for maintenance) for generations. It deletes expired
source images. When a generation expires, it withdraws the order at the provider. When a generation is deleted before
its order is withdrawn, it copies the order into the withdrawal (the job that cancels the order).
"""

from __future__ import annotations

from functools import partial

from leasehold.kinds.housekeeping import Forgetting, HousekeepingContext, KindHousekeeping
from leasehold.pipelines.generation.operations import withdraw_expired
from leasehold.pipelines.generation.pipeline import generation, withdrawal
from leasehold.pipelines.generation.rows import SOURCES, condemn_source, expired_sources, forget_sources
from leasehold.transitions.withdrawals import Withdrawals, keep_orders

#: How a withdrawal keeps the order of a deleted generation. `content`: the parameters that are not copied into it.
_WITHDRAWALS = Withdrawals(
    generation.name, "submit", withdrawal.name, content=("prompt", "negative_prompt", "images", "extra")
)


def housekeeping(context: HousekeepingContext) -> KindHousekeeping:
    """The part of housekeeping (loops of the leading worker) for the kind of work `generation`. Called once."""

    async def delete(key: str) -> None:
        # If the object exists already, an upload of the same image does not write it again. An upload between the check
        # of the row and the deletion would lose its object. So after `condemn_source`, uploads of the image are
        # refused.
        async with context.connections() as connection:
            is_condemned = await condemn_source(connection, key)
        if is_condemned:
            await context.store.delete(key)

    return KindHousekeeping(
        duties=[
            Forgetting(
                SOURCES,
                find=expired_sources,
                key=lambda key: key,
                delete=delete,
                forget=forget_sources,
            )
        ],
        before_jobs_go=partial(keep_orders, of=_WITHDRAWALS),
        after_expiry=partial(withdraw_expired, context.settings),
        prefixes=("sources/",),
    )
