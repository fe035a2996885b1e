"""The housekeeping of conversions. One worker, which the workers have elected, carries out the duties: it undoes
promotions whose API process died, and forgets deleted conversions after a while. To promote a conversion is to copy its
artifacts to a bucket or a file service.
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
    """The duties and hooks of the kind of work `conversion`. A worker calls this function once."""

    async def promotions() -> None:
        """Undo what promote requests copied to the target before their API process died."""
        await undo_dead(context.settings, context.connections, context.store)

    # Turn: calls its function once a minute. Tidying: runs its statement once a minute, or sooner if more rows are due.
    # before_jobs_go: is called before jobs are deleted, in the same transaction. prefixes: where this kind writes in
    # the store (the backups of objects that promotions replace). The platform ends the abandoned multipart uploads
    # there.
    return KindHousekeeping(
        duties=[Turn("promotions", promotions), Tidying("forget_expired_conversions", forget_expired)],
        before_jobs_go=remember_with_jobs,
        prefixes=(BACKUPS,),
    )


async def remember_with_jobs(connection: Connection, job_ids: Sequence[UUID]) -> None:
    """Remember the conversions that are about to be deleted with their jobs. For these conversions the API then answers
    `expired` and not `job_not_found`. The SQL condition EXPIRED takes the ids of the jobs as `$1`. It leaves out jobs
    that are not past their retention, because the transaction does not delete them.
    """
    await connection.execute(
        "INSERT INTO expired_conversion (job_id, tenant_id)"
        f" SELECT job_id, tenant_id FROM conversion WHERE {EXPIRED} ON CONFLICT DO NOTHING",
        list(job_ids),
    )
