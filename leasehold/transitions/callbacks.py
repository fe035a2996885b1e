"""Reads and rotates the secrets that sign a tenant's callbacks (messages about a job to the URL that its client named).
Each tenant has one row with its secrets, the newest first. Other modules encrypt (seal) and decrypt the secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from leasehold.db.database import Connection

#: The most secrets that a tenant has: the newest and, until the next rotation, the previous secret.
_SECRETS = 2

# $1 the tenant, $2 the new secret, sealed. `created_at`: when the newest secret was made.
_ROTATE = f"""
-- callback_rotate
INSERT INTO callback_secret AS old (tenant_id, secrets) VALUES ($1, ARRAY[$2::bytea])
ON CONFLICT (tenant_id) DO UPDATE
SET secrets = (array_prepend($2::bytea, old.secrets))[1:{_SECRETS}], created_at = clock_timestamp()
RETURNING secrets, created_at
"""


async def secrets(connection: Connection, tenant_id: str, make_sealed: Callable[[], bytes]) -> Sequence[bytes]:
    """The tenant's sealed secrets. If the tenant has no secret, write the first secret, which `make_sealed` returns."""
    row = await find(connection, tenant_id)
    if row is None:
        await connection.execute(
            "INSERT INTO callback_secret (tenant_id, secrets) VALUES ($1, ARRAY[$2::bytea])"
            " ON CONFLICT (tenant_id) DO NOTHING",
            tenant_id,
            make_sealed(),
        )
        row = await find(connection, tenant_id)
    assert row is not None
    sealed_secrets: Sequence[bytes] = row["secrets"]
    return sealed_secrets


async def find(connection: Connection, tenant_id: str) -> Any:
    """The tenant's row, or None."""
    return await connection.fetchrow("SELECT secrets, created_at FROM callback_secret WHERE tenant_id = $1", tenant_id)


async def rotate(connection: Connection, tenant_id: str, sealed: bytes) -> Any:
    """Add a secret. Returns the tenant's row."""
    return await connection.fetchrow(_ROTATE, tenant_id, sealed)
