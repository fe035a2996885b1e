"""Making and ending keys from the command line: API keys, and keys that sign packages."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from leasehold.credentials import create_key, revoke_key
from leasehold.database import connect
from leasehold.settings import Settings


def make_signing_key() -> dict[str, str]:
    """A new pair in base64; nothing of it is kept."""
    key = Ed25519PrivateKey.generate()
    pair = {"private": key.private_bytes_raw(), "public": key.public_key().public_bytes_raw()}
    return {name: base64.b64encode(raw).decode() for name, raw in pair.items()}


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
