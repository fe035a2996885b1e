"""Writes and reads the rows of generations and of their source images, for the endpoints and the steps. A generation is
a job that orders images or a video from an outside provider.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg

from leasehold.db.database import Connection
from leasehold.domain.errors import Conflict, Unavailable
from leasehold.transitions import limits
from leasehold.transitions.jobs import NewJob
from leasehold.transitions.limits import Submitted
from leasehold.transitions.moves import tenant_stays
from leasehold.transitions.quarantine import not_in

Row: TypeAlias = asyncpg.Record
#: The name of the duty (a loop of a worker) that deletes expired source images. An image that the duty cannot delete is
#: put into quarantine (set aside, and tried again later) under this name.
SOURCES = "expired_sources"
# SQL: `expires_at` of a condemned source image, whose object is being deleted.
_CONDEMNED = "'-infinity'::timestamptz"
#: After this many seconds a condemned image is usually deleted, and can be uploaded again.
_DELETION_SECONDS = 1
#: Statistics count at most this many generations of a tenant.
MAX_COUNTED = 100_000
#: `holders`, which finds the jobs that have a given order, searches at most this many generations.
MAX_SEARCHED = 10_000


# SQL: the step `submit` of the job `j` has recorded that it is about to order, and has not succeeded.
_HAS_INTENT = """EXISTS (SELECT FROM task s JOIN note n ON n.task_id = s.id
    WHERE s.job_id = j.id AND s.step = 'submit' AND s.status <> 'succeeded' AND n.value ? 'asked_at')"""


@dataclass(frozen=True, slots=True)
class NewGeneration:
    """`task_id`: the order's id, which the client may choose. It is not the id of a row of `task`. `server_id`: the
    label of the workers that may submit the order. `request_hash`: a hash that is the same if a client repeats the same
    order.
    """

    job: NewJob
    task_id: str
    kind: str
    server_id: str
    request_hash: bytes


@dataclass(frozen=True, slots=True)
class WithdrawnGeneration:
    """What a withdrawal needs of a generation. A withdrawal is a job that cancels the generation's order at the
    provider. `submitted`: the value of the submit step, once that step has succeeded, or once a person has found the
    order; otherwise None. `is_unknown`: the submit step may have sent the order, but has not succeeded. So an order may
    exist although `submitted` is None.
    """

    job_status: str
    params: Mapping[str, Any]
    submitted: Mapping[str, Any] | None
    is_unknown: bool = False


@dataclass(frozen=True, slots=True)
class RetriedOrder:
    """The order of a generation whose job was retried. `deadline_at`: the order's own deadline. `is_made`: the provider
    has made the files, and the job goes on with storing them.
    """

    deadline_at: datetime
    is_made: bool


async def create(connection: Connection, new: NewGeneration) -> Submitted | UUID:
    """Write the job and the row of its generation. If the same order exists already, write nothing and return the UUID
    of its job.

    Raises Conflict `task_id_reused` if the task_id belongs to a different order. Raises Conflict `result_consumed` if a
    client has consumed the result of the same order, because nobody can read that result any more.
    """
    while True:
        try:
            async with connection.transaction():
                submitted = await limits.submit(connection, new.job)
                await connection.execute(
                    "INSERT INTO generation (job_id, tenant_id, task_id, kind, server_id, request_hash)"
                    " VALUES ($1, $2, $3, $4, $5, $6)",
                    new.job.id, new.job.tenant_id, new.task_id, new.kind, new.server_id, new.request_hash,
                )  # fmt: skip
        except asyncpg.UniqueViolationError as error:
            if error.constraint_name != "generation_task_id":
                raise
        else:
            return submitted
        job_id = await existing_order(connection, new)  # raises Conflict as this function does
        if job_id is not None:
            return job_id
        # The job of that order was deleted or has expired, so its task_id is free again. Try once more.


async def existing_order(connection: Connection, new: NewGeneration) -> UUID | None:
    """The job of the same order, if it exists already. Raises Conflict as `create` does.

    A deleted or expired job does not count. If its rows still exist, this function makes its task_id free again.
    """
    row = await connection.fetchrow(
        "SELECT g.job_id, g.request_hash, g.consumed_at,"
        " j.keep_seconds = 0 OR coalesce(j.expires_at <= clock_timestamp(), false) AS is_gone"
        " FROM generation g JOIN job j ON j.id = g.job_id WHERE g.tenant_id = $1 AND g.task_id = $2",
        new.job.tenant_id,
        new.task_id,
    )
    if row is None:
        return None
    if row["is_gone"]:
        # No client can use the new task_id, because it contains a space, and a client's task_id contains no space.
        await connection.execute("UPDATE generation SET task_id = 'gone ' || job_id WHERE job_id = $1", row["job_id"])
        return None
    if row["request_hash"] != new.request_hash:
        raise Conflict("task_id_reused", "Another generation has this task_id.")
    if row["consumed_at"] is not None:
        raise Conflict(
            "result_consumed", "This order has ended, and its result was consumed. To order again, use another task_id."
        )
    job_id: UUID = row["job_id"]
    return job_id


# $1: the tenant. $2: the task_id. $3: the kind. `steps`: name of a step -> its status. `stored`: the result of the step
# `store`. `fail_code`: the provider's code, from the note of the failed step. `keys`: the keys of the outputs.
_FIND = f"""
-- generation
SELECT g.job_id, g.task_id, g.kind, g.server_id, g.created_at, g.consumed_at,
       j.status, j.event_seq, j.error, j.finished_at, j.expires_at,
       (SELECT jsonb_object_agg(t.step, t.status) FROM task t WHERE t.job_id = j.id) AS steps,
       (SELECT r.value FROM task t JOIN result r ON r.task_id = t.id WHERE t.job_id = j.id AND t.step = 'store')
           AS stored,
       (SELECT n.value ->> 'fail_code' FROM task t JOIN note n ON n.task_id = t.id
        WHERE t.job_id = j.id AND t.status = 'failed' LIMIT 1) AS fail_code,
       {_HAS_INTENT} AS has_intent,
       -- A name is `NUMBER.EXTENSION`. As text, 10 would come before 2.
       (SELECT array_agg(o.key ORDER BY split_part(o.name, '.', 1)::int) FROM output o WHERE o.job_id = j.id) AS keys
