"""Verifies the audit in the database, for `leasehold audit verify`."""

from __future__ import annotations

from typing import Any

from leasehold.cli.audit import finding
from leasehold.db import audit
from leasehold.db.database import connected
from leasehold.settings import Settings


async def verified(settings: Settings, tenant_id: str | None) -> list[dict[str, Any]]:
    """Each chain, or the tenant's alone, with its first broken row."""
    async with connected(settings, "audit") as connection:
        heads = await audit.heads(connection, tenant_id)
        return [finding(head, await audit.verify(connection, head)) for head in heads]
