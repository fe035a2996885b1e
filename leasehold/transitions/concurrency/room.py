"""Counts how many more jobs each concurrency limit may admit (`Room`). `rooms_of` locks the limits' rows (the table
`gate`) until the caller's transaction ends. `gate_job` has the jobs that wait at a limit or were admitted by it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from leasehold.db.database import Connection, within_minute
from leasehold.domain.concurrency_limit import EVERYBODY, GREED
from leasehold.transitions.concurrency.names import ConcurrencyLimitName, limit_columns

#: A shared limit of at least this many jobs reserves one place for tenants without an admitted job. In a smaller limit
#: the reserved place would be too large a part of all places.
_RESERVES_FROM = 4

# How many admitted jobs each tenant (`owner`) has at the limits that all tenants share. $1: the tenant_id of such a
# limit, EVERYBODY. $2: the keys of the limits. At a limit with a rate (`per_minute`), the rows of finished jobs stay
# for a minute after the admission, so the statement leaves them out.
_OWNERS = """
-- gates_owners
SELECT g.key, g.owner, count(*) AS n FROM gate_job g JOIN gate ON gate.tenant_id = g.tenant_id AND gate.key = g.key
WHERE g.tenant_id = $1 AND g.key = ANY($2::text[]) AND g.admitted_at IS NOT NULL
  AND (gate.per_minute IS NULL OR (SELECT j.finished_at FROM job j WHERE j.id = g.job_id) IS NULL)
GROUP BY g.key, g.owner
"""

# Locks the limits in the order of the bytes of their names (COLLATE "C"), as all transactions do (queueing.py), so that
# they cannot deadlock. FOR NO KEY UPDATE does not wait for submissions, whose lock only keeps the rows from being
# deleted (`_KEEP_LIMITS` in queueing.py).
_LOCK = """
-- gates_lock
SELECT g.tenant_id, g.key, g.at_most, g.per_minute
FROM unnest($1::text[], $2::text[]) AS limits(tenant_id, key)
JOIN gate g ON g.tenant_id = limits.tenant_id AND g.key = limits.key
ORDER BY g.tenant_id COLLATE "C", g.key COLLATE "C"
FOR NO KEY UPDATE OF g
"""
# Does the same, but passes over limits that another transaction has locked.
_LOCK_OR_SKIP = _LOCK.replace("-- gates_lock", "-- gates_lock_or_skip").rstrip() + " SKIP LOCKED\n"

# SQL: the row `g` of gate_job, whose limit is `gate`, may be deleted. This text is appended to a condition that has
# already checked that the row's job has finished. A finished job no longer counts at its limit. Exception: at a limit
# with a rate, the job's admission counts for a minute.
_FORGETTABLE = f"""
  AND (gate.per_minute IS NULL OR g.admitted_at IS NULL OR NOT {within_minute("g.admitted_at")})
