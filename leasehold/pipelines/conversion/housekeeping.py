"""What the leading worker does for conversions: what promotions left behind, and that a forgotten one was there."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from leasehold.db.database import Connection
from leasehold.kinds.housekeeping import HousekeepingContext, KindHousekeeping, Tidying, Turn
from leasehold.pipelines.conversion.promotion.copying import take_back_dead
from leasehold.pipelines.conversion.rows import forget_expired
from leasehold.transitions.sweeps import EXPIRED


def housekeeping(context: HousekeepingContext) -> KindHousekeeping:
    """The hook of the kind."""

    async def promotions() -> None:
        """What calls that died have left at the target of promotions."""
        await take_back_dead(context.settings, context.connections, context.store)

    return KindHousekeeping(
        duties=[Turn("promotions", promotions), Tidying("forget_expired_conversions", forget_expired)],
        before_jobs_go=remember_with_jobs,
    )


async def remember_with_jobs(connection: Connection, job_ids: Sequence[UUID]) -> None:
    """That a conversion was there is remembered: whoever asks for it is told that it has expired."""
    await connection.execute(
        "INSERT INTO expired_conversion (job_id, tenant_id)"
        f" SELECT job_id, tenant_id FROM conversion WHERE {EXPIRED} ON CONFLICT DO NOTHING",
        list(job_ids),
    )