FROM generation g JOIN job j ON j.id = g.job_id
WHERE g.tenant_id = $1 AND g.task_id = $2 AND g.kind = $3 AND g.consumed_at IS NULL
  AND (j.expires_at IS NULL OR j.expires_at > clock_timestamp())
"""


async def find(connection: Connection, tenant_id: str, task_id: str, kind: str) -> Row | None:
    """The tenant's generation with this task_id. Returns None if there is no such generation, or if its result has
    expired or was consumed.
    """
    return await connection.fetchrow(_FIND, tenant_id, task_id, kind)


async def consume(connection: Connection, tenant_id: str, job_id: UUID) -> bool:
    """Mark the result of a finished generation as consumed, so that no later request finds it. Returns False if another
    request has consumed it.
    """
    return bool(
        await connection.fetchval(
            "UPDATE generation SET consumed_at = clock_timestamp()"
            " WHERE job_id = $1 AND tenant_id = $2 AND consumed_at IS NULL RETURNING true",
            job_id,
            tenant_id,
        )
    )


async def forget_consumption(connection: Connection, job_id: UUID) -> None:
    """Let clients find the next result of a retried generation, even if a client has consumed the earlier failure."""
    await connection.execute("UPDATE generation SET consumed_at = NULL WHERE job_id = $1", job_id)


async def retried_order(connection: Connection, job_id: UUID) -> RetriedOrder | None:
    """The order of a generation whose job was just retried. Returns None if the job is not a generation."""
    row = await connection.fetchrow(
        "SELECT (j.params ->> 'deadline_at')::timestamptz AS deadline_at,"
        " EXISTS (SELECT FROM task t WHERE t.job_id = j.id AND t.step = 'poll' AND t.status = 'succeeded') AS is_made"
        " FROM generation g JOIN job j ON j.id = g.job_id WHERE g.job_id = $1",
        job_id,
    )
    return None if row is None else RetriedOrder(row["deadline_at"], row["is_made"])


async def owner(connection: Connection, job_id: UUID) -> Row | None:
    """The tenant and the job status of a generation. Returns None if there is no such generation. The generation may
    belong to any tenant, so call this only after the signature of the provider's callback is verified.
    """
    return await connection.fetchrow(
        "SELECT g.tenant_id, j.status FROM generation g JOIN job j ON j.id = g.job_id WHERE g.job_id = $1", job_id
    )


async def withdrawn(
    connection: Connection, job_id: UUID, tenant_id: str, withdrawal_id: UUID
) -> WithdrawnGeneration | None:
    """The generation `job_id`, whose order the withdrawal `withdrawal_id` cancels. If the generation is deleted, this
    function returns the part that `withdrawals.keep_orders` has copied into the withdrawal. Returns None if the
    generation is deleted and nothing was copied, because it had no order at the provider.
    """
    row = await connection.fetchrow(
        "SELECT j.status, j.params,"
        " (SELECT r.value FROM task t JOIN result r ON r.task_id = t.id WHERE t.job_id = j.id AND t.step = 'submit')"
        f" AS submitted, {_HAS_INTENT} AS is_unknown"
        " FROM generation g JOIN job j ON j.id = g.job_id WHERE j.id = $1 AND g.tenant_id = $2",
        job_id,
        tenant_id,
    )
    if row is not None:
        return WithdrawnGeneration(row["status"], row["params"], row["submitted"], row["is_unknown"])
    # The generation is deleted, so read the copied `order` from the withdrawal's row. The parameters that the
    # withdrawal's attempt has may be older than the copy.
    kept = await connection.fetchval("SELECT params -> 'order' FROM job WHERE id = $1", withdrawal_id)
    if kept is None:
        return None
    # `keep_orders` has left out the prompt, which GenerationParams requires.
    return WithdrawnGeneration("cancelled", {"prompt": ""} | kept["params"], {"ref": kept["ref"]})


async def orders_under_way(connection: Connection, job_ids: Sequence[UUID]) -> list[tuple[UUID, str]]:
    """Those of the jobs that are generations whose order the provider has accepted, and has not reported as finished.
    Returns the job and the tenant of each.
    """
    rows = await connection.fetch(
        "SELECT g.job_id, g.tenant_id FROM generation g"
        " JOIN task s ON s.job_id = g.job_id AND s.step = 'submit' JOIN result r ON r.task_id = s.id"
        " JOIN task p ON p.job_id = g.job_id AND p.step = 'poll'"
        " WHERE g.job_id = ANY($1::uuid[]) AND s.status = 'succeeded' AND r.value ? 'ref' AND p.status <> 'succeeded'"
        " ORDER BY g.job_id",
        list(job_ids),
    )
    return [(row["job_id"], row["tenant_id"]) for row in rows]


# The jobs other than $1 that have the order $3 of the provider $2. No index has the ids of orders, so the statement
# searches the newest $4 generations of all tenants. `r.value` exists if the step `submit` has succeeded, or if the
# generation has adopted an order that a person found.
_HOLDERS = """
-- generation_holders
SELECT j.params FROM (SELECT job_id FROM generation ORDER BY job_id DESC LIMIT $4) AS newest
JOIN task s ON s.job_id = newest.job_id AND s.step = 'submit' JOIN result r ON r.task_id = s.id
JOIN job j ON j.id = newest.job_id
WHERE newest.job_id <> $1 AND r.value ->> 'ref' = $3 AND j.params ->> 'provider' = $2
"""


async def holders(connection: Connection, job_id: UUID, provider: str, ref: str) -> list[Mapping[str, Any]]:
    """The parameters of all generations, except `job_id`, that have the order `ref`, in all tenants. `ref` is the
    provider's id of the order. A generation has the order from the provider's answer, or from a person who found the
    order. This function searches only the newest `MAX_SEARCHED` generations.
    """
    rows = await connection.fetch(_HOLDERS, job_id, provider, ref, MAX_SEARCHED)
    return [row["params"] for row in rows]


#: The public statuses of a generation that keeps its server busy.
UNDER_WAY = frozenset({"processing", "polling"})

# SQL of the public status. `j`: the job; `s`: its submit step. The status stays `pending` until a worker of the
# generation's server claims the submit step. `status_text` in leasehold/api/generation/view.py follows the same rules.
STATUS = """
CASE j.status
    WHEN 'succeeded' THEN 'completed' WHEN 'failed' THEN 'failed'
    WHEN 'cancelled' THEN 'failed' WHEN 'expired' THEN 'failed'
    ELSE CASE s.status WHEN 'succeeded' THEN 'polling' WHEN 'running' THEN 'processing' WHEN 'retry' THEN 'processing'
                       WHEN 'waiting' THEN 'processing' ELSE 'pending' END
