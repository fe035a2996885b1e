"""The duties of the leading worker for generations: it deletes expired source images, and keeps the orders that must
still be withdrawn when their generations are deleted. When a generation expires, it withdraws the order.
"""

from __future__ import annotations

from functools import partial

from leasehold.kinds.housekeeping import Forgetting, HousekeepingContext, KindHousekeeping
from leasehold.pipelines.generation.operations import withdraw_expired
from leasehold.pipelines.generation.pipeline import generation, withdrawal
from leasehold.pipelines.generation.rows import SOURCES, condemn_source, expired_sources, forget_sources
from leasehold.transitions.withdrawals import Withdrawals, keep_orders

#: What withdrawals keep of the orders of deleted generations.
_WITHDRAWALS = Withdrawals(
    generation.name, "submit", withdrawal.name, content=("prompt", "negative_prompt", "images", "extra")
)


def housekeeping(context: HousekeepingContext) -> KindHousekeeping:
    """The part of housekeeping (loops of the leading worker) for the kind of work `generation`. Called once."""

    async def delete(key: str) -> None:
        # An upload of the same image finds the object, and does not write it again. So an upload must not come between
        # the look at the row and the deletion.
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
