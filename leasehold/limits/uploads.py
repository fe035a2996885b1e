"""Uploads under way: how many bytes a tenant may have unfinished, and what becomes of those that nobody finishes.

A client sends straight to the store, so only a look tells what came. Every address that is handed out has a row before
it has an object; the row stays until nothing that was begun in time can still arrive.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias
from uuid import UUID

import structlog

from leasehold.db.database import Connection, lock_name
from leasehold.domain.errors import TooMany
from leasehold.limits.upload_room import LEAST_COUNTED, UploadRoom, count
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.telemetry.store import REMOVED
from leasehold.transitions.quarantine import not_in

log = structlog.get_logger(__name__)

#: The duty that looks at them.
UPLOADS = "uploads"
#: Between two looks at an object that may still change.
LOOK_SECONDS = 60
#: A URL counts as dead this long after its end: clocks differ.
_GRACE_SECONDS = 60
#: What was begun while the URL lived may arrive for so long.
_SLOWEST = timedelta(days=1)
_RETRY_SECONDS = 60.0
_NO_ATTEMPT = (None, None)
#: No writer of ours needs longer for one object.
_PARTS_LIVE = timedelta(hours=1)
#: Where the outputs of jobs lie. The bucket may hold more than ours.
_JOBS = "jobs/"

_OPEN = """
-- upload_open
INSERT INTO upload (key, tenant_id, open, exact, bytes, most, writable_until, look_at, forget_at, task_id, epoch)
VALUES ($1, $2, true, $8, $3, $4, clock_timestamp() + make_interval(secs => $5),
        clock_timestamp() + make_interval(secs => $6), clock_timestamp() + make_interval(secs => $5) + $7::interval,
        $9, $10)
"""
_EXTEND = """
-- upload_extend
UPDATE upload SET writable_until = clock_timestamp() + make_interval(secs => $3),
    forget_at = clock_timestamp() + make_interval(secs => $3) + $4::interval,
    look_at = least(look_at, clock_timestamp() + make_interval(secs => $5))
WHERE key = $1 AND tenant_id = $2 AND open
  AND EXISTS (SELECT FROM media WHERE original_key = $1 AND status = 'INIT'
              AND expires_at > clock_timestamp() + make_interval(secs => $3))
RETURNING key
"""
# `most` -1: whatever lies there goes, now and when it can no longer be written.
_CLOSE = """
-- upload_close
UPDATE upload SET open = false, bytes = 0, most = least(most, $3),
    look_at = CASE WHEN $3 < 0 THEN clock_timestamp() ELSE greatest(look_at, writable_until + $4::interval) END
WHERE key = $1 AND tenant_id = $2
"""
# An object of that very size is all that can ever lie there.
_FORGET_EXACT = "DELETE FROM upload WHERE key = $1 AND tenant_id = $2 AND exact AND bytes <= $3"
_DUE = f"""
-- uploads_due
SELECT key, tenant_id, open, most, writable_until + $1::interval < clock_timestamp() AS dead,
       forget_at < clock_timestamp() AS over
FROM upload WHERE look_at < statement_timestamp() AND {not_in(UPLOADS, "key", "text")} ORDER BY look_at LIMIT $2
"""
# What is declared counts as declared while it may be sent, and what lies there when it may not.
_LOOKED = """
-- upload_looked
UPDATE upload SET
    bytes = CASE WHEN NOT open THEN 0 WHEN $2 THEN $3 ELSE greatest(bytes, $3) END,
    look_at = CASE WHEN $2 THEN forget_at ELSE clock_timestamp() + make_interval(secs => $4) END
