"""Files that external workers upload for an attempt. The worker announces files (`announce`) and uploads them. When the
worker completes the attempt, the API verifies the files (`Files.check`) and makes them the step's outputs (`complete`).

The key of a file contains the attempt's epoch, so a worker that has lost its lease can write only to keys that nobody
reads. From `announce` to `complete`, each file has a row in the table `upload`, with the task and the epoch. If the
attempt ends and the file is not among its outputs, housekeeping finds this row (`give_up`) and deletes the file.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID
from weakref import WeakValueDictionary

from leasehold.db.database import Connection, Pool, row_count, unindexed
from leasehold.domain.errors import Invalid, ObjectMissing, ObjectTooLarge
from leasehold.domain.lease import Lease
from leasehold.domain.object_keys import output_key
from leasehold.limits import uploads
from leasehold.limits.upload_room import UploadRoom
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.transitions import settlements
from leasehold.transitions.settlements import Completion, Output, Settled
from leasehold.transitions.sweeps import EXPIRED

#: How many completions of one tenant a process verifies at once. A higher number would slow the object store for other
#: tenants.
_MAX_VERIFICATIONS = 2

# Finds a row only if the lease is still held. `unindexed`: PostgreSQL finds the task by its id, not by an index of
# running tasks.
_FILES_PREFIX = f"""
-- external_held
SELECT t.step, j.output_prefix FROM task t JOIN job j ON j.id = t.job_id
WHERE t.id = $1 AND t.tenant_id = $2 AND t.lease_owner = $3 AND t.epoch = $4
  AND {unindexed("t.status = 'running'")}
"""
# The announced files of the attempt that the worker has not completed yet (`open`). Reads the announced size from
# `most` and not from `bytes`, because after the URL has expired, `bytes` is the size of the stored object.
_ANNOUNCED = """
-- external_files_open
SELECT key, most FROM upload WHERE tenant_id = $1 AND task_id = $2 AND epoch = $3 AND open
"""
# Deletes the rows of announced files of the attempt, and returns the keys that had a row.
_TAKE = """
-- external_files_take
DELETE FROM upload WHERE tenant_id = $1 AND task_id = $2 AND epoch = $3 AND open AND key = ANY($4::text[]) RETURNING key
"""
# Abandons files of attempts that have ended, because such an attempt can no longer complete with its files.
# `most = -1`: housekeeping deletes any object at the key (see _CLOSE in uploads.py).
_GIVE_UP = """
-- external_files_give_up
UPDATE upload u SET open = false, bytes = 0, most = -1, look_at = clock_timestamp()
WHERE u.key IN (
    SELECT open_upload.key FROM upload open_upload LEFT JOIN task t ON t.id = open_upload.task_id
    WHERE open_upload.task_id IS NOT NULL AND open_upload.open
      AND (t.id IS NULL OR t.status <> 'running' OR t.epoch <> open_upload.epoch)
    LIMIT $1 FOR UPDATE OF open_upload SKIP LOCKED
)
"""
# Writes a row of `upload` for each key of an output to which an external worker may still be sending an object. $1: the
# jobs; EXPIRED restricts them to the jobs past `expires_at`. $2: the longest time for which a URL is valid. $3: the
# time that the slowest transfer takes. All URLs of a job were issued before the job ended, so the last transfer ends at
# most $2 + $3 after the job. `most = -1`: housekeeping deletes any object at the key.
_FORGET_WITH_JOBS = f"""
-- external_files_forget_with_jobs
INSERT INTO upload (key, tenant_id, open, exact, bytes, most, writable_until, look_at, forget_at)
SELECT o.key, j.tenant_id, false, false, 0, -1,
       j.finished_at + $2::interval, j.finished_at + $2::interval + $3::interval,
       j.finished_at + $2::interval + $3::interval