"""
# Deletes the rows of the finished jobs among the jobs $1.
_FORGET_JOBS = f"""
-- gates_forget_left
DELETE FROM gate_job g
USING unnest($1::uuid[]) AS ended(job_id), job j, gate
WHERE g.job_id = ended.job_id AND j.id = ended.job_id AND j.finished_at IS NOT NULL
  AND gate.tenant_id = g.tenant_id AND gate.key = g.key{_FORGETTABLE}"""

# Deletes the rows of all finished jobs at some limits. $1 and $2: the tenants and the keys of these limits.
_FORGET_FINISHED = f"""
-- gates_forget
DELETE FROM gate_job g
USING unnest($1::text[], $2::text[]) AS limits(tenant_id, key), gate, job j
WHERE g.tenant_id = limits.tenant_id AND g.key = limits.key AND gate.tenant_id = g.tenant_id AND gate.key = g.key
  AND j.id = g.job_id AND j.finished_at IS NOT NULL{_FORGETTABLE}"""

# `unfinished`: admitted jobs that count against `at_most`. `last_minute`: admissions that count against `per_minute`.
# At a limit without a rate, a finished job counts until its row is deleted. So the limit may admit too few jobs for a
# moment, but never too many. The first half of the UNION counts at limits without a rate, the second half at those with
# a rate. HAVING removes the row of the half that does not fit the limit, because without GROUP BY `count` returns a row
# even if it counted nothing.
_ADMITTED = f"""
-- gates_inside
SELECT gate.tenant_id, gate.key, used.unfinished, used.last_minute
FROM unnest($1::text[], $2::text[]) AS limits(tenant_id, key)
JOIN gate ON gate.tenant_id = limits.tenant_id AND gate.key = limits.key
CROSS JOIN LATERAL (
    SELECT count(*) AS unfinished, 0::bigint AS last_minute FROM gate_job g
    WHERE gate.per_minute IS NULL AND g.tenant_id = gate.tenant_id AND g.key = gate.key AND g.admitted_at IS NOT NULL
    HAVING gate.per_minute IS NULL
    UNION ALL
    SELECT count(*) FILTER (WHERE j.finished_at IS NULL),
           count(*) FILTER (WHERE {within_minute("g.admitted_at")})
    FROM gate_job g JOIN job j ON j.id = g.job_id
    WHERE gate.per_minute IS NOT NULL AND g.tenant_id = gate.tenant_id AND g.key = gate.key
      AND g.admitted_at IS NOT NULL
    HAVING gate.per_minute IS NOT NULL
) AS used
"""


@dataclass(slots=True)
class Room:
    """The room of one limit. `places`: how many more jobs may be unfinished at once; None: any number. `entries`: how
    many more jobs may be admitted this minute; None: any number. `admitted`: tenant -> the number of its admitted,
    unfinished jobs; None: the limit is not one that all tenants share. `reserved`: how many places are reserved for
    tenants without admitted, unfinished jobs.
    """

    places: int | None
    entries: int | None
    reserved: int = 0
    admitted: Counter[str] | None = None
    #: Whether `admits` has refused a tenant because the tenant has too many of the places already. The caller asks for
    #: the tenant with the fewest admitted jobs first, so `admits` would refuse all later tenants, too.
    refused_share: bool = False

    @property
    def is_open(self) -> bool:
        return self.places != 0 and self.entries != 0

    def admits(self, tenant_id: str) -> bool:
        """Whether the limit may admit a job of the tenant now."""
        if not self.is_open:
            return False
        if self.admitted is None or self.places is None or not self.admitted[tenant_id]:
            return True
        # A tenant that has admitted jobs gets another place on two conditions: more places are free than are reserved,
        # and the tenant has fewer admitted jobs than GREED times the free places.
        if self.places > self.reserved and self.admitted[tenant_id] < GREED * self.places:
            return True
        self.refused_share = True
        return False

    def take(self, tenant_id: str) -> None:
        """Count one more admitted job of the tenant."""
        self.places = None if self.places is None else self.places - 1
        self.entries = None if self.entries is None else self.entries - 1
        if self.admitted is not None:
            self.admitted[tenant_id] += 1


async def rooms_of(
    connection: Connection,
    names: Sequence[ConcurrencyLimitName],
    ended: Sequence[UUID] | None,
    *,
    skip_locked: bool = False,
) -> Mapping[ConcurrencyLimitName, Room]:
    """Lock the limits, delete rows of finished jobs, and count the room of each limit. `ended`: delete only the rows of
    these jobs, if they have finished; None: delete the rows of all finished jobs. A limit without a row has room for
    any number of jobs. `skip_locked`: do not wait for a limit that another transaction has locked. Such a limit then
    counts as full.
    """
    columns = limit_columns(names)
    limits = await connection.fetch(_LOCK_OR_SKIP if skip_locked else _LOCK, *columns)
    if ended is None:
        await connection.execute(_FORGET_FINISHED, *limit_columns((row["tenant_id"], row["key"]) for row in limits))
    elif ended:
        await connection.execute(_FORGET_JOBS, sorted(ended))
    counts = {(row["tenant_id"], row["key"]): row for row in await connection.fetch(_ADMITTED, *columns)}
    admitted_by_key: dict[str, Counter[str]] = {key: Counter() for tenant_id, key in names if tenant_id == EVERYBODY}
    for row in await connection.fetch(_OWNERS, EVERYBODY, list(admitted_by_key)) if admitted_by_key else ():
        admitted_by_key[row["key"]][row["owner"]] = row["n"]
    rooms: defaultdict[ConcurrencyLimitName, Room] = defaultdict(lambda: Room(None, None))
    # `counts` has each limit that has a row. A limit that could not be locked keeps this Room, which admits no job.
    rooms.update({name: Room(0, 0) for name in counts})
    for row in limits:
        name = (row["tenant_id"], row["key"])
        unfinished, last_minute = (
            (counts[name]["unfinished"], counts[name]["last_minute"]) if name in counts else (0, 0)
        )
        rooms[name] = Room(
            _remaining(row["at_most"], unfinished),
            _remaining(row["per_minute"], last_minute),
            int((row["at_most"] or 0) >= _RESERVES_FROM),
            admitted_by_key[row["key"]] if row["tenant_id"] == EVERYBODY else None,
        )
    return rooms


def _remaining(bound: int | None, used: int) -> int | None:
    return None if bound is None else max(bound - used, 0)
