"""Limits the bytes of a tenant's unfinished uploads, and removes uploads that no client completes.

A client sends an object directly to the store, and the API does not see the transfer. So each key that a client may
write to has a row in `upload` before it has an object. Housekeeping inspects the keys in the store (`inspect`). A row
stays as long as a transfer that began before the URL expired may still arrive.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias
from uuid import UUID

import structlog

from leasehold.db.database import Connection, lock_name, row_count
from leasehold.domain.errors import TooMany
from leasehold.limits.upload_room import LEAST_COUNTED, UploadRoom, count
from leasehold.settings import Settings
from leasehold.storage.store import LONGEST_PUT, ObjectStore
from leasehold.telemetry.store import REMOVED
from leasehold.transitions.moves import tenant_stays
from leasehold.transitions.quarantine import not_in

log = structlog.get_logger(__name__)

#: The name of the duty (a maintenance loop) that inspects uploads. Uploads that it cannot inspect are set aside in the
#: quarantine under this name.
UPLOADS = "uploads"
#: Seconds between two inspections of an object that may still change.
INSPECTION_SECONDS = 60
#: A URL counts as expired this many seconds after its end, because clocks differ.
_GRACE_SECONDS = 60
#: A transfer that began before its URL expired may take this long.
SLOWEST_TRANSFER = timedelta(days=1)
#: A refused upload gets a Retry-After of this many seconds.
_RETRY_SECONDS = 60.0
#: The value of `attempt` for an upload that belongs to no attempt of an external worker.
_NO_ATTEMPT = (None, None)
#: A multipart upload of the platform that is older than this has no living writer. Clocks may differ by an hour or two.
_LONGEST_WRITE = LONGEST_PUT + timedelta(hours=4)
#: The prefix of the outputs of jobs. The bucket may also have objects of other programs.
_JOBS_PREFIX = "jobs/"

# Writes the row of a new upload. The columns of `upload`: `most` is the size of the largest object that may stay.
# `writable_until` is the end of the URL, and `look_at` the next inspection. After `forget_at` no transfer can arrive.
#
# $1 key, $2 tenant, $3 the bytes with which the upload counts, $4 `most`, $5 seconds for which the client may begin to
# send, $6 seconds until the first inspection, $7 the slowest transfer, $8 whether the store accepts exactly $3 bytes,
# $9 and $10 task and epoch of an external worker's attempt (NULL: none). The upload ends with the attempt.
_OPEN = """
-- upload_open
INSERT INTO upload (key, tenant_id, open, exact, bytes, most, writable_until, look_at, forget_at, task_id, epoch)
VALUES ($1, $2, true, $8, $3, $4, clock_timestamp() + make_interval(secs => $5),
        clock_timestamp() + make_interval(secs => $6), clock_timestamp() + make_interval(secs => $5) + $7::interval,
        $9, $10)
"""
# Finishes an upload. $1 key, $2 tenant, $3 a bound that lowers `most`, $4 the grace after the end of the URL. If `most`
# is -1, housekeeping deletes any object at the key: immediately, and again after the last possible transfer.
_CLOSE = """
-- upload_close
UPDATE upload SET open = false, bytes = 0, most = least(most, $3),
    look_at = CASE WHEN $3 < 0 THEN clock_timestamp() ELSE greatest(look_at, writable_until + $4::interval) END
WHERE key = $1 AND tenant_id = $2
"""
# Deletes the row of a finished upload. This is possible only for an upload with a signed size (`exact`), because the
# store accepts only objects of that size, so housekeeping need not inspect the key any more. (If the object is deleted
# while the URL still works, the code that deletes it writes the row again.)
_FORGET_EXACT = "DELETE FROM upload WHERE key = $1 AND tenant_id = $2 AND exact AND bytes <= $3"
# Returns at most $2 uploads that are due for an inspection. $1 the grace after the end of the URL. `url_expired`,
# `transfers_over`: see Due.
_DUE = f"""
-- uploads_due
SELECT key, tenant_id, open, most AS at_most, writable_until + $1::interval < clock_timestamp() AS url_expired,
       forget_at < clock_timestamp() AS transfers_over
