"""Lists, makes, rotates, expires and revokes API keys in the database, for `leasehold keys`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from leasehold.cli.running import command_actor
from leasehold.db.database import connected
from leasehold.limits import keys
from leasehold.security.credentials import NewKey, list_keys
from leasehold.settings import Settings


async def create_one(
    settings: Settings, tenant: str, client: str, scopes: Sequence[str], lifetime: timedelta | None = None
) -> NewKey:
    """Create an API key. The key's text is stored nowhere. If the installation is a cell (one of several installations
    that divide the tenants among them), the text contains the name of the cell. Raises Invalid for invalid values, and
    Conflict `too_many_keys`.
    """
    async with connected(settings, "keys") as connection:
        return await keys.make(
            connection, command_actor(), settings.keys_per_tenant,
            tenant_id=tenant, client_id=client, scopes=scopes, lifetime=lifetime, cell=settings.cell,
        )  # fmt: skip


async def list_some(settings: Settings, tenant: str | None, *, ended: bool) -> list[dict[str, Any]]:
    """The keys of `tenant` (None: of all tenants). `ended`: list also expired and revoked keys."""
    async with connected(settings, "keys") as connection:
        return await list_keys(connection, tenant, ended=ended)


async def rotate_one(settings: Settings, prefix: str, overlap: timedelta) -> NewKey:
    """Create the key that replaces the key with the prefix `prefix`. The old key still works for `overlap`. Raises
    NotFound when no usable key has the prefix, and Conflict `too_many_keys`.
    """
    async with connected(settings, "keys") as connection:
        at_most, cell = settings.keys_per_tenant, settings.cell
        return await keys.rotate(connection, command_actor(), prefix, overlap, at_most, cell=cell)


async def expire_one(settings: Settings, prefix: str, lifetime: timedelta) -> datetime:
    """Let the key expire after `lifetime`. A key that would expire earlier keeps its expiry. Returns when the key
    expires. Raises NotFound for an unknown, revoked or expired key.
    """
    async with connected(settings, "keys") as connection:
        return await keys.expire(connection, command_actor(), prefix, lifetime)


async def revoke_one(settings: Settings, prefix: str) -> None:
    """Revoke the key. Raises NotFound when no key has the prefix."""
    async with connected(settings, "keys") as connection:
        await keys.revoke(connection, command_actor(), prefix)
