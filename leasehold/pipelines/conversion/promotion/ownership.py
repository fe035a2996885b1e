"""Records which tenant owns which key at the promotion target, and which call is writing the key at the moment. A call
is one request to the promote endpoint. It copies a job's artifacts to the target, which is a bucket or an HTTP file
service.

A call claims all its keys in one transaction. Before the call writes an object, it records its intent in the key's row.
So the rows name the objects to remove and to restore, and the leader (elected for maintenance) can undo a call
whose process died.

These are the columns of a key's row. `turn`: the id of the call that has claimed the key. `until`: the time at which
this call counts as dead. `for_job`: the job that this call promotes. `reached`: the change that this call may have
made. `backup`: the key in the installation's store that may hold a copy of the replaced object. The row names this key
from before the copy is made until the copy is deleted. `job_id`: the job whose artifact lies at the key.

These are columns of a conversion. `promoting_until`: the end of a call's claim of the job. `promoted`: the keys to
which a finished call has copied the job's artifacts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias
from uuid import UUID

import asyncpg

from leasehold.db.database import Connection
from leasehold.domain.errors import Conflict
from leasehold.domain.ids import new_id

#: Seconds after which a call counts as dead. A live call has always ended by then. Such a call undoes the copies of
#: dead calls (UNDO_SECONDS at most), makes its own copies (COPY_SECONDS at most), and perhaps undoes its own copies
#: (UNDO_SECONDS at most).
LEASE_SECONDS = 900
COPY_SECONDS = 600.0  # the longest time for the copies of a call
UNDO_SECONDS = 120.0  # the longest time to undo copies
#: Seconds for which a new call, or the leader, holds the keys of dead calls while it undoes these calls. The
#: number is higher than UNDO_SECONDS, because nobody else may get a key that is still being undone. (To hold a key of a
#: dead call is to set its `until` to a later time. The key's `turn` stays.)
_UNDO_LEASE_SECONDS = 300
#: The most keys of dead calls that the leader holds and undoes at once.
_MAX_DEAD_KEYS = 20

#: A tenant's id that can be the name of the tenant's folder (`folder_of`).
_PLAIN_TENANT = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

#: What a call may have done at a key. `created`: the call created the object. `unsure`: the target does not report
#: whether the call created the object or overwrote another object. `replaced`: the call first made a backup of an
#: object of the tenant, and then overwrote the object.
Change: TypeAlias = Literal["created", "unsure", "replaced"]


@dataclass(frozen=True, slots=True)
class PromoteCall:
    """One call of the promote endpoint. A live call has claimed a job for LEASE_SECONDS. If the call is dead, the
    leader has claimed the job, in order to undo the call.

    `claimed_until`: the end of the claim, as in the conversion's `promoting_until`. This time identifies the claim,
    because each claim of a job ends at a different time. None: the job needs no claim (see _CLAIM_DEAD).
    """

    id: UUID
    tenant_id: str
    job_id: UUID
    claimed_until: datetime | None


@dataclass(frozen=True, slots=True)
class KeyChange:
    """What a call may have done at a key that it has claimed. If `change` is None, there is nothing to undo, because
    the call has done nothing yet, or has finished, or is undone. `backup`: the key in the installation's store that
    holds a copy of the replaced object. This copy must be deleted, even if `change` is None.
    """

    call_id: UUID
    key: str
    change: Change | None
    backup: str | None


def folder_of(tenant_id: str) -> str:
    """The tenant's folder at the target. Two tenants never share a folder, even if the target does not distinguish
    upper and lower case.
    """
    if _PLAIN_TENANT.fullmatch(tenant_id):
        return tenant_id
    return "~" + hashlib.sha256(tenant_id.encode()).hexdigest()[:32]


# Claims the job $1 of the tenant $2 for $3 seconds, unless it is promoted, or another call has claimed it.
_BEGIN = """
-- promotion_begin
UPDATE conversion SET promoting_until = clock_timestamp() + make_interval(secs => $3)
WHERE job_id = $1 AND tenant_id = $2 AND promoted IS NULL
  AND (promoting_until IS NULL OR promoting_until < clock_timestamp())
