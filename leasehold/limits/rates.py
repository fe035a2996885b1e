"""Rate limits that hold for all processes together, by the algorithm GCRA. Each key has one row, and each charge is one
statement. A key names what is limited, such as the requests of an API key.

The admission of jobs and some endpoints charge these rates. Each request adds to the debt of its key. The debt is a
number of seconds. It falls by one each second, and must not exceed one minute.
"""

from __future__ import annotations

from dataclasses import dataclass

from leasehold.db.database import Connection, row_count

# $1: the key. $2: the debt that the charge adds. $3: the largest allowed debt (the burst). `full_at` is the time at
# which the key's debt becomes 0. The statement returns the new debt. If the new debt would exceed the burst, the
# statement changes nothing and returns no row. Exception: if the debt exceeds the burst before the charge, PostgreSQL's
# clock has stepped back since the last charge. Then the statement sets the debt to the burst, and allows the charge,
# because the caller of a refused charge would roll this correction back.
_TAKE = """
-- rate
INSERT INTO rate_bucket AS bucket (key, full_at)
VALUES ($1, clock_timestamp() + make_interval(secs => $2::float8))
ON CONFLICT (key) DO UPDATE
SET full_at = least(greatest(bucket.full_at, clock_timestamp()) + make_interval(secs => $2::float8),
                    clock_timestamp() + make_interval(secs => $3::float8))
WHERE greatest(bucket.full_at, clock_timestamp()) + make_interval(secs => $2::float8)
      <= clock_timestamp() + make_interval(secs => $3::float8)
   OR bucket.full_at > clock_timestamp() + make_interval(secs => $3::float8)
RETURNING extract(epoch FROM full_at - clock_timestamp())::float8
"""


#: The largest allowed debt. It is one minute, so that the requests of a whole minute may come at once.
_BURST_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Quota:
    """The answer to a charge. `limit`: requests a minute. `remaining`: how many further requests would be allowed now;
    0 after a refused charge. `wait_seconds`: the time until the same charge would be allowed; 0: the charge is allowed.
    """

    limit: int
    remaining: int
    wait_seconds: float

    @property
    def allowed(self) -> bool:
        return self.wait_seconds == 0.0


async def take(connection: Connection, key: str, per_minute: int, count: int = 1) -> Quota:
    """Charge `count` requests to `key`, all or none. The rate is `per_minute`. The requests of a whole minute may come
    at once. So `count` must be at most `per_minute`, because more requests at once would never be allowed.
    """
    assert count <= per_minute, "a charge above a whole minute's rate can never be allowed"
    added_debt = 60.0 * count / per_minute
    debt = await connection.fetchval(_TAKE, key, added_debt, _BURST_SECONDS)
    if debt is not None:
        return Quota(per_minute, _remaining_requests(debt, per_minute), 0.0)
    wait = await _read_debt(connection, key) + added_debt - _BURST_SECONDS
    return Quota(per_minute, 0, max(wait, 0.001))  # never 0, which would mean that the requests are allowed


async def peek(connection: Connection, key: str, per_minute: int) -> Quota:
    """The quota that a charge of one request would get now. This function charges nothing."""
    added_debt = 60.0 / per_minute
    debt = max(await _read_debt(connection, key), 0.0)
    if debt > _BURST_SECONDS:
        debt = _BURST_SECONDS - added_debt  # `take` allows the next request: see _TAKE
    return Quota(per_minute, _remaining_requests(debt, per_minute), max(debt + added_debt - _BURST_SECONDS, 0.0))


def _remaining_requests(debt: float, per_minute: int) -> int:
    return max(int((_BURST_SECONDS - debt) * per_minute / 60.0), 0)


async def _read_debt(connection: Connection, key: str) -> float:
    """The key's debt in seconds. A negative value means that the debt has been 0 for this long."""
    debt: float | None = await connection.fetchval(
        "SELECT extract(epoch FROM full_at - clock_timestamp())::float8 FROM rate_bucket WHERE key = $1", key
    )
    return debt or 0.0


async def refund(connection: Connection, key: str, per_minute: int, count: int) -> None:
    """Undo an allowed `take` of `count` requests."""
    await connection.execute(
        "UPDATE rate_bucket SET full_at = full_at - make_interval(secs => $2::float8) WHERE key = $1",
        key,
        60.0 * count / per_minute,
    )


async def forget_rates(connection: Connection, limit: int = 1000) -> bool:
    """Delete at most `limit` rows without debt. Nothing is lost, because a key without a row has no debt either.
    Returns True if there may be more such rows.

    FOR UPDATE SKIP LOCKED leaves out a row that another transaction is charging. Without it, PostgreSQL would wait for
    the charge, and then delete the charged row.
    """
    status = await connection.execute(
        "DELETE FROM rate_bucket WHERE key IN (SELECT key FROM rate_bucket WHERE full_at < statement_timestamp()"
        " ORDER BY full_at LIMIT $1 FOR UPDATE SKIP LOCKED)",
        limit,
    )
    return row_count(status) >= limit
