"""Files that external workers hand in: where each may be sent, and whether what came is what was announced.

A file of an attempt has a key of its own epoch, and the upload of it names its task and epoch. So a worker whose lease
was lost can write only where nobody reads, and what an attempt leaves without completing is given up when it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

from leasehold.db.database import Connection, Pool
from leasehold.domain.errors import Invalid, ObjectMissing, ObjectTooLarge
from leasehold.domain.lease import Lease
from leasehold.domain.object_keys import output_key
from leasehold.limits import uploads
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.transitions import settlements
from leasehold.transitions.settlements import Completion, Output, Settled

#: Completions of one tenant whose files one process reads at once: reading them is the store's work, and others' turn.
_READ_AT_ONCE = 2

_HELD = """
-- external_held
SELECT t.step, j.output_prefix FROM task t JOIN job j ON j.id = t.job_id
WHERE t.id = $1 AND t.tenant_id = $2 AND t.lease_owner = $3 AND t.epoch = $4
  AND CASE WHEN t.status = 'running' THEN true ELSE false END
"""
_OPEN = """
-- external_files_open
SELECT key, bytes FROM upload WHERE tenant_id = $1 AND task_id = $2 AND epoch = $3 AND open
"""
_TAKE = """
-- external_files_take
DELETE FROM upload WHERE tenant_id = $1 AND task_id = $2 AND epoch = $3 AND open AND key = ANY($4::text[]) RETURNING key
"""
# The job's lock comes first in whatever ends an attempt, so that none of these is taken by a completion meanwhile.
_GIVE_UP = """
-- external_files_give_up
UPDATE upload u SET open = false, bytes = 0, most = -1, look_at = clock_timestamp()
WHERE u.key IN (
    SELECT o.key FROM upload o LEFT JOIN task t ON t.id = o.task_id
    WHERE o.task_id IS NOT NULL AND o.open AND (t.id IS NULL OR t.status <> 'running' OR t.epoch <> o.epoch)
    LIMIT $1 FOR UPDATE OF o SKIP LOCKED
)
"""


@dataclass(frozen=True, slots=True)
class Announced:
    """A file that is about to be sent; `name` is unique within its step."""

    name: str
    size: int
    content_type: str


@dataclass(frozen=True, slots=True)
class HandedIn:
    """A file that was sent, and what its bytes are."""

    name: str
    sha256: str


async def _place(connection: Connection, tenant_id: str, lease: Lease) -> str | None:
    """The prefix of the attempt's files. None: the lease is not the task's."""
    row = await connection.fetchrow(_HELD, lease.task_id, tenant_id, lease.owner, lease.epoch)
    if row is None:
        return None
    return f"{row['output_prefix']}/{row['step']}.{lease.epoch}"


async def _announced(connection: Connection, tenant_id: str, lease: Lease) -> dict[str, int]:
    """The keys of the attempt's files, and their sizes."""
    rows = await connection.fetch(_OPEN, tenant_id, lease.task_id, lease.epoch)
    return {row["key"]: row["bytes"] for row in rows}


async def _take(connection: Connection, tenant_id: str, lease: Lease, keys: Sequence[str]) -> set[str]:
    rows = await connection.fetch(_TAKE, tenant_id, lease.task_id, lease.epoch, list(keys))
    return {row["key"] for row in rows}


async def announce(
    connection: Connection, settings: Settings, tenant_id: str, lease: Lease, files: Sequence[Announced]
) -> list[str] | None:
    """The keys to which the files may be sent for `upload_url_seconds`. In a transaction. None: the lease is lost.

    Raises Invalid `file_mismatch`, `files_too_large` or `too_many_files`, and TooMany `upload_quota_exceeded`.
    """
    place = await _place(connection, tenant_id, lease)
    if place is None:
        return None
    there = await _announced(connection, tenant_id, lease)
    wanted = {output_key(place, file.name): file for file in files}
    for key, file in wanted.items():
        if there.get(key, file.size) != file.size:
            raise Invalid("file_mismatch", f"{file.name} was announced with another size: give it another name.")
    _check_bounds(settings, there | {key: file.size for key, file in wanted.items()})
    await _take(connection, tenant_id, lease, list(wanted))  # those that are announced again
    for key, file in wanted.items():
        await uploads.open_upload(
            connection,
            settings,
            tenant_id,
            key,
            counted=file.size,
            most=file.size,
            seconds=settings.upload_url_seconds,
            exact=True,
            attempt=(lease.task_id, lease.epoch),
        )
    return [output_key(place, file.name) for file in files]


