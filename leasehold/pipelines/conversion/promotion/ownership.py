"""Who owns which key at the target of promotions, and which call is writing it at the moment.

A call claims all its keys in one transaction, and says in a key's row what it is about to do there before it does it.
So whoever takes back what a call did, also after its process died, knows what to remove and what to restore.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias
from uuid import UUID

import asyncpg

from leasehold.db.database import Connection
from leasehold.domain.errors import Conflict
from leasehold.domain.ids import new_id

#: Seconds after which a call counts as dead. A living one ends before: COPY_SECONDS and UNDO_SECONDS are less together.
LEASE_SECONDS = 900
COPY_SECONDS = 600.0
UNDO_SECONDS = 120.0
#: For so long whoever takes back what the dead have left has their keys, some at a time.
_UNDO_LEASE_SECONDS = 300
_MAX_DEAD = 20

_PLAIN_TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

#: What a call may have done to an object: made it; made it, if nothing lay there, which the target does not tell;
#: overwritten one of the tenant's own, of which a backup was kept.
Reached: TypeAlias = Literal["created", "unsure", "replaced"]


@dataclass(frozen=True, slots=True)
class Turn:
    """The right of one call to write some keys for a job."""

    id: UUID
    tenant_id: str
    job_id: UUID


@dataclass(frozen=True, slots=True)
class Trace:
    """What a call may have left at a key."""

    turn: UUID
    key: str
    reached: Reached | None
    backup: str | None


def folder_of(tenant_id: str) -> str:
    """The tenant's folder at the target. Two tenants never share one, also where letters' case does not count."""
    if _PLAIN_TENANT.fullmatch(tenant_id):
        return tenant_id
    return "~" + hashlib.sha256(tenant_id.encode()).hexdigest()[:32]


_BEGIN = """
-- promotion_begin
UPDATE conversion SET promoting_until = clock_timestamp() + make_interval(secs => $3)
WHERE job_id = $1 AND tenant_id = $2 AND promoted IS NULL
  AND (promoting_until IS NULL OR promoting_until < clock_timestamp())
