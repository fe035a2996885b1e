"""API keys: `lh_<prefix>_<secret>`. The prefix is public and finds the row; of the secret only a hash is kept.

The secret is 256 random bits, so a plain SHA-256 is enough: there is nothing to guess that a slow hash would
protect. The whole key is shown once, by `create_key` or `rotate_key`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from leasehold.db.database import Connection
from leasehold.domain.errors import Invalid, NotFound
from leasehold.domain.ids import new_id

_KEY = re.compile(r"lh_([a-z0-9]{12})_([A-Za-z0-9_-]{43})")
_SCOPE = re.compile(r"[a-z][a-z0-9-]*:[a-z][a-z0-9-]*")
_PREFIX_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
#: Compared against when no row has the prefix, so that both answers take the same time. No secret hashes to it
#: on purpose.
_NOBODY = hashlib.sha256(b"no key has this prefix").digest()


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key at the only moment its text is known. `text` is the secret: show it once, never log it."""

    id: UUID
    prefix: str
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class PresentedKey:
    """What a caller sent, taken apart."""

    prefix: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key's row. `usable`: neither revoked nor expired when it was read.

    `quota_key`: what limits and quotas count its use by. Keys that were rotated from one another share one.
    """

    id: UUID
    prefix: str
    quota_key: str
    tenant_id: str
    client_id: str
    scopes: frozenset[str]
    usable: bool
    used_lately: bool
    secret_hash: bytes = field(repr=False)


def parse_key(text: str) -> PresentedKey | None:
    """None for anything that is not shaped like a key."""
    match = _KEY.fullmatch(text)
    return PresentedKey(match[1], match[2]) if match else None


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("ascii")).digest()


def matches(presented: PresentedKey, stored: StoredKey | None) -> bool:
    """Whether the secret is the stored one; takes the same time when there is no such key."""
    known = stored.secret_hash if stored is not None else _NOBODY
    equal = hmac.compare_digest(_hash(presented.secret), known)
    return equal and stored is not None


def _generate() -> tuple[str, str]:
    prefix = "".join(secrets.choice(_PREFIX_ALPHABET) for _ in range(12))
    return prefix, secrets.token_urlsafe(32)


INSERT = """
INSERT INTO api_key (id, prefix, secret_hash, tenant_id, client_id, scopes, expires_at, quota_key)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
"""

FIND = """
SELECT id, prefix, coalesce(quota_key, prefix) AS quota_key, tenant_id, client_id, scopes, secret_hash,
       revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp()) AS usable,
       coalesce(last_used_at > clock_timestamp() - interval '1 minute', false) AS used_lately
