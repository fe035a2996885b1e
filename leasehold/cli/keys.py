"""Making, listing and ending keys from the command line: API keys, and keys that sign packages."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from leasehold.db.database import Connection, connect
from leasehold.limits.bounds import make_room
from leasehold.security.credentials import NewKey, create_key, expire_key, list_keys, revoke_key, rotate_key
from leasehold.settings import Settings


def make_signing_key() -> dict[str, str]:
    """A new pair in base64; nothing of it is kept."""
    key = Ed25519PrivateKey.generate()
    pair = {"private": key.private_bytes_raw(), "public": key.public_key().public_bytes_raw()}
    return {name: base64.b64encode(raw).decode() for name, raw in pair.items()}


@asynccontextmanager
async def _database(settings: Settings) -> AsyncIterator[Connection]:
    connection = await connect(settings, "keys")
    try:
        yield connection
    finally:
        await connection.close()


async def create_one(
    settings: Settings, tenant: str, client: str, scopes: Sequence[str], lives: timedelta | None = None
) -> NewKey:
    """A new key, whose text is not kept anywhere. Raises Invalid, and Conflict `too_many_keys`."""
    ends = None if lives is None else datetime.now(UTC) + lives
    async with _database(settings) as connection, connection.transaction():
        await make_room(connection, "api_key", tenant, settings.keys_per_tenant)
        return await create_key(connection, tenant_id=tenant, client_id=client, scopes=scopes, expires_at=ends)


async def list_some(settings: Settings, tenant: str | None, *, ended: bool) -> list[dict[str, Any]]:
    async with _database(settings) as connection:
        return await list_keys(connection, tenant, ended=ended)


async def rotate_one(settings: Settings, prefix: str, overlap: timedelta) -> NewKey:
    """The key that takes the place of `prefix`. Raises NotFound when no key that works has the prefix."""
    async with _database(settings) as connection:
        return await rotate_key(connection, prefix, overlap=overlap)


async def expire_one(settings: Settings, prefix: str, lives: timedelta) -> datetime:
    """When the key ends now: never later than before. Raises NotFound when no key that works has the prefix."""
    async with _database(settings) as connection:
        return await expire_key(connection, prefix, lives)


async def revoke_one(settings: Settings, prefix: str) -> None:
    """Raises NotFound when no key has the prefix."""
    async with _database(settings) as connection:
        await revoke_key(connection, prefix)
