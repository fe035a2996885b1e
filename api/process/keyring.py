"""Who is calling: API keys checked against the database, remembered for a few seconds."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from time import monotonic

from leasehold.db.database import Connection, Pool
from leasehold.domain.errors import Unauthenticated
from leasehold.limits.admission import Payer
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.security.credentials import PresentedKey, StoredKey, find_key, mark_used, matches, parse_key
from leasehold.telemetry.outages import DATABASE

_MOST_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request this is, and what its key may do. Limits and quotas of a key count by `quota_key`."""

    tenant_id: str
    client_id: str
    key_prefix: str
    quota_key: str
    scopes: frozenset[str]

    @property
    def payer(self) -> Payer:
        return Payer(self.tenant_id, self.quota_key)


def _refused() -> Unauthenticated:
    # One answer for unknown, wrong, revoked and expired: which it was is nobody's business.
    return Unauthenticated("invalid_api_key", "The API key is not valid.")


class Keyring:
    """`cache_seconds` bounds how long a revoked or expired key still works in this process."""

    def __init__(self, pool: Pool, *, cache_seconds: float) -> None:
        self._pool = pool
        self._cache_seconds = cache_seconds
        self._remembered: OrderedDict[str, tuple[StoredKey, float]] = OrderedDict()

    async def identify(self, text: str) -> Caller:
        """The caller behind the key `text`. Raises Unauthenticated, or one of TRY_AGAIN."""
        presented = parse_key(text)
        if presented is None:
            raise _refused()
        stored = self._recall(presented.prefix)
        if stored is None:
            stored = await self._load(presented)
        elif not matches(presented, stored):
            raise _refused()
        return Caller(stored.tenant_id, stored.client_id, stored.prefix, stored.quota_key, stored.scopes)

    def _recall(self, prefix: str) -> StoredKey | None:
        stored, until = self._remembered.get(prefix, (None, 0.0))
        return stored if monotonic() < until else None

    async def _load(self, presented: PresentedKey) -> StoredKey:
        asked_at = monotonic()
        async with self._pool.acquire() as connection:
            stored = await find_key(connection, presented.prefix)
            if not matches(presented, stored) or stored is None or not stored.usable:
                self._remembered.pop(presented.prefix, None)
                raise _refused()
            if not stored.used_lately:
                await _mark_used(connection, stored)
        self._remember(stored, asked_at + self._cache_seconds)
        return stored

    def _remember(self, stored: StoredKey, until: float) -> None:
        self._remembered[stored.prefix] = (stored, until)
        self._remembered.move_to_end(stored.prefix)
        while len(self._remembered) > _MOST_REMEMBERED:
            self._remembered.popitem(last=False)


async def _mark_used(connection: Connection, stored: StoredKey) -> None:
    try:
        await mark_used(connection, stored.id)
    except TRY_AGAIN as error:
        # A database that only reads can still say who calls; the statistic is not worth the request.
        DATABASE.met(error, "the use of API keys")