END"""

# $1: the tenant. $2: only this server; NULL: all servers. $3: the most generations to count.
_COUNTS = f"""
-- generation_counts
SELECT kind, server_id, status, count(*)::int AS n
FROM (
    SELECT g.kind, g.server_id, {STATUS} AS status
    FROM generation g JOIN job j ON j.id = g.job_id
    LEFT JOIN task s ON s.job_id = j.id AND s.step = 'submit'
    WHERE g.tenant_id = $1 AND ($2::text IS NULL OR g.server_id = $2) LIMIT $3
) AS counted
GROUP BY kind, server_id, status
"""


async def counts(connection: Connection, tenant_id: str, server_id: str | None) -> Sequence[Row]:
    """The number of the tenant's generations, by kind, server and status."""
    return await connection.fetch(_COUNTS, tenant_id, server_id, MAX_COUNTED)


async def keep_source(
    connection: Connection, tenant_id: str, key: str, size: int, duration: timedelta
) -> datetime | None:
    """Record an uploaded source image of `size` bytes, which expires after `duration`. If the same image is stored
    already, this call never makes it expire earlier.

    Returns the time of expiry of a new image, or None if the image was stored already. Raises Unavailable `busy` if the
    same image is condemned, because its object may then be deleted at any moment.
    """
    row = await connection.fetchrow(
        "INSERT INTO source_image (key, tenant_id, size, expires_at) VALUES ($1, $2, $3, clock_timestamp() + $4)"
        " ON CONFLICT (key) DO UPDATE SET expires_at = greatest(source_image.expires_at, excluded.expires_at),"
        " size = excluded.size"
        f" WHERE source_image.expires_at <> {_CONDEMNED} RETURNING expires_at, xmax = 0 AS is_new",
        key,
        tenant_id,
        size,
        duration,
    )
    if row is None:
        raise Unavailable("busy", "The same image is being deleted. Try again soon.", retry_after=_DELETION_SECONDS)
    return row["expires_at"] if row["is_new"] else None