FROM upload WHERE look_at < statement_timestamp() AND {not_in(UPLOADS, "key", "text")}
  AND {tenant_stays("upload.tenant_id")} ORDER BY look_at LIMIT $2
"""
# Records an inspection. $1 key, $2 whether the URL had expired when the object was read, $3 the size of the stored
# object, $4 seconds until the next inspection, $5 `most` when the object was read, $6 the grace after the end of the
# URL. While the client may still send, an upload counts with its declared bytes or its stored bytes, whichever number
# is higher. After that it counts with its stored bytes, and the next inspection is the last. The upload may have
# changed since the object was read. If `most` has changed, this statement changes nothing, and the upload stays due. If
# the client has got a new URL, `writable_until` is later, and the client may send again.
_INSPECTED = """
-- upload_looked
UPDATE upload SET
    bytes = CASE WHEN NOT open THEN 0 WHEN $2 AND writable_until + $6::interval < clock_timestamp() THEN $3
                 ELSE greatest(bytes, $3) END,
    look_at = CASE WHEN $2 AND writable_until + $6::interval < clock_timestamp() THEN forget_at
                   ELSE clock_timestamp() + make_interval(secs => $4) END
WHERE key = $1 AND look_at < clock_timestamp() AND most = $5
"""
# $1 the prefix, $2 the tenant. Closes an upload below a prefix, so that no job gets its objects.
_CONDEMN_PREFIX = """
-- upload_condemn
UPDATE upload SET open = false WHERE key = $1 AND tenant_id = $2 RETURNING true
"""
# Deletes the row of an upload once no transfer can arrive any more. $1 key, $2 tenant, $3 `most` when the object was
# read. Exception: the row of a file that an external worker has announced stays until the attempt has ended. At its
# end, either the completion of the attempt deletes the row, or `give_up` closes the upload (limits/external_files.py).
# Until then one inspection a day is enough, because no transfer can arrive any more.
_FORGET_OVER = """
-- upload_over
DELETE FROM upload
WHERE key = $1 AND tenant_id = $2 AND NOT (open AND task_id IS NOT NULL) AND most = $3
"""
# Keeps the row of such a file, for which _FORGET_OVER does nothing. $1 key, $2 tenant, $3 the size of the stored
# object.
_KEEP_OVER = """
-- upload_kept
UPDATE upload SET bytes = $3, look_at = clock_timestamp() + interval '1 day'
WHERE key = $1 AND tenant_id = $2 AND open AND task_id IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class Due:
    """An upload that is due for an inspection. `open`: the upload has not ended (see `close`). `at_most`: the column
    `most`. `url_expired`: the URL has expired, so no client can begin to send. `transfers_over`: no transfer can arrive
    any more, not even one that began before the URL expired.
    """

    key: str
    tenant_id: str
    open: bool
    at_most: int
    url_expired: bool
    transfers_over: bool


