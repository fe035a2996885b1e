"""API keys: creating, finding, rotating, expiring and revoking them. The API and `leasehold keys` call this module.

A key is `lh_<prefix>_<secret>`, or `lh_<cell>_<prefix>_<secret>` if a cell (one of several installations that divide
the tenants among them) has made it. The prefix is public, and `find_key` finds the key's row by it. The database stores
only a hash of the secret, so the key is shown once, when it is made. SHA-256 is enough, because the secret has 256
random bits. A slow hash would only help if the secret could be guessed.
"""

from __future__ import annotations

import base64
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
from leasehold.domain.concurrency_limit import EVERYBODY
from leasehold.domain.errors import Invalid, NotFound
from leasehold.domain.ids import new_id

#: A key. The groups are the cell (None: no cell), the prefix and the secret.
_KEY = re.compile(r"lh_(?:([a-z0-9]{1,11})_)?([a-z0-9]{12})_([A-Za-z0-9_-]{43})")
#: A scope: `area:right`.
_SCOPE = re.compile(r"[a-z][a-z0-9-]*:[a-z][a-z0-9-]*")
_PREFIX_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
#: `matches` compares with this hash when no row has the prefix. So a refusal takes the same time, and does not show
#: whether the prefix exists.
_HASH_OF_NO_KEY = hashlib.sha256(b"no key has this prefix").digest()


@dataclass(frozen=True, slots=True)
class NewKey:
    """A new key. `text` is the whole key with its secret. Show the text once, and never log it. `expires_at`: None if
    the key never expires.
    """

    id: UUID
    prefix: str
    text: str = field(repr=False)
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class KeyOfSeed:
    """The key that was made from a seed. A seed is a secret. If a request is repeated with the same seed, the answer
    has the same key again.

    `key`: the key with its secret; None: the key is too old to be shown again, or cannot be used any more.
    """

    prefix: str
    tenant_id: str
    key: NewKey | None


@dataclass(frozen=True, slots=True)
class PresentedKey:
    """The key that a caller sent, split into its parts. `cell`: the cell that made the key; None: an installation
    without cells made it.
    """

    prefix: str
    secret: str = field(repr=False)
    cell: str | None = None


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key's row. `usable`: when the row was read, the key was neither revoked nor expired. `used_lately`: the use of
    the key was recorded within the last minute.

    `quota_key`: the name under which rates and quotas are counted. A key and the keys rotated from it have the same
    `quota_key`.
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
    """The parts of a key. Returns None if `text` does not have the form of a key."""
    match = _KEY.fullmatch(text)
    return PresentedKey(match[2], match[3], match[1]) if match else None


def _key_text(cell: str, prefix: str, secret: str) -> str:
    """The whole key. `cell`: empty for an installation without cells."""
    return f"lh_{cell}_{prefix}_{secret}" if cell else f"lh_{prefix}_{secret}"


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("ascii")).digest()


def matches(presented: PresentedKey, stored: StoredKey | None) -> bool:
    """Whether the caller's secret is the secret of the stored key. The call takes the same time even if `stored` is
    None.
    """
    expected = stored.secret_hash if stored is not None else _HASH_OF_NO_KEY
    is_equal = hmac.compare_digest(_hash(presented.secret), expected)
    return is_equal and stored is not None


def _new_prefix_and_secret() -> tuple[str, str]:
    """A new prefix, which is public, and a new secret."""
    prefix = "".join(secrets.choice(_PREFIX_ALPHABET) for _ in range(12))
    return prefix, secrets.token_urlsafe(32)


def _prefix_and_secret_of(seed: bytes) -> tuple[str, str]:
    """The prefix and the secret that are made from this seed. The prefix does not reveal the secret, and both together
    do not reveal the seed.
    """
    numbers = hmac.digest(seed, b"prefix of an API key", "sha256")[:12]
    prefix = "".join(_PREFIX_ALPHABET[number % len(_PREFIX_ALPHABET)] for number in numbers)
    secret = base64.urlsafe_b64encode(hmac.digest(seed, b"secret of an API key", "sha256"))
    return prefix, secret.decode().rstrip("=")


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

