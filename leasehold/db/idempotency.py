"""Idempotency keys: the API stores the first answer to a request and gives it to every repetition of the request.

What `reserve` returns or raises, and what the API then does:
- Reservation: this is the first request. Do the work, and call `store` in the work's own transaction. If the work
  failed, call `release`.
- StoredAnswer: this is a repetition. Return the stored answer.
- Invalid: another request has used the key. Conflict: the first request is still running.

A process that dies, or loses the database, cannot release its key. So a reservation lapses by itself, after IN_FLIGHT.
If the request has called `hold` in its transaction, its reservation lapses earlier, when that transaction has ended,
but never before _LOCK_GRACE has passed.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from leasehold.db.database import Connection
from leasehold.domain.errors import Conflict, Invalid

#: The time for which an answer is stored.
KEEP = timedelta(hours=24)
#: The time that a first request may take. After this time the request counts as dead, and another request may reserve
#: the key.
IN_FLIGHT = timedelta(seconds=60)
#: A first request holds the key's advisory lock while its transaction lasts. If a first request is older than this and
#: does not hold the lock, it counts as dead, because its connection or its process ended before the answer was stored.
_LOCK_GRACE = timedelta(seconds=1)
#: The form of an Idempotency-Key: 1 to 255 printable ASCII characters, with no space at its beginning or end.
_KEY = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,253}[\x21-\x7e])?")


@dataclass(frozen=True, slots=True)
class Reservation:
    """The right of a request to store the answer for its key. Another request can take the key over at `locked_until`
    or, if this request counts as dead, earlier (see RESERVE). `locked_until` also distinguishes this reservation from a
    later reservation of the same key.
    """

    tenant_id: str
    key: str
    locked_until: datetime


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The answer to the first request. `age`: the time since the answer was stored. `age` is only right if `store` was
    called with `keep` = KEEP.
    """

    status_code: int
    body: bytes
    age: timedelta


# SQL: the number of a key's advisory lock. Because of the prefix `idempotency`, it differs from the numbers of the
# locks of `lock_name` (database.py).
_LOCK = "hashtextextended('idempotency ' || $1 || ' ' || $2, 0)"

# Insert the reservation, or take over a row that has expired or whose first request counts as dead. If the key is
# taken, the statement returns no row. A first request counts as dead at `locked_until` or, if nobody holds the key's
# lock, $6 earlier. So how long a reservation counts depends only on its own `locked_until`, and not on the next
# request.
# $1 tenant, $2 key, $3 request hash, $4 the time until `locked_until`, $5 KEEP, $6 IN_FLIGHT - _LOCK_GRACE.
RESERVE = f"""
-- idempotency_reserve
INSERT INTO idempotency (tenant_id, key, request_hash, locked_until, expires_at)
VALUES ($1, $2, $3, clock_timestamp() + $4::interval, clock_timestamp() + $5::interval)
ON CONFLICT (tenant_id, key) DO UPDATE
SET request_hash = excluded.request_hash, status_code = NULL, body = NULL,
    locked_until = excluded.locked_until, expires_at = excluded.expires_at
WHERE idempotency.expires_at <= clock_timestamp()
   OR (idempotency.status_code IS NULL AND (
        idempotency.locked_until <= clock_timestamp()
        OR (idempotency.locked_until <= clock_timestamp() + $6::interval
            AND pg_try_advisory_xact_lock({_LOCK}))))
RETURNING locked_until
"""

# $1 tenant, $2 key, $3 request hash, $4 KEEP. `age` is computed from `expires_at`, which is the time at which the API
# stored the answer, plus KEEP.
READ = """
-- idempotency_look
SELECT request_hash = $3 AS same_request, status_code, body, clock_timestamp() - (expires_at - $4::interval) AS age
FROM idempotency WHERE tenant_id = $1 AND key = $2
"""

# $1 to $3: the tenant, key and `locked_until` of the reservation. $4: the status code. $5: the body. $6: how long to
# keep the answer. If another request has taken the key over, the statement returns no row.
STORE = """
-- idempotency_store
UPDATE idempotency SET status_code = $4, body = $5, expires_at = clock_timestamp() + $6::interval
WHERE tenant_id = $1 AND key = $2 AND locked_until = $3 AND status_code IS NULL
RETURNING key
"""