def _check_bounds(settings: Settings, sizes: dict[str, int]) -> None:
    if len(sizes) > settings.external_files:
        raise Invalid("too_many_files", f"An attempt hands in at most {settings.external_files} files.")
    if sum(sizes.values()) > settings.external_files_bytes:
        most = settings.external_files_bytes
        raise Invalid("files_too_large", f"The files of an attempt have at most {most} bytes in all.")


class Files:
    """Checks what was handed in. One a process."""

    def __init__(self, pool: Pool, store: ObjectStore) -> None:
        self._pool = pool
        self._store = store
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def check(self, tenant_id: str, lease: Lease, files: Sequence[HandedIn]) -> list[Output]:
        """The files as outputs, once their bytes have been read; no connection is held meanwhile. Empty where the
        lease is not the task's (any more): then nothing is read, and completing says what that means.

        Raises Invalid `file_not_announced`, `file_missing` or `file_mismatch`.
        """
        if not files:
            return []
        async with self._pool.acquire() as connection:
            # In this order: who holds the lease after it has looked has had its own files in sight.
            sizes = await _announced(connection, tenant_id, lease)
            place = await _place(connection, tenant_id, lease)
            if place is None:
                return []
        keys = [output_key(place, file.name) for file in files]
        for file, key in zip(files, keys, strict=True):
            if key not in sizes:
                raise _not_announced(file.name)
        async with self._turn(tenant_id):
            return [await self._read(file, key, sizes[key]) for file, key in zip(files, keys, strict=True)]

    @asynccontextmanager
    async def _turn(self, tenant_id: str) -> AsyncIterator[None]:
        turn = self._turns.get(tenant_id)
        if turn is None:
            turn = self._turns[tenant_id] = asyncio.Semaphore(_READ_AT_ONCE)
        async with turn:
            yield

    async def _read(self, file: HandedIn, key: str, size: int) -> Output:
        try:
            found = await self._store.digest(key, max_bytes=size)
        except ObjectMissing:
            raise Invalid("file_missing", f"{file.name} has not been sent.") from None
        except ObjectTooLarge:
            raise Invalid("file_mismatch", f"{file.name} has more bytes than announced.") from None
        if (found.size, found.sha256) != (size, file.sha256):
            raise Invalid("file_mismatch", f"What was sent as {file.name} has another size or SHA-256.")
        return Output(file.name, key, found.size, found.sha256, found.content_type)


def _not_announced(name: str) -> Invalid:
    return Invalid("file_not_announced", f"No URL was given out for {name} in this epoch.")


async def complete(connection: Connection, tenant_id: str, done: Completion) -> Settled:
    """running -> succeeded, with the files that `Files.check` has read; in a transaction that has the job's lock.

    A completion whose answer was lost is answered as `settlements.complete` does: its files are taken already. Raises
    Invalid `file_not_announced` where another completion of the attempt, or its end, was faster.
    """
    held = bool(done.outputs) and await _place(connection, tenant_id, done.lease) is not None
    if held:
        taken = await _take(connection, tenant_id, done.lease, [output.key for output in done.outputs])
        for output in done.outputs:
            if output.key not in taken:
                raise _not_announced(output.name)
    return await settlements.complete(connection, [done])


async def give_up(connection: Connection, limit: int = 1000) -> None:
    """Uploads of attempts that have ended without naming them: what lies there is deleted, now and later."""
    await connection.execute(_GIVE_UP, limit)
