"""Makes, rotates, expires and revokes API keys. Each action writes a row of the audit, in the same transaction.

The API and `leasehold keys` call these functions. `tenant_id`: only keys of this tenant are found; None: keys of any
tenant are found. If no key is found, the functions raise NotFound.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from leasehold.db import audit
from leasehold.db.audit import Target
from leasehold.db.clock import database_time
from leasehold.db.database import Connection
from leasehold.db.job_reads import Row
from leasehold.domain.audit import Actor
from leasehold.domain.errors import NotFound
from leasehold.limits.bounds import check_room
from leasehold.security import credentials
from leasehold.security.credentials import NewKey

# $1 the prefix, $2 the tenant (NULL: any tenant).
_FIND = """
-- key_find
SELECT prefix, tenant_id, client_id, scopes FROM api_key
WHERE prefix = $1 AND ($2::text IS NULL OR tenant_id = $2)
FOR UPDATE
"""


async def make(
    connection: Connection,
    actor: Actor,
    at_most: int,
    *,
    tenant_id: str,
    client_id: str,
    scopes: Sequence[str],
    lifetime: timedelta | None = None,
    cell: str = "",
    seed: bytes | None = None,
) -> NewKey:
    """Create a key. Its text is stored nowhere. `at_most`: how many valid keys a tenant may have. `lifetime`: how long
    the key is valid from now, by the database's clock; None: the key never expires. `cell`: the name of the cell that
    makes the key; empty: there are no cells. (A cell is one of several installations, each with tenants of its own.)
    `seed`: a secret from which the key is made, so that a repeated request makes the same key; None: the key is random.

    Raises Invalid and UniqueViolationError as `create_key` does, and Conflict `too_many_keys`.
    """
    async with connection.transaction():
        await check_room(connection, "api_key", tenant_id, at_most)
        expires_at = None if lifetime is None else await database_time(connection) + lifetime
        key = await credentials.create_key(
            connection, tenant_id=tenant_id, client_id=client_id, scopes=scopes, expires_at=expires_at, cell=cell,
            seed=seed,
        )  # fmt: skip
        target = Target("key", key.prefix, tenant_id)
        await audit.record(
            connection,
            actor,
            "key.created",
            target,
            client=client_id,
            scopes=sorted(set(scopes)),
            expires_at=expires_at,
        )
    return key


async def find(connection: Connection, prefix: str, tenant_id: str | None) -> Row:
    """The tenant, the client and the scopes of the key. Locks the key's row until the caller's transaction ends. Raises
    NotFound.
    """
    row = await connection.fetchrow(_FIND, prefix, tenant_id)
    if row is None:
        raise NotFound("key_not_found", "No key has this prefix.")
    return row


async def rotate(
    connection: Connection,
    actor: Actor,
    prefix: str,
    overlap: timedelta,
    at_most: int,
    tenant_id: str | None = None,
    *,
    cell: str = "",
    seed: bytes | None = None,
) -> NewKey:
    """Create a successor of the key. The old key expires after `overlap` (see `credentials.rotate_key`). `at_most`: how
    many valid keys a tenant may have. During overlaps a tenant may have twice this number, because it may rotate all
    its keys at once. `cell` and `seed`: as in `make`. Raises NotFound, and Conflict `too_many_keys`.
    """
    async with connection.transaction():
        row = await find(connection, prefix, tenant_id)
        await check_room(connection, "api_key", row["tenant_id"], 2 * at_most)
        key = await credentials.rotate_key(connection, prefix, overlap=overlap, cell=cell, seed=seed)
        target = Target("key", prefix, row["tenant_id"])
        seconds = overlap.total_seconds()
        await audit.record(connection, actor, "key.rotated", target, new_prefix=key.prefix, overlap_seconds=seconds)
    return key


async def expire(
    connection: Connection, actor: Actor, prefix: str, lifetime: timedelta, tenant_id: str | None = None
) -> datetime:
    """Make the key expire after `lifetime`, unless it expires earlier. Returns the time at which it expires. Raises
    NotFound.
    """
    async with connection.transaction():
        row = await find(connection, prefix, tenant_id)
        ends_at = await credentials.expire_key(connection, prefix, lifetime)
        await audit.record(connection, actor, "key.expired", Target("key", prefix, row["tenant_id"]), ends_at=ends_at)
    return ends_at


async def revoke(connection: Connection, actor: Actor, prefix: str, tenant_id: str | None = None) -> None:
    """Revoke the key for good. A repeated call is safe. Raises NotFound."""
    async with connection.transaction():
        row = await find(connection, prefix, tenant_id)
        await credentials.revoke_key(connection, prefix)
        await audit.record(connection, actor, "key.revoked", Target("key", prefix, row["tenant_id"]))