FROM output o JOIN task t ON t.id = o.task_id JOIN job j ON j.id = o.job_id
WHERE o.{EXPIRED} AND j.finished_at + $2::interval + $3::interval > clock_timestamp() AND starts_with(t.queue, 'ext:')
ON CONFLICT (key) DO NOTHING
"""
#: The highest value that LEASEHOLD_UPLOAD_URL_SECONDS may have.
_LONGEST_URL = timedelta(seconds=900)


@dataclass(frozen=True, slots=True)
class AnnouncedFile:
    """A file that the external worker will upload. `name` is unique within its step."""

    name: str
    size: int
    content_type: str


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """A file that the external worker has uploaded, with the SHA-256 that the worker declares."""

    name: str
    sha256: str


async def _prefix_of(connection: Connection, tenant_id: str, lease: Lease) -> str | None:
    """The prefix of the keys of the attempt's files. Returns None if the attempt has lost the lease."""
    row = await connection.fetchrow(_FILES_PREFIX, lease.task_id, tenant_id, lease.owner, lease.epoch)
    if row is None:
        return None
    return f"{row['output_prefix']}/{row['step']}.{lease.epoch}"


async def _announced_sizes(connection: Connection, tenant_id: str, lease: Lease) -> dict[str, int]:
    """The files that were announced for the attempt: key -> size."""
    rows = await connection.fetch(_ANNOUNCED, tenant_id, lease.task_id, lease.epoch)
    return {row["key"]: row["most"] for row in rows}


async def _take(connection: Connection, tenant_id: str, lease: Lease, keys: Sequence[str]) -> set[str]:
    """Delete the rows of these keys in the table `upload`. Returns the keys that had a row."""
    rows = await connection.fetch(_TAKE, tenant_id, lease.task_id, lease.epoch, list(keys))
    return {row["key"] for row in rows}


async def announce(
    connection: Connection,
    settings: Settings,
    room: UploadRoom,
    tenant_id: str,
    lease: Lease,
    files: Sequence[AnnouncedFile],
) -> list[str] | None:
    """Write a row of `upload` for each file. Returns the keys to which the worker may upload the files for
    `upload_url_seconds`, in the order of `files`. Returns None if the lease is lost. Call this in a transaction that
    has locked the job (with `lock` of transitions/external.py), because two calls at once for the same file would
    conflict. `room`: the estimates of the bytes that each tenant's unfinished uploads take.

    Raises Invalid `file_mismatch`, `files_too_large` or `too_many_files`, and TooMany `upload_quota_exceeded`.
    """
    prefix = await _prefix_of(connection, tenant_id, lease)
    if prefix is None:
        return None
    sizes = await _announced_sizes(connection, tenant_id, lease)
    by_key = {output_key(prefix, file.name): file for file in files}
    for file in files:  # not over `by_key`, because two announced files of the same name must have the same size
        if sizes.setdefault(output_key(prefix, file.name), file.size) != file.size:
            raise Invalid("file_mismatch", f"{file.name} was announced with another size: give it another name.")
    _check_bounds(settings, sizes)
    await _take(connection, tenant_id, lease, list(by_key))  # deletes the rows of files that are announced again
    for key, file in by_key.items():
        await uploads.open_upload(
            connection,
            settings,
            tenant_id,
            key,
            counted_bytes=file.size,
            at_most=file.size,
            seconds=settings.upload_url_seconds,
            room=room,
            exact=True,  # the URL admits exactly `counted_bytes`
            attempt=(lease.task_id, lease.epoch),
        )
    return [output_key(prefix, file.name) for file in files]


def _check_bounds(settings: Settings, sizes: dict[str, int]) -> None:
    if len(sizes) > settings.external_files:
        raise Invalid("too_many_files", f"An attempt may have at most {settings.external_files} files.")
    if sum(sizes.values()) > settings.external_files_bytes:
        at_most = settings.external_files_bytes
        raise Invalid("files_too_large", f"The files of an attempt have at most {at_most} bytes in all.")