async def drop_sources(connection: Connection, tenant_id: str, expiry_by_key: Mapping[str, datetime]) -> None:
    """Expire the new images of a refused request immediately. An image stays if another request has made it expire
    later.
    """
    await connection.execute(
        "UPDATE source_image SET expires_at = clock_timestamp()"
        " FROM unnest($2::text[], $3::timestamptz[]) AS new_image(key, expires_at)"
        " WHERE source_image.key = new_image.key AND tenant_id = $1 AND source_image.expires_at = new_image.expires_at",
        tenant_id,
        list(expiry_by_key),
        list(expiry_by_key.values()),
    )


async def expired_sources(connection: Connection, limit: int = 100) -> list[str]:
    """The keys of expired source images. Images in quarantine, and images of a tenant that moves to another cell
    (another installation), are left out. For each key the duty calls `condemn_source` and deletes the object; then it
    calls `forget_sources`.
    """
    rows = await connection.fetch(
        "SELECT key FROM source_image WHERE expires_at < statement_timestamp()"
        f" AND {not_in(SOURCES, 'key', 'text')} AND {tenant_stays('source_image.tenant_id')}"
        " ORDER BY expires_at LIMIT $1",
        limit,
    )
    return [row["key"] for row in rows]


async def condemn_source(connection: Connection, key: str) -> bool:
    """Condemn an expired source image. From now on no upload can keep the image, and its object can be deleted. Returns
    False if the image is not expired any more, because it was uploaded again.
    """
    condemned = await connection.fetchval(
        f"UPDATE source_image SET expires_at = {_CONDEMNED} WHERE key = $1 AND expires_at < clock_timestamp()"
        " RETURNING true",
        key,
    )
    return bool(condemned)


async def forget_sources(connection: Connection, keys: Sequence[str]) -> None:
    """Delete the rows of the condemned images among `keys`. The duty has already deleted their objects."""
    await connection.execute(
        f"DELETE FROM source_image WHERE key = ANY($1::text[]) AND expires_at = {_CONDEMNED}", list(keys)
    )
