"""Downloads of an API key, counted for all API processes: how many at once, how often, how many bytes.

A row is written when a download is let in, charged with all its bytes; at its end with those that were sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from leasehold.db.database import Connection, lock_name
from leasehold.domain.errors import TooMany
from leasehold.domain.ids import new_id

GB = 1_000_000_000
#: The longest that one may take, in seconds.
MOST_SECONDS = 300
MOST_AT_ONCE = 10
#: (requests, within seconds)
RATES = ((5, 10), (20, 60))
#: (bytes, within seconds)
QUOTAS = ((1 * GB, 3600), (6 * GB, 86_400))

# One row a window: how much lies in it, and when the oldest of that leaves it.
_SEEN = """
-- downloads_seen
SELECT w.seconds, count(d.id) AS requests, coalesce(sum(d.bytes), 0)::bigint AS bytes,
       coalesce(w.seconds - extract(epoch FROM clock_timestamp() - min(d.started_at)), 0)::float8 AS wait
FROM unnest($3::int[]) AS w(seconds)
LEFT JOIN download d ON d.key_prefix = $2 AND d.tenant_id = $1
     AND d.started_at > clock_timestamp() - make_interval(secs => w.seconds)
GROUP BY w.seconds
"""
_AT_ONCE = """
-- downloads_at_once
SELECT count(*) FROM download
WHERE key_prefix = $2 AND tenant_id = $1 AND finished_at IS NULL AND lapses_at > clock_timestamp()
  AND started_at > clock_timestamp() - interval '1 hour'
"""
_INSERT = """
-- download
INSERT INTO download (id, tenant_id, key_prefix, bytes, lapses_at)
VALUES ($1, $2, $3, $4, clock_timestamp() + make_interval(secs => $5))
"""


@dataclass(frozen=True, slots=True)
class _Window:
    requests: int
    bytes: int
    wait: float


async def begin(connection: Connection, tenant_id: str, key_prefix: str, size: int) -> UUID:
    """Let a download of `size` bytes in.

    Raises TooMany: `too_many_downloads` (a rate), `too_many_at_once`, or `download_quota_exceeded`.
    """
    windows = sorted({seconds for _, seconds in (*RATES, *QUOTAS)})
    async with connection.transaction():
        await lock_name(connection, f"download {key_prefix}")
        rows = await connection.fetch(_SEEN, tenant_id, key_prefix, windows)
        seen = {row["seconds"]: _Window(row["requests"], row["bytes"], row["wait"]) for row in rows}
        _check(seen, size)
        if await connection.fetchval(_AT_ONCE, tenant_id, key_prefix) >= MOST_AT_ONCE:
            said = f"At most {MOST_AT_ONCE} downloads at once."
            raise TooMany("too_many_at_once", said, policy="downloads", most=MOST_AT_ONCE, retry_after=5)
        download_id = new_id()
        await connection.execute(_INSERT, download_id, tenant_id, key_prefix, size, MOST_SECONDS + 10)
    return download_id


def _check(seen: dict[int, _Window], size: int) -> None:
    for most, seconds in RATES:
        if seen[seconds].requests >= most:
            said = f"At most {most} downloads in {seconds} seconds."
            wait = seen[seconds].wait
            raise TooMany("too_many_downloads", said, policy="downloads", most=most, window=seconds, retry_after=wait)
    for quota, seconds in QUOTAS:
        if seen[seconds].bytes + size > quota:
            said = f"At most {quota // GB} GB in {seconds // 3600} hours."
            wait = seen[seconds].wait
            raise TooMany("download_quota_exceeded", said, policy="bytes", most=quota, window=seconds, retry_after=wait)


async def end(connection: Connection, tenant_id: str, download_id: UUID, sent: int) -> None:
    """Charge what was sent."""
    await connection.execute(
        "UPDATE download SET bytes = $3, finished_at = clock_timestamp() WHERE id = $1 AND tenant_id = $2",
        download_id,
        tenant_id,
        sent,
    )


async def forget_downloads(connection: Connection, limit: int = 1000) -> None:
    """Those that no quota counts any more."""
    await connection.execute(
        "DELETE FROM download WHERE id IN (SELECT id FROM download"
        " WHERE started_at < statement_timestamp() - interval '25 hours' ORDER BY started_at LIMIT $1)",
        limit,
    )