# Waits for the advisory lock of the key, and holds it until the transaction ends. See RESERVE for its effect.
HOLD = f"""
-- idempotency_hold
SELECT pg_advisory_xact_lock({_LOCK})
"""

# $1 to $3: as for STORE. A reservation that another request has taken over stays.
RELEASE = """
-- idempotency_release
DELETE FROM idempotency WHERE tenant_id = $1 AND key = $2 AND locked_until = $3 AND status_code IS NULL
"""


def fingerprint(*parts: bytes) -> bytes:
    """A hash of a request's parts: the operation and its body. Requests with the same hash count as the same.

    The length of each part is hashed, too, because otherwise ("ab", "c") and ("a", "bc") would have the same hash.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


def _in_flight_conflict() -> Conflict:
    return Conflict("idempotency_key_in_flight", "The first request with this key is still running.", retry_after=1)


def check_key(key: str | None) -> None:
    """Raises Invalid if `key` cannot be an Idempotency-Key. If `key` is None, the request has no key."""
    if key is not None and not _KEY.fullmatch(key):
        raise Invalid("idempotency_key_malformed", "An Idempotency-Key has 1 to 255 printable ASCII characters.")


async def reserve(
    connection: Connection, tenant_id: str, key: str, request_hash: bytes, *, is_held: bool = True
) -> Reservation | StoredAnswer:
    """Reserve the key, or return the stored answer. Raises Invalid or Conflict (see the module's head).

    `request_hash`: the `fingerprint` of the request. `is_held`: whether requests with this key call `hold`. If not,
    nothing shows that the first request has died, so its reservation counts for the whole of IN_FLIGHT.

    `key`: any text. The key of an HTTP request must have passed `check_key`.
    """
    earlier = IN_FLIGHT - _LOCK_GRACE
    # RESERVE lets a reservation lapse `earlier` before its `locked_until` if nobody holds the key's lock. If requests
    # with this key do not call `hold`, nobody ever holds it, so add `earlier` to the time of their reservations.
    locked_for = IN_FLIGHT if is_held else IN_FLIGHT + earlier
    locked_until = await connection.fetchval(RESERVE, tenant_id, key, request_hash, locked_for, KEEP, earlier)
    if locked_until is not None:
        return Reservation(tenant_id, key, locked_until)
    row = await connection.fetchrow(READ, tenant_id, key, request_hash, KEEP)
    if row is None:  # the first request released the key between the two statements: the client's next try reserves it
        raise _in_flight_conflict()
    if not row["same_request"]:
        raise Invalid("idempotency_key_reused", "This Idempotency-Key was used with another request.")
    if row["status_code"] is None:
        raise _in_flight_conflict()
    return StoredAnswer(row["status_code"], row["body"], row["age"])


async def hold(connection: Connection, reservation: Reservation) -> None:
    """Keep the reservation valid until the caller's transaction ends, but not longer than IN_FLIGHT. Call this at the
    start of the transaction that does the work. The last statement of that transaction is `store`.
    """
    await connection.execute(HOLD, reservation.tenant_id, reservation.key)


async def is_answered(connection: Connection, tenant_id: str, key: str) -> bool:
    """Whether the answer for this key is stored. If so, a repetition of the request writes nothing."""
    return bool(
        await connection.fetchval(
            "SELECT true FROM idempotency WHERE tenant_id = $1 AND key = $2 AND status_code IS NOT NULL"
            " AND expires_at > clock_timestamp()",
            tenant_id,
            key,
        )
    )


async def store(
    connection: Connection, reservation: Reservation, status_code: int, body: bytes, keep: timedelta = KEEP
) -> None:
    """Store the answer for the time `keep`. Raises Conflict if another request has taken over the reservation. The
    caller must then roll back the work.
    """
    reservation_key = (reservation.tenant_id, reservation.key, reservation.locked_until)
    if await connection.fetchval(STORE, *reservation_key, status_code, body, keep) is None:
        raise _in_flight_conflict()


async def release(connection: Connection, reservation: Reservation) -> None:
    """Free the key immediately. Call this after the work has failed and has written nothing."""
    await connection.execute(RELEASE, reservation.tenant_id, reservation.key, reservation.locked_until)
