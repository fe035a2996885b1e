"""Identifies the caller of a request by its key. The API reads the key's row from the database and keeps it for a few
seconds, so that most requests cost no query. `Require` calls `Keyring.identify` for every request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from time import monotonic
from uuid import UUID

from leasehold.api.process import deadline
from leasehold.db.database import Connection, Pool
from leasehold.db.job_reads import Row
from leasehold.domain.audit import Actor, ActorKind
from leasehold.domain.errors import Unauthenticated
from leasehold.limits import people
from leasehold.limits.admission import Payer
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.security.cells import Cells
from leasehold.security.credentials import PresentedKey, StoredKey, find_key, mark_used, matches, parse_key
from leasehold.security.roles import expanded
from leasehold.telemetry.outages import DATABASE

#: The process keeps the rows of at most this many keys, to bound its memory.
_CACHED_KEYS = 10_000


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant and client that call, and the scopes of their key.

    `quota_key`: the name of the counter of the caller's rates and quotas. An API key that replaces a rotated key has
    the same counter. `own_tenant`: the caller's own tenant, if `tenant_id` is the tenant of the job on which the caller
    acts (an operator may act in another tenant); None: `tenant_id` is the caller's own tenant. `person_id`: the id of a
    person who signed in by OpenID Connect, without an API key. For such a caller, `client_id` is the person's login.
    """

    tenant_id: str
    client_id: str
    key_prefix: str | None
    quota_key: str
    scopes: frozenset[str]
    own_tenant: str | None = None
    person_id: UUID | None = None
    source_ip: str | None = None
    request_id: str | None = None

    @property
    def actor(self) -> Actor:
        """The actor that the audit names for this caller."""
        tenant_id = self.own_tenant or self.tenant_id
        kind: ActorKind = "key" if self.person_id is None else "person"
        return Actor(kind, self.client_id, tenant_id, self.key_prefix, self.source_ip, self.request_id)

    @property
    def payer(self) -> Payer:
        """The owner of the rates and quotas to which a submission of this caller is charged."""
        return Payer(self.tenant_id, self.quota_key)


def _invalid_key() -> Unauthenticated:
    # An unknown, wrong, revoked or expired key gets the same answer, so that a stranger learns nothing about the key.
    return Unauthenticated("invalid_api_key", "The API key is not valid.")