class Files:
    """Verifies that uploaded files have the declared sizes and SHA-256. Each API process has one `Files`."""

    def __init__(self, pool: Pool, store: ObjectStore) -> None:
        self._pool = pool
        self._store = store
        self._semaphores: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by tenant

    async def check(self, tenant_id: str, lease: Lease, files: Sequence[UploadedFile]) -> list[Output]:
        """Read the files' bytes from the store, and return the files as outputs. Holds no connection while it reads.

        If the lease is lost, `check` reads nothing and returns an empty list, because `complete` then reports the lost
        lease. Raises Invalid `file_not_announced`, `file_missing` or `file_mismatch`.
        """
        if not files:
            return []
        async with self._pool.acquire() as connection:
            # Read the sizes first, then the lease. In the other order the lease could end in between, and the sizes
            # would be missing although the lease had seemed valid.
            sizes = await _announced_sizes(connection, tenant_id, lease)
            prefix = await _prefix_of(connection, tenant_id, lease)
            if prefix is None:
                return []
        keys = [output_key(prefix, file.name) for file in files]
        for file, key in zip(files, keys, strict=True):
            if key not in sizes:
                raise _not_announced(file.name)
        async with self._verification_turn(tenant_id):
            return [await self._verify(file, key, sizes[key]) for file, key in zip(files, keys, strict=True)]

    @asynccontextmanager
    async def _verification_turn(self, tenant_id: str) -> AsyncIterator[None]:
        """Wait until fewer than _MAX_VERIFICATIONS completions of the tenant are in this block."""
        semaphore = self._semaphores.get(tenant_id)
        if semaphore is None:
            semaphore = self._semaphores[tenant_id] = asyncio.Semaphore(_MAX_VERIFICATIONS)
        async with semaphore:
            yield

    async def _verify(self, file: UploadedFile, key: str, size: int) -> Output:
        try:
            stored_object = await self._store.digest(key, max_bytes=size)
        except ObjectMissing:
            raise Invalid("file_missing", f"{file.name} has not been uploaded.") from None
        except ObjectTooLarge:
            raise Invalid("file_mismatch", f"{file.name} has more bytes than announced.") from None
        if (stored_object.size, stored_object.sha256) != (size, file.sha256):
            raise Invalid("file_mismatch", f"The object uploaded as {file.name} has another size or SHA-256.")
        return Output(file.name, key, stored_object.size, stored_object.sha256, stored_object.content_type)


def _not_announced(name: str) -> Invalid:
    return Invalid("file_not_announced", f"The API issued no upload URL for {name} in this epoch.")


async def complete(connection: Connection, tenant_id: str, completion: Completion) -> Settled:
    """Complete the task (running -> succeeded) with the files that `Files.check` has verified. Call this in a
    transaction that has locked the job.

    A worker may repeat the call because the answer to the first call was lost. In this case the attempt has ended, its
    files are outputs already, and `settlements.complete` recognises the repetition. Raises Invalid `file_not_announced`
    if the row of a file that `Files.check` has verified does not exist any more.
    """
    lease, outputs = completion.lease, completion.outputs
    if outputs and await _prefix_of(connection, tenant_id, lease) is not None:
        taken_keys = await _take(connection, tenant_id, lease, [output.key for output in outputs])
        for output in outputs:
            if output.key not in taken_keys:
                raise _not_announced(output.name)
    return await settlements.complete(connection, [completion])


async def forget_with_jobs(connection: Connection, job_ids: Sequence[UUID]) -> None:
    """Call this before these jobs are deleted. Housekeeping then watches the keys of the jobs' files, until no transfer
    to them can arrive any more.

    A completed file has no row of `upload`. While the job exists, the file needs no row, because a late transfer can
    only store an object of the announced size, and this object is deleted together with the job. But without a row, an
    object that arrives after the job's deletion would stay for good.
    """
    await connection.execute(_FORGET_WITH_JOBS, list(job_ids), _LONGEST_URL, uploads.SLOWEST_TRANSFER)


async def give_up(connection: Connection, limit: int = 1000) -> bool:
    """Abandon at most `limit` files that a worker announced for an attempt, but did not name before the attempt ended.
    Housekeeping then deletes their objects, even those that arrive later. Returns True if there may be more such files.
    """
    return row_count(await connection.execute(_GIVE_UP, limit)) >= limit
