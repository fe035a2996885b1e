"""Declares the maintenance of generations, which the leader (the worker that is elected for maintenance) does. The
leader deletes expired source images. When the deadline of a generation has passed, the leader submits a withdrawal (a
job that cancels the order at the provider). The withdrawal needs the order. So before the leader deletes the rows of a
generation, it copies the order into the unfinished withdrawal.
"""

from __future__ import annotations

from functools import partial

from leasehold.kinds.housekeeping import Forgetting, HousekeepingContext, KindHousekeeping
from leasehold.pipelines.generation.operations import withdraw_expired
from leasehold.pipelines.generation.pipeline import generation, withdrawal
from leasehold.pipelines.generation.rows import SOURCES, condemn_source, expired_sources, forget_sources
from leasehold.transitions.withdrawals import Withdrawals, keep_orders

#: How a withdrawal keeps the order of a deleted generation. `content`: the parameters that are not copied into the
#: withdrawal.
_WITHDRAWALS = Withdrawals(
    generation.name, "submit", withdrawal.name, content=("prompt", "negative_prompt", "images", "extra")
)


def housekeeping(context: HousekeepingContext) -> KindHousekeeping:
    """The part of housekeeping (maintenance loops of the leader) for the kind of work `generation`. `Forgetting` is a
    loop that deletes objects, and then their rows.
    """

    async def delete(key: str) -> None:
        # A client may upload an image that is stored already. Such an upload does not write the object again. If it
        # came just before the deletion, the client would lose its image. So `condemn_source` first marks the row, and
        # from then on uploads of this image are refused.
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