RETURNING promoting_until
"""
# The statement claims the rows in the order of their keys, so that two calls never deadlock. It claims an existing row
# only if the tenant owns the key, no call has claimed the key, and the object at the key may be replaced. $1: the keys.
# $2: the tenant. $3: the call. $4: its job. $5: the keys whose objects may be replaced. $6: the seconds of the claim.
_CLAIM = """
-- promotion_claim
INSERT INTO promoted_object AS p (key, tenant_id, turn, for_job, until)
SELECT requested.key, $2, $3, $4, clock_timestamp() + make_interval(secs => $6)
FROM unnest($1::text[]) AS requested(key) ORDER BY requested.key
ON CONFLICT (key) DO UPDATE SET turn = excluded.turn, for_job = excluded.for_job, until = excluded.until
WHERE p.tenant_id = excluded.tenant_id AND p.turn IS NULL AND p.key = ANY($5::text[])
RETURNING p.key, p.job_id
"""
# $1: the key. $2: the call. $3: the change that the call is about to make. $4: the key of the backup.
_RECORD_INTENT = """
-- promotion_touch
UPDATE promoted_object SET reached = $3, backup = $4 WHERE key = $1 AND turn = $2 RETURNING key
"""
# $1: the job. $2: the tenant. $3: the keys to which the job's artifacts were copied.
_FINISH_JOB = """
-- promotion_finish
UPDATE conversion SET promoted = $3, promoting_until = NULL
WHERE job_id = $1 AND tenant_id = $2 AND promoted IS NULL
RETURNING job_id
"""
# Whether the job $1 of the tenant $2 is promoted to the keys $3. The row lock waits for the end of a transaction that
# has run _FINISH_JOB.
_IS_FINISHED = """
-- promotion_is_finished
SELECT promoted IS NOT DISTINCT FROM $3::jsonb FROM conversion WHERE job_id = $1 AND tenant_id = $2 FOR UPDATE
"""
# The keys that the call $1 has claimed. The row locks wait for a COMMIT of `finish` that is under way. Otherwise the
# job could become promoted while its objects are being removed.
_CHANGES = """
-- promotion_changes
SELECT turn, key, reached, backup FROM promoted_object WHERE turn = $1 FOR UPDATE
"""
#: SQL: the assignments in a key's row that end the claim of a call.
_NO_TURN = "turn = NULL, for_job = NULL, until = NULL, reached = NULL, backup = NULL"
# The statement frees the keys without a backup. The call keeps the other keys until it has deleted their backups. The
# statement sets their `until` to the current time. So if the call dies before it has deleted the backups, the leader
# finds these keys and deletes the backups.
# $1: the call. $2: its job. $3: the tenant.
_FINISH_KEYS = f"""
-- promotion_finish_keys
WITH freed_keys AS (
    UPDATE promoted_object SET job_id = $2, {_NO_TURN}
    WHERE turn = $1 AND tenant_id = $3 AND backup IS NULL RETURNING key
), kept_keys AS (
    UPDATE promoted_object SET job_id = $2, reached = NULL, until = clock_timestamp()
    WHERE turn = $1 AND tenant_id = $3 AND backup IS NOT NULL RETURNING key
)
SELECT key FROM freed_keys UNION ALL SELECT key FROM kept_keys
"""
# $1: the job. $2: the tenant. $3: the end of the claim, which identifies the claim.
_GIVE_UP = """
-- promotion_give_up
UPDATE conversion SET promoting_until = NULL
WHERE job_id = $1 AND tenant_id = $2 AND promoted IS NULL AND promoting_until = $3
"""
# Deletes the row of a key at which no job's artifact lies. $1: the call. $2: the key.
_FORGET_KEY = "DELETE FROM promoted_object WHERE turn = $1 AND key = $2 AND job_id IS NULL"
# Records that the key $2, which the call $1 has claimed, holds the replaced object again.
_RECORD_RESTORED = "UPDATE promoted_object SET reached = NULL WHERE turn = $1 AND key = $2"
# Ends the claim of the call $1 at the key $2.
_RELEASE_KEY = f"""
-- promotion_leave
UPDATE promoted_object SET {_NO_TURN} WHERE turn = $1 AND key = $2
"""
# The worker that undoes dead calls holds their keys, and claims their jobs as a new call does. Otherwise a new call
# could promote a job at the same time, and the worker would remove the new call's object. A job that is deleted or
# promoted needs no claim, because no new call can begin for it. $1: the seconds of the hold. $2: the largest number of
# keys.
_CLAIM_DEAD = """
-- promotion_dead
WITH dead_keys AS MATERIALIZED (
    SELECT key, for_job FROM promoted_object WHERE turn IS NOT NULL AND until < statement_timestamp()
    ORDER BY until LIMIT $2
), free_jobs AS (
    SELECT job_id FROM conversion
    WHERE job_id IN (SELECT for_job FROM dead_keys) AND promoted IS NULL
      AND (promoting_until IS NULL OR promoting_until < clock_timestamp())
    FOR UPDATE SKIP LOCKED
), claimed_jobs AS (
    UPDATE conversion SET promoting_until = clock_timestamp() + make_interval(secs => $1)
    WHERE job_id IN (SELECT job_id FROM free_jobs)
    RETURNING job_id, promoting_until
), locked_keys AS (
    -- FOR UPDATE checks the time again, on the row's newest version: another worker may have held the key meanwhile.
    SELECT key FROM promoted_object
    WHERE turn IS NOT NULL AND until < statement_timestamp() AND key IN (
        SELECT dead_keys.key FROM dead_keys
        WHERE dead_keys.for_job IN (SELECT job_id FROM claimed_jobs)
           OR NOT EXISTS (SELECT 1 FROM conversion c WHERE c.job_id = dead_keys.for_job AND c.promoted IS NULL))
    FOR UPDATE SKIP LOCKED
)
UPDATE promoted_object SET until = clock_timestamp() + make_interval(secs => $1)
WHERE key IN (SELECT key FROM locked_keys)
RETURNING turn, key, reached, backup, tenant_id, for_job,
          (SELECT promoting_until FROM claimed_jobs WHERE claimed_jobs.job_id = for_job) AS claimed_until