class Keyring:
    """Finds callers, and keeps the rows of their keys for `cache_seconds`. So a key that was revoked or has expired may
    work in this process for up to `cache_seconds` longer.

    `roles`: role -> its scopes. `issuer`: the OpenID provider. Sessions that people began at another provider are
    refused. `cells`: how the tenants are divided among several installations, which are called cells. None: the
    installation stands alone.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        cache_seconds: float,
        roles: Mapping[str, frozenset[str]] | None = None,
        issuer: str | None = None,
        cells: Cells | None = None,
    ) -> None:
        self._cells = cells
        self._roles = roles or {}
        self._issuer = issuer
        self._pool = pool
        self._cache_seconds = cache_seconds
        # The public prefix of a key -> the key's row, and the time until which the row is used.
        self._cache: OrderedDict[str, tuple[StoredKey, float]] = OrderedDict()

    async def identify(self, text: str) -> Caller:
        """Find the caller whose key is `text`. Raises Unauthenticated, WrongCell if another installation serves the
        key's tenant, or one of TRY_AGAIN (runtime/transient.py) if PostgreSQL does not answer.
        """
        presented_key = parse_key(text)
        if presented_key is None:
            raise _invalid_key()
        if self._cells is not None:
            self._cells.refuse_before_key_is_read(presented_key.cell)  # needs no query, because the key names its cell
        stored_key = self._cached_key(presented_key.prefix)
        if stored_key is None:
            stored_key = await self._read_key(presented_key.prefix, presented_key)
        elif not matches(presented_key, stored_key):
            self._refuse_elsewhere(None, presented_key)  # the secret is wrong here, but may be right in the key's cell
            raise _invalid_key()
        else:  # the tenant may have moved to another cell since the row was read
            self._refuse_elsewhere(stored_key.tenant_id, presented_key)
        return self._caller_of(stored_key)

    async def caller_of_session(self, prefix: str) -> Caller:
        """Find the caller of a session that began with a key. `prefix`: the key's public prefix.

        Raises Unauthenticated if the key was revoked or has expired, WrongCell, or one of TRY_AGAIN.
        """
        stored_key = self._cached_key(prefix)
        if stored_key is None:
            stored_key = await self._read_key(prefix, None)
        else:
            self._refuse_elsewhere(stored_key.tenant_id)
        return self._caller_of(stored_key)

    async def caller_of_person_session(self, person_id: UUID, generation: int) -> Caller:
        """Find the caller of a session that a person began at the OpenID provider.

        The person's row is not kept in memory. So after an admin has disabled a person, the person's next request fails
        in every process. Raises Unauthenticated `session_ended`, or one of TRY_AGAIN.
        """
        async with deadline.acquired_in_time(self._pool.acquire()) as connection:
            row = await people.find_for_session(connection, person_id)
        if row is None or (row["issuer"], row["generation"]) != (self._issuer, generation):
            raise Unauthenticated("session_ended", "Your session has ended. Sign in again.")
        return self.caller_of_person(row)

    def caller_of_person(self, row: Row) -> Caller:
        """The caller for the row of a person. Raises Unauthenticated `session_ended` if the person is disabled or has
        no scopes, and WrongCell if another cell serves the person's tenant.
        """
        if row["disabled_at"] is not None or not row["scopes"]:
            raise Unauthenticated("session_ended", "You may not sign in here. An admin of the tenant can change that.")
        self._refuse_elsewhere(row["tenant_id"])
        scopes, quota_key = self.expanded(row["scopes"]), f"person {row['id']}"
        return Caller(row["tenant_id"], row["login"], None, quota_key, scopes, person_id=row["id"])

    def _refuse_elsewhere(self, tenant_id: str | None, presented_key: PresentedKey | None = None) -> None:
        """Raises WrongCell if the tenant belongs to another cell. If no row in this cell fits the key, `tenant_id` is
        None, and the cell that `presented_key` names decides.
        """
        if self._cells is not None:
            self._cells.refuse_elsewhere(tenant_id, None if presented_key is None else presented_key.cell)

    def expanded(self, scopes: Iterable[str]) -> frozenset[str]:
        """The scopes, with the scopes of each role in place of the role."""
        return expanded(scopes, self._roles)

    def _caller_of(self, key: StoredKey) -> Caller:
        return Caller(key.tenant_id, key.client_id, key.prefix, key.quota_key, self.expanded(key.scopes))

    def _cached_key(self, prefix: str) -> StoredKey | None:
        stored_key, valid_until = self._cache.get(prefix, (None, 0.0))
        return stored_key if monotonic() < valid_until else None

    async def _read_key(self, prefix: str, presented_key: PresentedKey | None) -> StoredKey:
        """Read the key's row, and check the secret of `presented_key`. For a session that began with the key,
        `presented_key` is None, and there is no secret to check. Raises Unauthenticated, WrongCell, or one of
        TRY_AGAIN.
        """
        started_at = monotonic()
        async with deadline.acquired_in_time(self._pool.acquire()) as connection:
            stored_key = await find_key(connection, prefix)
            is_secret_right = presented_key is None or matches(presented_key, stored_key)
            if not is_secret_right or stored_key is None or not stored_key.usable:
                self._cache.pop(prefix, None)
                if not is_secret_right:  # as in `identify`
                    self._refuse_elsewhere(None, presented_key)
                raise _invalid_key()
            self._refuse_elsewhere(stored_key.tenant_id, presented_key)  # before `_mark_used` writes to the row
            if not stored_key.used_lately:
                await _mark_used(connection, stored_key)
        self._remember(stored_key, started_at + self._cache_seconds)
        return stored_key

    def _remember(self, key: StoredKey, valid_until: float) -> None:
        self._cache[key.prefix] = (key, valid_until)
        self._cache.move_to_end(key.prefix)
        while len(self._cache) > _CACHED_KEYS:
            self._cache.popitem(last=False)


async def _mark_used(connection: Connection, key: StoredKey) -> None:
    try:
        await mark_used(connection, key.id)
    except TRY_AGAIN as error:
        # The request goes on, because the time of the last use is only a statistic, and a read-only database cannot
        # store it.
        DATABASE.record_error(error, "the use of API keys")