# Finds the key of a seed by the prefix $1 and the hash of the secret $2. $3: a key that is older is not shown again.
FIND_OF_SEED = """
-- key_find_of_seed
SELECT id, tenant_id, expires_at, created_at > clock_timestamp() - $3::interval
       AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp()) AS may_be_shown
FROM api_key WHERE prefix = $1 AND secret_hash = $2
"""

# With the condition on `last_used_at`, all processes together write the row at most once a minute.
MARK_USED = """
UPDATE api_key SET last_used_at = clock_timestamp()
WHERE id = $1 AND (last_used_at IS NULL OR last_used_at <= clock_timestamp() - interval '1 minute')
"""

# The old key expires after the overlap $2, or at the expiry that it already has if that is sooner. `ends_at`: the old
# key's expiry before this statement, which becomes the new key's expiry. The CTE locks the row, so the second of two
# concurrent rotations reads the expiry that the first has set.
RETIRE = """
WITH old_key AS (
    SELECT id, expires_at FROM api_key
    WHERE prefix = $1 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp())
    FOR UPDATE
)
UPDATE api_key k
SET expires_at = least(coalesce(old_key.expires_at, 'infinity'), clock_timestamp() + $2::interval)
FROM old_key WHERE k.id = old_key.id
RETURNING k.tenant_id, k.client_id, k.scopes, old_key.expires_at AS ends_at,
          coalesce(k.quota_key, k.prefix) AS quota_key
"""

# The key expires after $2, or at its present expiry if that is sooner.
EXPIRE = """
UPDATE api_key SET expires_at = least(coalesce(expires_at, 'infinity'), clock_timestamp() + $2::interval)
WHERE prefix = $1 AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp())
RETURNING expires_at
"""

# $1: the tenant, or NULL for all. $2: whether to list also expired and revoked keys. $3: the page's size. $4: the id of
# the last key of the previous page. The row of this last key still exists, because no key is ever deleted.
LIST = """
SELECT * FROM (
    SELECT id, prefix, tenant_id, client_id, scopes, created_at, expires_at, revoked_at, last_used_at,
           CASE WHEN revoked_at IS NOT NULL THEN 'revoked' WHEN expires_at <= clock_timestamp() THEN 'expired'
                ELSE 'active' END AS state
    FROM api_key WHERE $1::text IS NULL OR tenant_id = $1
) AS keys
WHERE (state = 'active' OR $2) AND ($4::uuid IS NULL OR (tenant_id, client_id, created_at, id)
      > (SELECT tenant_id, client_id, created_at, id FROM api_key WHERE id = $4))
ORDER BY tenant_id, client_id, created_at, id LIMIT $3
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
    cell: str = "",
    seed: bytes | None = None,
) -> NewKey:
    """Create a key. `quota_key`: the name under which rates and quotas count the key's use; None: the key's prefix.
    `cell`: the name of the cell that makes the key; empty: there are no cells. `seed`: a secret of 256 bits, from which
    the key's prefix and secret are made; None: both are random. `find_key_of` finds the key of a seed again.

    Raises Invalid: `scope_malformed` for a scope that is not `area:right`, `key_owner_missing` without tenant or
    client, `tenant_reserved` for the tenant EVERYBODY. Raises asyncpg.UniqueViolationError if a key was already made
    from the seed.
    """
    if not tenant_id or not client_id:
        raise Invalid("key_owner_missing", "A key needs a tenant and a client.")
    if tenant_id == EVERYBODY:
        # The keys of a tenant `*` would read the audit's chain `*`, and its limits would count all tenants.
        raise Invalid(
            "tenant_reserved",
            "`*` stands for all tenants, and is none itself. A key of any tenant reaches all of them with the scope "
            "fleet:operate.",
        )
    if malformed := [scope for scope in scopes if not _SCOPE.fullmatch(scope)]:
        raise Invalid("scope_malformed", f"Not scopes: {', '.join(malformed)}.")
    prefix, secret = _new_prefix_and_secret() if seed is None else _prefix_and_secret_of(seed)
    key = NewKey(new_id(), prefix, _key_text(cell, prefix, secret), expires_at)
    await connection.execute(
        INSERT, key.id, prefix, _hash(secret), tenant_id, client_id, sorted(set(scopes)), expires_at, quota_key
    )
    return key


async def find_key_of(connection: Connection, seed: bytes, within: timedelta, cell: str = "") -> KeyOfSeed | None:
    """The key that was made from the seed. Returns None if there is no such key. If the key is older than `within`, or
    cannot be used any more, its secret is left out. `cell`: as for `create_key`.
    """
    prefix, secret = _prefix_and_secret_of(seed)
    row = await connection.fetchrow(FIND_OF_SEED, prefix, _hash(secret), within)
    if row is None:
        return None
    key = None
    if row["may_be_shown"]:
        key = NewKey(row["id"], prefix, _key_text(cell, prefix, secret), row["expires_at"])
    return KeyOfSeed(prefix, row["tenant_id"], key)


async def find_key(connection: Connection, prefix: str) -> StoredKey | None:
    """The key's row, or None."""
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
    """Record that the key was used. If the last record is less than a minute old, nothing is written."""
    await connection.execute(MARK_USED, key_id)