async def open_upload(
    connection: Connection,
    settings: Settings,
    tenant_id: str,
    key: str,
    *,
    counted_bytes: int,
    at_most: int,
    seconds: float,
    room: UploadRoom,
    exact: bool = False,
    attempt: tuple[UUID, int] | tuple[None, None] = _NO_ATTEMPT,
) -> None:
    """Write the row of an upload to `key`, before the client gets a URL. A `/` at the end makes `key` a prefix.

    Call this in a transaction. `counted_bytes`: the number of bytes with which the upload counts until the first
    inspection. `at_most`: housekeeping deletes an object with more bytes. `seconds`: for how long the client may begin
    to send. `room`: the counts that this process remembers; with them, a tenant that is far from its bound needs no
    lock. `exact`: the store accepts exactly `counted_bytes`. `attempt`: the task and epoch of the external worker's
    attempt. The upload ends with this attempt (external_files.py). Raises TooMany `upload_quota_exceeded`.
    """
    size = max(counted_bytes, LEAST_COUNTED)
    if not await room.reserve(connection, tenant_id, size):
        used_bytes = await _check_room(connection, tenant_id, size, settings.upload_unfinished_bytes)
        room.add_exactly(tenant_id, used_bytes, size)
    # The first inspection waits until after the URL's end in two cases. An exact upload cannot be too large, so an
    # earlier inspection is not needed. The inspection of a prefix deletes its objects, so it must not come while the
    # client may still be sending.
    first_inspection = seconds + _GRACE_SECONDS if exact or key.endswith("/") else INSPECTION_SECONDS
    await connection.execute(
        _OPEN, key, tenant_id, counted_bytes, at_most, seconds, first_inspection, SLOWEST_TRANSFER, exact, *attempt
    )


async def count_again(
    connection: Connection, settings: Settings, tenant_id: str, key: str, counted_bytes: int, room: UploadRoom
) -> None:
    """Count an open upload again as `open_upload` did, because its client gets a new URL. Since the first URL expired,
    the upload may have counted with fewer bytes. Call this in the transaction that has changed the upload's row. Raises
    TooMany `upload_quota_exceeded`.
    """
    before = await connection.fetchval("SELECT bytes FROM upload WHERE key = $1 AND tenant_id = $2", key, tenant_id)
    more = max(counted_bytes, LEAST_COUNTED) - max(before, LEAST_COUNTED)
    if more <= 0:
        return
    if not await room.reserve(connection, tenant_id, more):
        used_bytes = await _check_room(connection, tenant_id, more, settings.upload_unfinished_bytes)
        room.add_exactly(tenant_id, used_bytes, more)
    await connection.execute(
        "UPDATE upload SET bytes = $3 WHERE key = $1 AND tenant_id = $2", key, tenant_id, counted_bytes
    )


async def _check_room(connection: Connection, tenant_id: str, size: int, bound: int) -> int:
    """Check the exact count under a lock of the tenant. The caller's transaction holds the lock until its commit.
    Returns the count.
    """
    await lock_name(connection, f"uploads:{tenant_id}")
    used_bytes = await count(connection, tenant_id)
    if used_bytes + size > bound:
        raise TooMany(
            "upload_quota_exceeded",
            f"A tenant has at most {bound} bytes of unfinished uploads: complete some, declare content_length, or wait"
            " until they expire.",
            policy="unfinished-uploads",
            at_most=bound,
            retry_after=_RETRY_SECONDS,
        )
    return used_bytes


async def close(connection: Connection, tenant_id: str, key: str, *, keep: int | None) -> None:
    """Finish the upload. `keep`: an object at the key may stay if it has at most this many bytes; None: no object may
    stay. Housekeeping later deletes an object that may not stay.
    """
    if keep is not None:
        await connection.execute(_FORGET_EXACT, key, tenant_id, keep)
    await connection.execute(_CLOSE, key, tenant_id, -1 if keep is None else keep, timedelta(seconds=_GRACE_SECONDS))


async def keep_prefix(connection: Connection, tenant_id: str, key: str) -> bool:
    """Delete the row of an upload below a prefix, in the transaction that writes the job of its objects. Returns False
    if housekeeping has deleted the objects, or may be deleting them. The caller must then not write the job.
    """
    status = await connection.execute("DELETE FROM upload WHERE key = $1 AND tenant_id = $2 AND open", key, tenant_id)
    return row_count(status) > 0


async def forget(connection: Connection, tenant_id: str, key: str) -> None:
    """Delete the row of the upload, because no client can send to the key any more."""
    await connection.execute("DELETE FROM upload WHERE key = $1 AND tenant_id = $2", key, tenant_id)


