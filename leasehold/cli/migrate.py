"""`leasehold migrate`: the schema, and what the role that runs the platform may do with it."""

from __future__ import annotations

from leasehold.db.database import connect, migrate
from leasehold.db.roles import grant
from leasehold.settings import Settings


async def upgrade(settings: Settings, revision: str) -> None:
    """Raises Invalid when `database_app_role` names no role, or one that nothing is kept from."""
    await migrate(settings.database_url.get_secret_value(), revision)
    if settings.database_app_role is None:
        return
    connection = await connect(settings, "migrate")
    try:
        await grant(connection, settings.database_app_role)
    finally:
        await connection.close()
