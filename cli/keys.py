"""Making and ending API keys from the command line."""

from __future__ import annotations

from collections.abc import Sequence

from leasehold.credentials import create_key, revoke_key
from leasehold.database import connect
from leasehold.settings import Settings


async def create_one(settings: Settings, tenant: str, client: str, scopes: Sequence[str]) -> str:
    """The new key's text, which is not kept anywhere."""
    connection = await connect(settings, "keys")
    try:
        return (await create_key(connection, tenant_id=tenant, client_id=client, scopes=scopes)).text
    finally:
        await connection.close()


async def revoke_one(settings: Settings, prefix: str) -> None:
    """Raises NotFound when no key has the prefix."""
    connection = await connect(settings, "keys")
    try:
        await revoke_key(connection, prefix)
    finally:
        await connection.close()