WHERE key = $1 AND look_at < clock_timestamp()
"""


@dataclass(frozen=True, slots=True)
class Due:
    """An upload that is to be looked at. `dead`: nobody may begin to send; `over`: and nothing can still arrive."""

    key: str
    tenant_id: str
    open: bool
    most: int
    dead: bool
    over: bool


async def open_upload(
    connection: Connection,
    settings: Settings,
    tenant_id: str,
    key: str,
    *,
    counted: int,
    most: int,
    seconds: float,
    exact: bool = False,
    attempt: tuple[UUID, int] | tuple[None, None] = _NO_ATTEMPT,
    room: UploadRoom | None = None,
) -> None:
    """Write down what may be sent to `key` (or below it, with a `/` at its end) for `seconds`, before it is.

    `counted`: its bytes until somebody looks. `exact`: the store holds it to them. `attempt`: the task and epoch that
    it ends with (external_files.py). `room`: what this process remembers of tenants' unfinished uploads; far from its
    bound a tenant needs no lock then. In a transaction.
    Raises TooMany `upload_quota_exceeded`.
    """
    size = max(counted, LEAST_COUNTED)
    if room is None or not await room.is_far(connection, tenant_id, size):
        await _check_room(connection, tenant_id, size, settings.upload_unfinished_bytes)
    first_look = seconds + _GRACE_SECONDS if exact or key.endswith("/") else LOOK_SECONDS
    await connection.execute(_OPEN, key, tenant_id, counted, most, seconds, first_look, _SLOWEST, exact, *attempt)


async def _check_room(connection: Connection, tenant_id: str, size: int, bound: int) -> None:
    """One upload of the tenant after another, until each has committed."""
    await lock_name(connection, f"uploads:{tenant_id}")
    if await count(connection, tenant_id) + size > bound:
        raise TooMany(
            "upload_quota_exceeded",
            f"A tenant has at most {bound} bytes of unfinished uploads: complete some, declare content_length, or wait"
            " until they are forgotten.",
            policy="unfinished-uploads",
            most=bound,
            retry_after=_RETRY_SECONDS,
        )


async def extend(connection: Connection, tenant_id: str, key: str, seconds: float) -> bool:
    """Whether a URL for `key` may live for `seconds` from now: it is unfinished, and lives longer itself."""
    found = await connection.fetchval(_EXTEND, key, tenant_id, seconds, _SLOWEST, LOOK_SECONDS)
    return found is not None


async def close(connection: Connection, tenant_id: str, key: str, *, keep: int | None) -> None:
    """It is finished: no object of more than `keep` bytes stays there; None: none at all."""
    if keep is not None:
        await connection.execute(_FORGET_EXACT, key, tenant_id, keep)
    await connection.execute(_CLOSE, key, tenant_id, -1 if keep is None else keep, timedelta(seconds=_GRACE_SECONDS))


async def forget(connection: Connection, tenant_id: str, key: str) -> None:
    """Nothing can be sent there any more."""
    await connection.execute("DELETE FROM upload WHERE key = $1 AND tenant_id = $2", key, tenant_id)


async def due(connection: Connection, limit: int = 100) -> list[Due]:
    rows = await connection.fetch(_DUE, timedelta(seconds=_GRACE_SECONDS), limit)
    return [Due(**dict(row)) for row in rows]


#: Called with an open upload whose object is too large, and the object's size.
OnTooLarge: TypeAlias = Callable[[Connection, Due, int], Awaitable[None]]
#: Gives a connection for as long as it is entered.
Acquire: TypeAlias = Callable[[], AbstractAsyncContextManager[Connection]]


async def look(connections: Acquire, store: ObjectStore, one: Due, on_too_large: OnTooLarge) -> None:
    """Look at what lies where a client may send, and delete what may not. No connection is held meanwhile."""
    if one.key.endswith("/"):  # whoever was receiving it would have forgotten it
        await remove_below(store, one.key)
        REMOVED.labels("unfinished").inc()
        async with connections() as connection:
            await forget(connection, one.tenant_id, one.key)
        return
    there = await store.head(one.key)
    size = 0 if there is None else there.size
    if there is not None and size > one.most:
        if one.open:
            async with connections() as connection, connection.transaction():
                await on_too_large(connection, one, size)
        await store.delete(one.key)
        REMOVED.labels("too large" if one.most >= 0 else "refused").inc()
        log.info("an upload was removed", key=one.key, bytes=size)
        size = 0
    async with connections() as connection:
        if one.over:
            await forget(connection, one.tenant_id, one.key)
        else:
            await connection.execute(_LOOKED, one.key, one.dead, size, LOOK_SECONDS)


async def give_up_parts(store: ObjectStore, prefixes: Iterable[str] = ()) -> None:
    """End multipart uploads whose writer is dead: of jobs' outputs, and below `prefixes`."""
    for prefix in (*prefixes, _JOBS):
        if ended := await store.abort_uploads(prefix, older_than=_PARTS_LIVE):
            log.warning("multipart uploads of dead writers were given up", prefix=prefix, uploads=ended)


async def remove_below(store: ObjectStore, prefix: str) -> None:
    """Delete all objects below `prefix`, those with unfinished parts included."""
    await store.abort_uploads(prefix)
    await store.delete(*[found.key async for found in store.list(prefix)])
