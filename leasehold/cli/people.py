"""Reads and changes people in the database, for `leasehold people`. The audit names the machine's user as the actor."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from leasehold.cli.running import command_actor
from leasehold.db.database import connected
from leasehold.limits import people
from leasehold.limits.people import Change
from leasehold.security.roles import role_and_scopes
from leasehold.settings import Settings

_FIELDS = ("id", "tenant_id", "login", "name", "set_role", "created_at", "seen_at", "disabled_at")


async def list_some(settings: Settings, tenant: str | None, text: str | None, limit: int) -> list[dict[str, Any]]:
    """People of the tenant (None: of all tenants) whose login or name contains `text`, the latest sign-ins first."""
    async with connected(settings, "people") as connection:
        rows = await people.search(connection, tenant, text, limit)
    return [{name: row[name] for name in _FIELDS} | {"role": role_and_scopes(row["scopes"])[0]} for row in rows]


async def change_one(settings: Settings, person_id: UUID, change: Change) -> None:
    """Change the person. Raises NotFound for an unknown id."""
    async with connected(settings, "people") as connection, connection.transaction():
        row = await people.find(connection, person_id, None)
        await people.change(connection, command_actor(), row, change)


async def end_sessions_of(settings: Settings, person_id: UUID) -> None:
    """End all sessions of the person. Raises NotFound for an unknown id."""
    async with connected(settings, "people") as connection, connection.transaction():
        row = await people.find(connection, person_id, None)
        await people.end_sessions(connection, command_actor(), row)