RETURNING job_id
"""
# In the order of the keys, so that two calls never wait for one another in a circle. $5: which may be replaced.
_CLAIM = """
-- promotion_claim
INSERT INTO promoted_object AS p (key, tenant_id, turn, for_job, until)
SELECT wanted.key, $2, $3, $4, clock_timestamp() + make_interval(secs => $6)
FROM unnest($1::text[]) AS wanted(key) ORDER BY wanted.key
ON CONFLICT (key) DO UPDATE SET turn = excluded.turn, for_job = excluded.for_job, until = excluded.until
WHERE p.tenant_id = excluded.tenant_id AND p.turn IS NULL AND p.key = ANY($5::text[])
RETURNING p.key, p.job_id
"""
_TOUCH = """
-- promotion_touch
UPDATE promoted_object SET reached = $3, backup = $4 WHERE key = $1 AND turn = $2 RETURNING key
"""
_FINISH_JOB = """
-- promotion_finish
UPDATE conversion SET promoted = $3, promoting_until = NULL
WHERE job_id = $1 AND tenant_id = $2 AND promoted IS NULL
RETURNING job_id
"""
_SETTLE = "turn = NULL, for_job = NULL, until = NULL, reached = NULL, backup = NULL"
_FINISH_KEYS = f"""
-- promotion_finish_keys
UPDATE promoted_object SET job_id = $2, {_SETTLE} WHERE turn = $1 AND tenant_id = $3 RETURNING key
"""
_GIVE_UP = """
-- promotion_give_up
UPDATE conversion SET promoting_until = NULL WHERE job_id = $1 AND tenant_id = $2 AND promoted IS NULL
"""
_FORGET_NEW = "DELETE FROM promoted_object WHERE turn = $1 AND key = $2 AND job_id IS NULL"
_LEAVE_OLD = f"""
-- promotion_leave
UPDATE promoted_object SET {_SETTLE} WHERE turn = $1 AND key = $2
"""
# Whoever takes back what the dead did holds their keys meanwhile.
_DEAD = """
-- promotion_dead
UPDATE promoted_object SET until = clock_timestamp() + make_interval(secs => $1)
WHERE key IN (
    SELECT key FROM promoted_object WHERE turn IS NOT NULL AND until < statement_timestamp()
    ORDER BY until LIMIT $2 FOR UPDATE SKIP LOCKED
)
RETURNING turn, key, reached, backup
"""
# The job is ours, so whoever wrote these for it is dead, or has failed to take them back.
_LEFT = """
-- promotion_left
UPDATE promoted_object SET until = clock_timestamp() + make_interval(secs => $3)
WHERE for_job = $1 AND tenant_id = $2 AND turn IS NOT NULL
RETURNING turn, key, reached, backup
"""


async def begin(connection: Connection, tenant_id: str, job_id: UUID) -> tuple[Turn, list[Trace]] | None:
    """Claim the job. Returns the turn, and what earlier calls for it have left: take that back before `claim`.

    None: the job is promoted, or another call is at it.
    """
    async with connection.transaction():
        if await connection.fetchval(_BEGIN, job_id, tenant_id, LEASE_SECONDS) is None:
            return None
        left = await connection.fetch(_LEFT, job_id, tenant_id, _UNDO_LEASE_SECONDS)
    return Turn(new_id(), tenant_id, job_id), _traces(left)


async def claim(
    connection: Connection, turn: Turn, keys: Sequence[str], replaceable: Sequence[str]
) -> Mapping[str, bool]:
    """Claim all the keys, or none. Returns which of them hold an object that the tenant has promoted.

    Raises Conflict when a key is written just now (`promotion_in_progress`), or is another tenant's, or holds an object
    and is not in `replaceable` (`target_exists`).
    """
    async with connection.transaction():
        rows = await connection.fetch(
            _CLAIM, list(keys), turn.tenant_id, turn.id, turn.job_id, list(replaceable), LEASE_SECONDS
        )
        claimed = {row["key"]: row["job_id"] is not None for row in rows}
        missing = sorted(set(keys) - claimed.keys())
        if missing:
            raise await _taken(connection, turn.tenant_id, missing[0])
    return claimed


async def _taken(connection: Connection, tenant_id: str, key: str) -> Conflict:
    busy = await connection.fetchval(
        "SELECT turn IS NOT NULL FROM promoted_object WHERE key = $1 AND tenant_id = $2", key, tenant_id
    )
    return in_progress() if busy else exists(key)


def in_progress() -> Conflict:
    return Conflict("promotion_in_progress", "Another request is promoting it.", retry_after=5)


def exists(key: str) -> Conflict:
    said = f"Something lies at {key} already. With `replace` a request overwrites what its tenant has promoted itself."
    return Conflict("target_exists", said)


async def touch(connection: Connection, turn: Turn, key: str, reached: Reached, backup: str | None = None) -> None:
    """Say what will be done at the key, before it is. Raises Conflict when the turn was lost."""
    if await connection.fetchval(_TOUCH, key, turn.id, reached, backup) is None:
        raise in_progress()


async def finish(connection: Connection, turn: Turn, keys: Sequence[str]) -> None:
    """The keys hold the job's artifacts, and the job is promoted. Raises Conflict when the turn was lost."""
    async with connection.transaction():
        settled = await connection.fetch(_FINISH_KEYS, turn.id, turn.job_id, turn.tenant_id)
        done = await connection.fetchval(_FINISH_JOB, turn.job_id, turn.tenant_id, list(keys))
        if done is None or {row["key"] for row in settled} != set(keys):
            raise in_progress()


async def settle_back(connection: Connection, trace: Trace) -> None:
    """Nothing is left at the key of what the call did: it is free again, or the earlier promotion's."""
    async with connection.transaction():
        await connection.execute(_FORGET_NEW, trace.turn, trace.key)
        await connection.execute(_LEAVE_OLD, trace.turn, trace.key)


async def give_up(connection: Connection, turn: Turn) -> None:
    """Let the next call have the job."""
    await connection.execute(_GIVE_UP, turn.job_id, turn.tenant_id)


async def traces(connection: Connection, turn: Turn) -> list[Trace]:
    """What the call has claimed and done so far."""
    return _traces(
        await connection.fetch("SELECT turn, key, reached, backup FROM promoted_object WHERE turn = $1", turn.id)
    )


async def dead(connection: Connection) -> list[Trace]:
    """What calls that died have left, some of it, held for a while by whoever asks."""
    return _traces(await connection.fetch(_DEAD, _UNDO_LEASE_SECONDS, _MAX_DEAD))


def _traces(rows: Sequence[asyncpg.Record]) -> list[Trace]:
    return [Trace(row["turn"], row["key"], row["reached"], row["backup"]) for row in rows]