async def due(connection: Connection, limit: int = 100) -> list[Due]:
    """The uploads that are due for an inspection, without the quarantined uploads."""
    rows = await connection.fetch(_DUE, timedelta(seconds=_GRACE_SECONDS), limit)
    return [Due(**dict(row)) for row in rows]


#: Called with (connection, an open upload whose object is too large, the object's size).
OnTooLarge: TypeAlias = Callable[[Connection, Due, int], Awaitable[None]]
#: Lends a connection for a block.
Acquire: TypeAlias = Callable[[], AbstractAsyncContextManager[Connection]]


async def inspect(connections: Acquire, store: ObjectStore, upload: Due, on_too_large: OnTooLarge) -> None:
    """Read the size of the object that a client may have sent, and delete an object that is too large. Delete the row
    once no transfer can arrive any more, and no attempt of an external worker waits for the object.

    This function holds no connection while it calls the store.
    """
    if upload.key.endswith("/"):
        await _remove_prefix(connections, store, upload)
        return
    size = await _size_of(store, upload.key)
    if size is not None and size > upload.at_most and upload.open:
        async with connections() as connection, connection.transaction():
            await on_too_large(connection, upload, size)
        # Read the size again, because the client may have replaced the object, and completed the upload before
        # `on_too_large` could refuse it. In this case the object belongs to a job.
        size = await _size_of(store, upload.key)
    if size is not None and size > upload.at_most:
        await store.delete(upload.key)
        REMOVED.labels("too large" if upload.at_most >= 0 else "refused").inc()
        log.info("an upload was removed", key=upload.key, bytes=size)
        size = None
    stored_bytes = size or 0
    async with connections() as connection:
        if upload.transfers_over:
            # At most one of the two statements finds the row.
            await connection.execute(_KEEP_OVER, upload.key, upload.tenant_id, stored_bytes)
            await connection.execute(_FORGET_OVER, upload.key, upload.tenant_id, upload.at_most)
        else:
            grace = timedelta(seconds=_GRACE_SECONDS)
            await connection.execute(
                _INSPECTED, upload.key, upload.url_expired, stored_bytes, INSPECTION_SECONDS, upload.at_most, grace
            )


async def _size_of(store: ObjectStore, key: str) -> int | None:
    """The size of the object at the key. None: there is no object."""
    stored_object = await store.head(key)
    return None if stored_object is None else stored_object.size


async def _remove_prefix(connections: Acquire, store: ObjectStore, upload: Due) -> None:
    """Delete the objects of an upload below a prefix. The upload still has a row, so the process that received the
    objects has died, or is about to write their job. So this function closes the upload first. Then `keep_prefix` finds
    the upload closed, and the job is not written. But if `keep_prefix` came first, this function finds no row. In this
    case the objects belong to a job, and stay.
    """
    async with connections() as connection:
        if not await connection.fetchval(_CONDEMN_PREFIX, upload.key, upload.tenant_id):
            return
    await remove_below(store, upload.key)
    REMOVED.labels("unfinished").inc()
    async with connections() as connection:
        await forget(connection, upload.tenant_id, upload.key)


async def abort_dead_uploads(store: ObjectStore, prefixes: Iterable[str] = ()) -> None:
    """Abort the multipart uploads of dead writers, for the outputs of jobs and below `prefixes`."""
    for prefix in (*prefixes, _JOBS_PREFIX):
        if aborted_uploads := await store.abort_uploads(prefix, older_than=_LONGEST_WRITE):
            log.warning("multipart uploads of dead writers were aborted", prefix=prefix, uploads=aborted_uploads)


async def remove_below(store: ObjectStore, prefix: str) -> None:
    """Delete all objects below `prefix`, and abort the unfinished multipart uploads there."""
    await store.abort_uploads(prefix)
    await store.delete(*[stored.key async for stored in store.list(prefix)])
