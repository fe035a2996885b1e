"""Limits the downloads of an API key over all API processes: how many at once, how often, and how many bytes.

The API calls `begin` and `end` around each download. `begin` writes a row, which charges the object's full size. `end`
sets the charge to the bytes that were sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from leasehold.db.database import Connection, lock_name, row_count
from leasehold.domain.errors import TooMany
from leasehold.domain.ids import new_id
from leasehold.domain.sentences import counted

GB = 1_000_000_000
#: One download may take at most this many seconds.
MAX_SECONDS = 300
#: At most this many downloads of one key may be under way at once.
MAX_AT_ONCE = 10
#: Each pair: at most this many requests, within this many seconds.
RATES = ((5, 10), (20, 60))
#: Each pair: at most this many bytes, within this many seconds.
QUOTAS = ((1 * GB, 3600), (6 * GB, 86_400))

# $1 the tenant, $2 the key's prefix, $3 the lengths of the time windows in seconds. The statement returns a row for
# each window, with its requests and bytes, and with the seconds until its oldest download leaves the window (`wait`).
_BY_WINDOW = """
-- downloads_seen
SELECT time_window.seconds, count(d.id) AS requests, coalesce(sum(d.bytes), 0)::bigint AS bytes,
       coalesce(time_window.seconds - extract(epoch FROM clock_timestamp() - min(d.started_at)), 0)::float8 AS wait
FROM unnest($3::int[]) AS time_window(seconds)
LEFT JOIN download d ON d.key_prefix = $2 AND d.tenant_id = $1
     AND d.started_at > clock_timestamp() - make_interval(secs => time_window.seconds)
GROUP BY time_window.seconds
"""
# Counts the downloads under way. If the API process of a download died, the row of the download counts until
# `lapses_at`. The condition on `started_at` only narrows the range of the index that PostgreSQL reads.
_AT_ONCE = """
-- downloads_at_once
SELECT count(*) FROM download
WHERE key_prefix = $2 AND tenant_id = $1 AND finished_at IS NULL AND lapses_at > clock_timestamp()
  AND started_at > clock_timestamp() - interval '1 hour'
"""
# $1 the download, $2 the tenant, $3 the key's prefix, $4 the bytes that are charged, $5 the seconds until the row
# lapses.
_INSERT = """
-- download
INSERT INTO download (id, tenant_id, key_prefix, bytes, lapses_at)
VALUES ($1, $2, $3, $4, clock_timestamp() + make_interval(secs => $5))
"""


@dataclass(frozen=True, slots=True)
class _Window:
    """A key's downloads within a time window. `wait_seconds`: seconds until the oldest download leaves the window."""

    requests: int
    bytes: int
    wait_seconds: float


async def begin(connection: Connection, tenant_id: str, key_prefix: str, size: int) -> UUID:
    """Charge a download of `size` bytes and return its id, for `end`. `key_prefix`: the name under which the downloads
    are counted. For an API key, this name is the prefix that the key had before its first rotation; for a person, it is
    `person ID`.

    Raises TooMany: `too_many_downloads` (a rate), `too_many_at_once`, or `download_quota_exceeded`.
    """
    lengths = sorted({seconds for _, seconds in (*RATES, *QUOTAS)})
    async with connection.transaction():
        await lock_name(connection, f"download {key_prefix}")
        rows = await connection.fetch(_BY_WINDOW, tenant_id, key_prefix, lengths)
        _check_windows({row["seconds"]: _Window(row["requests"], row["bytes"], row["wait"]) for row in rows}, size)
        if await connection.fetchval(_AT_ONCE, tenant_id, key_prefix) >= MAX_AT_ONCE:
            sentence = f"At most {MAX_AT_ONCE} downloads at once."
            raise TooMany("too_many_at_once", sentence, policy="downloads", at_most=MAX_AT_ONCE, retry_after=5)
        download_id = new_id()
        # The 10 seconds are for a process that ends the download at MAX_SECONDS, and then needs a moment to call `end`.
        await connection.execute(_INSERT, download_id, tenant_id, key_prefix, size, MAX_SECONDS + 10)
    return download_id


def _check_windows(windows: dict[int, _Window], size: int) -> None:
    """Raises TooMany if another download of `size` bytes exceeds a rate or a quota. `windows`: each window by its
    length in seconds.
    """
    for at_most, seconds in RATES:
        if windows[seconds].requests >= at_most:
            raise TooMany(
                "too_many_downloads",
                f"At most {at_most} downloads in {seconds} seconds.",
                policy="downloads",
                at_most=at_most,
                window=seconds,
                retry_after=windows[seconds].wait_seconds,
            )
    for quota, seconds in QUOTAS:
        # In an empty window any download may begin, because a download that is larger than the quota could otherwise
        # never begin.
        if windows[seconds].bytes and windows[seconds].bytes + size > quota:
            hours = counted(seconds // 3600, "hour", "hours")
            raise TooMany(
                "download_quota_exceeded",
                f"At most {quota // GB} GB in {hours}.",
                policy="bytes",
                at_most=quota,
                window=seconds,
                retry_after=windows[seconds].wait_seconds,
            )


async def end(connection: Connection, tenant_id: str, download_id: UUID, sent: int) -> None:
    """End the download, and charge only the `sent` bytes."""
    await connection.execute(
        "UPDATE download SET bytes = $3, finished_at = clock_timestamp() WHERE id = $1 AND tenant_id = $2",
        download_id,
        tenant_id,
        sent,
    )


async def forget_downloads(connection: Connection, limit: int = 1000) -> bool:
    """Delete at most `limit` rows that no rate or quota counts any more. Returns whether more rows may be due."""
    status = await connection.execute(
        "DELETE FROM download WHERE id IN (SELECT id FROM download"
        " WHERE started_at < statement_timestamp() - interval '25 hours' ORDER BY started_at LIMIT $1)",
        limit,
    )
    return row_count(status) >= limit