async def rotate_key(
    connection: Connection, prefix: str, *, overlap: timedelta, cell: str = "", seed: bytes | None = None
) -> NewKey:
    """Create a key with the old key's owner, scopes, quotas and expiry. The old key stops working after `overlap`.
    `cell` and `seed`: as for `create_key`.

    If the old key was rotated before, it already expires at the end of the first overlap. A second rotation does not
    postpone this expiry, and the second new key gets the same expiry. Raises NotFound when no usable key has the
    prefix.
    """
    async with connection.transaction():
        old_key = await connection.fetchrow(RETIRE, prefix, overlap)
        if old_key is None:
            raise NotFound("key_not_found", "No usable key has this prefix.")
        return await create_key(
            connection,
            tenant_id=old_key["tenant_id"],
            client_id=old_key["client_id"],
            scopes=old_key["scopes"],
            expires_at=old_key["ends_at"],
            quota_key=old_key["quota_key"],
            cell=cell,
            seed=seed,
        )


async def expire_key(connection: Connection, prefix: str, lifetime: timedelta) -> datetime:
    """Let the key expire after `lifetime`, or at its own expiry if that is sooner. Returns the expiry, or raises
    NotFound if no usable key has the prefix.
    """
    ends_at: datetime | None = await connection.fetchval(EXPIRE, prefix, lifetime)
    if ends_at is None:
        raise NotFound("key_not_found", "No usable key has this prefix.")
    return ends_at


async def list_keys(
    connection: Connection,
    tenant_id: str | None = None,
    *,
    ended: bool = False,
    at_most: int | None = None,
    after: UUID | None = None,
) -> list[dict[str, Any]]:
    """The keys of the tenant (None: of all tenants), without their secrets. `state`: active, expired or revoked.

    `ended`: whether to list also expired and revoked keys. `at_most`: list at most this many keys; None: all. `after`:
    the id of the last key of the previous page.
    """
    return [dict(row) for row in await connection.fetch(LIST, tenant_id, ended, at_most, after)]


async def revoke_key(connection: Connection, prefix: str) -> None:
    """Revoke the key for good. It stops working within `api_key_cache_seconds`. A repeated call is safe. Raises
    NotFound if no key has the prefix.
    """
    if await connection.fetchval(REVOKE, prefix) is None:
        raise NotFound("key_not_found", "No key has this prefix.")
