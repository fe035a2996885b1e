"""The duty of the leading worker for generations: it deletes expired source images."""

from __future__ import annotations

from leasehold.kinds.housekeeping import Forgetting, HousekeepingContext, KindHousekeeping
from leasehold.pipelines.generation.rows import SOURCES, expired_sources, forget_sources


def housekeeping(context: HousekeepingContext) -> KindHousekeeping:
    """The part of housekeeping (loops of the leading worker) for the kind of work `generation`. Called once."""
    return KindHousekeeping(
        duties=[
            Forgetting(
                SOURCES,
                find=expired_sources,
                key=lambda key: key,
                delete=context.store.delete,
                forget=forget_sources,
            )
        ],
        prefixes=("sources/",),
    )
