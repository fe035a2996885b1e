"""Proofs are kept for a while only; of an order that goes with its job the copies are added up first."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from leasehold.db.database import Connection
from leasehold.kinds.housekeeping import Forgetting, HousekeepingContext, KindHousekeeping
from leasehold.transitions.quarantine import not_in
from leasehold.transitions.sweeps import EXPIRED

PROOFS = "expired_proofs"


def housekeeping(context: HousekeepingContext) -> KindHousekeeping:
    return KindHousekeeping(
        duties=[Forgetting(PROOFS, expired_proofs, lambda key: key, context.store.delete, forget_proofs)],
        before_jobs_go=add_up,
        prefixes=("proofs/",),
    )


async def expired_proofs(connection: Connection) -> Sequence[str]:
    rows = await connection.fetch(
        "SELECT key FROM print_proof WHERE expires_at < statement_timestamp()"
        f" AND {not_in(PROOFS, 'key', 'text')} ORDER BY expires_at LIMIT 100"
    )
    return [row["key"] for row in rows]


async def forget_proofs(connection: Connection, keys: Sequence[str]) -> None:
    await connection.execute("DELETE FROM print_proof WHERE key = ANY($1::text[])", list(keys))


async def add_up(connection: Connection, job_ids: Sequence[UUID]) -> None:
    await connection.execute(
        f"INSERT INTO print_total (tenant_id, copies) SELECT tenant_id, sum(copies) FROM print_order WHERE {EXPIRED}"
        " GROUP BY tenant_id ON CONFLICT (tenant_id) DO UPDATE SET copies = print_total.copies + excluded.copies",
        list(job_ids),
    )
