"""Verifies the audit in the database, for `leasehold audit verify`."""

from __future__ import annotations

from typing import Any

from leasehold.db import audit
from leasehold.db.database import connected
from leasehold.domain.audit import BrokenRow
from leasehold.settings import Settings


async def verify_chains(settings: Settings, tenant_id: str | None) -> list[tuple[dict[str, Any], BrokenRow | None]]:
    """The head of each chain (the number and hash of its last row), with the chain's first broken row (None: no row is
    broken). `tenant_id`: check only the chain of this tenant; None: check all chains.
    """
    async with connected(settings, "audit") as connection:
        heads = await audit.heads(connection, tenant_id)
        return [(head, await audit.verify(connection, head)) for head in heads]
