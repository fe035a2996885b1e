"""The work of `leasehold keys` and `leasehold signing-key`: API keys in the database, and keys that sign packages."""

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
    """A new Ed25519 key pair, `private` and `public`, in base64. It is stored nowhere."""
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
    """Create an API key. Its text is stored nowhere. Raises Invalid, and Conflict `too_many_keys`."""
    ends = None if lives is None else datetime.now(UTC) + lives
    async with _database(settings) as connection, connection.transaction():
        await make_room(connection, "api_key", tenant, settings.keys_per_tenant)
        return await create_key(connection, tenant_id=tenant, client_id=client, scopes=scopes, expires_at=ends)


async def list_some(settings: Settings, tenant: str | None, *, ended: bool) -> list[dict[str, Any]]:
    async with _database(settings) as connection:
        return await list_keys(connection, tenant, ended=ended)


async def rotate_one(settings: Settings, prefix: str, overlap: timedelta) -> NewKey:
    """Create the key that replaces the key `prefix`. Raises NotFound when no usable key has the prefix."""
    async with _database(settings) as connection:
        return await rotate_key(connection, prefix, overlap=overlap)


async def expire_one(settings: Settings, prefix: str, lives: timedelta) -> datetime:
    """Let the key end after `lives`, never later than before. Return the end. Raises NotFound."""
    async with _database(settings) as connection:
        return await expire_key(connection, prefix, lives)


async def revoke_one(settings: Settings, prefix: str) -> None:
    """Revoke the key. Raises NotFound when no key has the prefix."""
    async with _database(settings) as connection:
        await revoke_key(connection, prefix)
