"""Rates shared by all processes: GCRA, one row a key and one guarded statement a request."""

from __future__ import annotations

from dataclasses import dataclass

from leasehold.db.database import Connection

# The row says when the debt is paid: `full_at`. A request adds its share of a minute; it is let through unless that
# would put the debt beyond the burst.
_TAKE = """
-- rate
INSERT INTO rate_bucket AS b (key, full_at)
VALUES ($1, clock_timestamp() + make_interval(secs => $2::float8))
ON CONFLICT (key) DO UPDATE
SET full_at = greatest(b.full_at, clock_timestamp()) + make_interval(secs => $2::float8)
WHERE greatest(b.full_at, clock_timestamp()) + make_interval(secs => $2::float8)
      <= clock_timestamp() + make_interval(secs => $3::float8)
RETURNING extract(epoch FROM full_at - clock_timestamp())::float8
"""


@dataclass(frozen=True, slots=True)
class Quota:
    """`remaining`: requests that would be let through at once. `wait`: seconds until the next one is, 0 if now."""

    limit: int
    remaining: int
    wait: float

    @property
    def allowed(self) -> bool:
        return self.wait == 0.0


async def take(connection: Connection, key: str, per_minute: int, count: int = 1) -> Quota:
    """Ask for `count` requests of `key` together, at `per_minute` in the long run and as many at once.

    `count` is at most `per_minute`: more together would never be let through.
    """
    assert count <= per_minute, "more than a minute's share can never be let through"
    share, burst = 60.0 * count / per_minute, 60.0
    debt = await connection.fetchval(_TAKE, key, share, burst)
    if debt is not None:
        return Quota(per_minute, max(int((burst - debt) * per_minute / 60.0), 0), 0.0)
    return Quota(per_minute, 0, max(await _owed(connection, key) + share - burst, 0.001))


async def look(connection: Connection, key: str, per_minute: int) -> Quota:
    """What one request would meet now; it is not counted."""
    share, burst = 60.0 / per_minute, 60.0
    owed = max(await _owed(connection, key), 0.0)
    return Quota(per_minute, max(int((burst - owed) * per_minute / 60.0), 0), max(owed + share - burst, 0.0))


async def _owed(connection: Connection, key: str) -> float:
    owed: float | None = await connection.fetchval(
        "SELECT extract(epoch FROM full_at - clock_timestamp())::float8 FROM rate_bucket WHERE key = $1", key
    )
    return owed or 0.0


async def give_back(connection: Connection, key: str, per_minute: int, count: int) -> None:
    """Undo a `take` of `count`."""
    await connection.execute(
        "UPDATE rate_bucket SET full_at = full_at - make_interval(secs => $2::float8) WHERE key = $1",
        key,
        60.0 * count / per_minute,
    )


async def forget_rates(connection: Connection, limit: int = 1000) -> None:
    """Buckets without debt are as good as none."""
    await connection.execute(
        "DELETE FROM rate_bucket WHERE key IN (SELECT key FROM rate_bucket WHERE full_at < statement_timestamp()"
        " ORDER BY full_at LIMIT $1)",
        limit,
    )