FROM api_key WHERE prefix = $1
"""

# Guarded, so that many processes write it once a minute and not once each.
MARK_USED = """
UPDATE api_key SET last_used_at = clock_timestamp()
WHERE id = $1 AND (last_used_at IS NULL OR last_used_at <= clock_timestamp() - interval '1 minute')
"""

# The old key lives on for the overlap, or until it would have expired anyway. The answer has the end that it had
# before: its successor's. The CTE takes the row's lock, so of two rotations at once the second sees the first's end.
RETIRE = """
WITH old AS (
    SELECT id, expires_at FROM api_key
    WHERE prefix = $1 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp())
    FOR UPDATE
)
UPDATE api_key k SET expires_at = least(coalesce(old.expires_at, 'infinity'), clock_timestamp() + $2::interval)
FROM old WHERE k.id = old.id
RETURNING k.tenant_id, k.client_id, k.scopes, old.expires_at AS ends_at, coalesce(k.quota_key, k.prefix) AS quota_key
"""

EXPIRE = """
UPDATE api_key SET expires_at = least(coalesce(expires_at, 'infinity'), clock_timestamp() + $2::interval)
WHERE prefix = $1 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp())
RETURNING expires_at
"""

LIST = """
SELECT * FROM (
    SELECT prefix, tenant_id, client_id, scopes, created_at, expires_at, revoked_at, last_used_at,
           CASE WHEN revoked_at IS NOT NULL THEN 'revoked' WHEN expires_at <= clock_timestamp() THEN 'expired'
                ELSE 'active' END AS state
    FROM api_key WHERE $1::text IS NULL OR tenant_id = $1
) AS keys
WHERE state = 'active' OR $2
ORDER BY tenant_id, client_id, created_at
"""

REVOKE = """
UPDATE api_key SET revoked_at = coalesce(revoked_at, clock_timestamp()) WHERE prefix = $1 RETURNING id
"""


async def create_key(
    connection: Connection,
    *,
    tenant_id: str,
    client_id: str,
    scopes: Sequence[str],
    expires_at: datetime | None = None,
    quota_key: str | None = None,
) -> NewKey:
    """A new key. Raises Invalid for a scope that is not of the form `area:right`, and for an empty tenant.

    `quota_key`: the key whose limits and quotas its use counts against; None: it has its own.
    """
    if not tenant_id or not client_id:
        raise Invalid("key_owner_missing", "A key needs a tenant and a client.")
    if wrong := [scope for scope in scopes if not _SCOPE.fullmatch(scope)]:
        raise Invalid("scope_malformed", f"Not scopes: {', '.join(wrong)}.")
    prefix, secret = _generate()
    key = NewKey(new_id(), prefix, f"lh_{prefix}_{secret}")
    await connection.execute(
        INSERT, key.id, prefix, _hash(secret), tenant_id, client_id, sorted(set(scopes)), expires_at, quota_key
    )
    return key


async def find_key(connection: Connection, prefix: str) -> StoredKey | None:
    row = await connection.fetchrow(FIND, prefix)
    if row is None:
        return None
    return StoredKey(
        id=row["id"],
        prefix=row["prefix"],
        quota_key=row["quota_key"],
        tenant_id=row["tenant_id"],
        client_id=row["client_id"],
        scopes=frozenset(row["scopes"]),
        usable=row["usable"],
        used_lately=row["used_lately"],
        secret_hash=row["secret_hash"],
    )


async def mark_used(connection: Connection, key_id: UUID) -> None:
    """Remember that the key is in use; written at most once a minute."""
    await connection.execute(MARK_USED, key_id)


async def rotate_key(connection: Connection, prefix: str, *, overlap: timedelta) -> NewKey:
    """A new key with the old one's owner, scopes, quotas and end; the old one stops after `overlap`.

    A key that was rotated before ends with its overlap, and so does what is rotated from it then.

    Raises NotFound when no usable key has the prefix.
    """
    async with connection.transaction():
        old = await connection.fetchrow(RETIRE, prefix, overlap)
        if old is None:
            raise NotFound("key_not_found", "No usable key has this prefix.")
        return await create_key(
            connection,
            tenant_id=old["tenant_id"],
            client_id=old["client_id"],
            scopes=old["scopes"],
            expires_at=old["ends_at"],
            quota_key=old["quota_key"],
        )


async def expire_key(connection: Connection, prefix: str, lives: timedelta) -> datetime:
    """The key ends after `lives`, or when it would have ended anyway: when that is. Raises NotFound."""
    ends: datetime | None = await connection.fetchval(EXPIRE, prefix, lives)
    if ends is None:
        raise NotFound("key_not_found", "No usable key has this prefix.")
    return ends


async def list_keys(
    connection: Connection, tenant_id: str | None = None, *, ended: bool = False
) -> list[dict[str, Any]]:
    """Keys without their secrets, with their `state`: active, expired or revoked; None: of all tenants."""
    return [dict(row) for row in await connection.fetch(LIST, tenant_id, ended)]


async def revoke_key(connection: Connection, prefix: str) -> None:
    """The key stops within `api_key_cache_seconds`, for good. Repeating it is harmless. Raises NotFound."""
    if await connection.fetchval(REVOKE, prefix) is None:
        raise NotFound("key_not_found", "No key has this prefix.")
