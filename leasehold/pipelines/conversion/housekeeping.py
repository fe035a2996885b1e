"""The duties of the leading worker for conversions. To promote a conversion is to copy its artifacts to a bucket or
file service. The worker undoes promotions whose API process died. It also remembers deleted conversions for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from leasehold.db.database import Connection
from leasehold.kinds.housekeeping import HousekeepingContext, KindHousekeeping, Tidying, Turn
from leasehold.pipelines.conversion.pipeline import BACKUPS
from leasehold.pipelines.conversion.promotion.copying import undo_dead
from leasehold.pipelines.conversion.rows import forget_expired
from leasehold.transitions.sweeps import EXPIRED


def housekeeping(context: HousekeepingContext) -> KindHousekeeping:
    """The part of housekeeping (loops of the leading worker) for the kind of work `conversion`. Called once."""

    async def promotions() -> None:
        """Undo what promote requests copied to the target before their API process died."""
        await undo_dead(context.settings, context.connections, context.store)

    return KindHousekeeping(
        duties=[Turn("promotions", promotions), Tidying("forget_expired_conversions", forget_expired)],
        before_jobs_go=remember_with_jobs,
        prefixes=(BACKUPS,),
    )


async def remember_with_jobs(connection: Connection, job_ids: Sequence[UUID]) -> None:
    """Remember conversions that are about to be deleted with their jobs, so that the API answers `expired` for them
    instead of `job_not_found`.
    """
    await connection.execute(
        "INSERT INTO expired_conversion (job_id, tenant_id)"
        f" SELECT job_id, tenant_id FROM conversion WHERE {EXPIRED} ON CONFLICT DO NOTHING",
        list(job_ids),
    )