"""
# The statement holds the keys that earlier calls have claimed for the job. Each of these calls is dead, or has ended
# without undoing its copies. A live call would still have its claim of the job, and then this call could not have
# claimed the job.
# $1: the job. $2: the tenant. $3: the seconds of the hold.
_HOLD_EARLIER_KEYS = """
-- promotion_left
UPDATE promoted_object SET until = clock_timestamp() + make_interval(secs => $3)
WHERE for_job = $1 AND tenant_id = $2 AND turn IS NOT NULL
RETURNING turn, key, reached, backup
"""


async def begin(connection: Connection, tenant_id: str, job_id: UUID) -> tuple[PromoteCall, list[KeyChange]] | None:
    """Claim the job. Returns the call, and the changes of earlier calls for the job. The caller must undo these changes
    before it calls `claim`.

    Returns None if the job is promoted already, or if another call is promoting it.
    """
    async with connection.transaction():
        claimed_until = await connection.fetchval(_BEGIN, job_id, tenant_id, LEASE_SECONDS)
        if claimed_until is None:
            return None
        rows = await connection.fetch(_HOLD_EARLIER_KEYS, job_id, tenant_id, _UNDO_LEASE_SECONDS)
    return PromoteCall(new_id(), tenant_id, job_id, claimed_until), _changes_in(rows)


async def claim(
    connection: Connection, call: PromoteCall, keys: Sequence[str], replaceable: Sequence[str]
) -> Mapping[str, bool]:
    """Claim all the keys, or none. Returns, for each key, whether it holds an object that the tenant has promoted.

    Raises Conflict `promotion_in_progress` if another call is writing a key. Raises Conflict `target_exists` if a key
    belongs to another tenant, or holds an object and is not in `replaceable`.
    """
    async with connection.transaction():
        rows = await connection.fetch(
            _CLAIM, list(keys), call.tenant_id, call.id, call.job_id, list(replaceable), LEASE_SECONDS
        )
        has_own_object = {row["key"]: row["job_id"] is not None for row in rows}
        not_claimed = sorted(set(keys) - has_own_object.keys())
        if not_claimed:
            raise await _conflict_at(connection, call.tenant_id, not_claimed[0])
    return has_own_object


async def _conflict_at(connection: Connection, tenant_id: str, key: str) -> Conflict:
    """The error for a key that the call could not claim."""
    is_being_written = await connection.fetchval(
        "SELECT turn IS NOT NULL FROM promoted_object WHERE key = $1 AND tenant_id = $2", key, tenant_id
    )
    return in_progress() if is_being_written else target_exists(key)


def in_progress() -> Conflict:
    return Conflict("promotion_in_progress", "Another request is promoting to the same place.", retry_after=5)


def target_exists(key: str) -> Conflict:
    message = f"There is an object at {key} already. `replace` overwrites only objects that the same tenant promoted."
    return Conflict("target_exists", message)


async def record_intent(
    connection: Connection, call: PromoteCall, key: str, change: Change | None, backup: str | None = None
) -> None:
    """Record what the call is about to do at the key. If `change` is None, the call only makes the backup. Raises
    Conflict if the call has lost its claim of the key.
    """
    if await connection.fetchval(_RECORD_INTENT, key, call.id, change, backup) is None:
        raise in_progress()


async def finish(connection: Connection, call: PromoteCall, keys: Sequence[str]) -> None:
    """Record that the keys hold the job's artifacts and that the job is promoted. Keys with a backup stay claimed until
    `record_undone`. Raises Conflict if the call has lost its claims.
    """
    async with connection.transaction():
        key_rows = await connection.fetch(_FINISH_KEYS, call.id, call.job_id, call.tenant_id)
        finished_job = await connection.fetchval(_FINISH_JOB, call.job_id, call.tenant_id, list(keys))
        if finished_job is None or {row["key"] for row in key_rows} != set(keys):
            raise in_progress()


async def is_finished(connection: Connection, call: PromoteCall, keys: Sequence[str]) -> bool:
    """Whether the job is promoted to the keys. The answer is final, because the statement waits for a `finish` whose
    COMMIT is still under way.
    """
    return bool(await connection.fetchval(_IS_FINISHED, call.job_id, call.tenant_id, list(keys)))


async def record_restored(connection: Connection, change: KeyChange) -> None:
    """Record that the key holds the replaced object again. The backup must still be deleted."""
    await connection.execute(_RECORD_RESTORED, change.call_id, change.key)


async def record_undone(connection: Connection, change: KeyChange) -> None:
    """Record that nothing of the call is left to undo or to delete at the key. The key is then free, or belongs to the
    last job that was promoted to it.
    """
    async with connection.transaction():
        await connection.execute(_FORGET_KEY, change.call_id, change.key)
        await connection.execute(_RELEASE_KEY, change.call_id, change.key)


async def give_up(connection: Connection, call: PromoteCall) -> None:
    """End the call's claim of the job, so that another call can claim the job. If the call has lost its claim already,
    because its process was frozen too long, this function changes nothing.
    """
    await connection.execute(_GIVE_UP, call.job_id, call.tenant_id, call.claimed_until)


async def changes_of(connection: Connection, call: PromoteCall) -> list[KeyChange]:
    """The keys that the call has claimed, and what it may have done at each so far. If the call has finished, the
    result has nothing to undo. This also holds while the COMMIT of `finish` is still under way, because the statement
    waits for this COMMIT.
    """
    return _changes_in(await connection.fetch(_CHANGES, call.id))


async def claim_dead(connection: Connection) -> tuple[list[KeyChange], set[PromoteCall]]:
    """Hold the keys of some dead calls and claim their jobs for the caller. Returns the changes of these calls, and the
    calls. The caller ends the claim of each job with `give_up`.
    """
    rows = await connection.fetch(_CLAIM_DEAD, _UNDO_LEASE_SECONDS, _MAX_DEAD_KEYS)
    calls = {PromoteCall(row["turn"], row["tenant_id"], row["for_job"], row["claimed_until"]) for row in rows}
    return _changes_in(rows), calls


def _changes_in(rows: Sequence[asyncpg.Record]) -> list[KeyChange]:
    return [KeyChange(row["turn"], row["key"], row["reached"], row["backup"]) for row in rows]
