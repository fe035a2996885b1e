"""Letting jobs in: a gated job is held until every gate that it names has room (leasehold.domain.concurrency_limit).

What is inside is counted, never kept as a number that could drift: the admitted rows of a gate whose jobs are
unfinished. Whoever admits locks the gates' rows, in order, so that no limit is ever exceeded. Jobs without gates pay
nothing; a gate is asked when a job arrives, when one of its jobs ends, and by the sweeper.

Where tenants share a gate they take turns: first whoever has least inside. A part of such a gate's room is kept for
tenants that have nothing inside, for a job that was let in cannot be sent out again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Protocol, TypeAlias
from uuid import UUID

from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection, unindexed
from leasehold.domain.concurrency_limit import EVERYBODY, GREED, ConcurrencyLimit
from leasehold.transitions.quarantine import alone, each, is_away, not_in

#: (tenant, key)
ConcurrencyLimitName: TypeAlias = tuple[str, str]

#: The duty in the quarantine: jobs that cannot be let in, and gates that cannot be asked.
JOBS, GATES = "admissions", "gates"
_GATE_UNIT = "g.tenant_id || '/' || g.key"

#: Jobs looked at, and so admitted at most, in one go.
_MOST = 500
#: Looked at first: seldom more than a few can be let in.
_FEW = 32
#: A shared gate for at least so many jobs keeps a place for a tenant that has none inside.
_SHARED_BY_MORE = 4


class Gated(Protocol):
    """A job at its gates; `transitions.jobs.NewJob` is one."""

    @property
    def id(self) -> UUID: ...
    @property
    def tenant_id(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def gates(self) -> Sequence[ConcurrencyLimit]: ...
    @property
    def not_before(self) -> datetime | None: ...


# A gate that an operator declared keeps the operator's bounds.
_KNOW = """
-- gates_known
INSERT INTO gate (tenant_id, key, at_most, per_minute)
SELECT * FROM unnest($1::text[], $2::text[], $3::int[], $4::int[])
ON CONFLICT (tenant_id, key) DO UPDATE SET at_most = excluded.at_most, per_minute = excluded.per_minute
WHERE NOT gate.declared AND (excluded.at_most IS NOT NULL OR excluded.per_minute IS NOT NULL)
  AND (gate.at_most, gate.per_minute) IS DISTINCT FROM (excluded.at_most, excluded.per_minute)
"""

# The limits that gates were made of: whoever changes or lifts one waits until those who follow it have committed.
_FOLLOWED = """
-- gates_followed
SELECT g.tenant_id, g.key, g.at_most, g.per_minute
FROM unnest($1::text[], $2::text[]) AS asked(tenant_id, key)
JOIN gate g ON g.tenant_id = asked.tenant_id AND g.key = asked.key AND g.declared
ORDER BY g.tenant_id, g.key
FOR SHARE OF g
"""

_QUEUE_UP = """
-- gates_queue_up
INSERT INTO gate_job (tenant_id, key, job_id, priority, ready_at, owner)
SELECT g.tenant_id, g.key, g.job_id, g.priority, coalesce(g.ready_at, clock_timestamp()), g.owner
FROM unnest($1::text[], $2::text[], $3::uuid[], $4::smallint[], $5::timestamptz[], $6::text[])
    AS g(tenant_id, key, job_id, priority, ready_at, owner)
"""


async def queue_up(connection: Connection, jobs: Sequence[Gated]) -> None:
    """Put new jobs before their gates; in the transaction that writes the jobs."""
    await _know(connection, [gate for job in jobs for gate in job.gates])
    rows = [
        (gate.tenant_id, gate.key, job.id, job.priority, job.not_before, job.tenant_id)
        for job in jobs
        for gate in job.gates
    ]
    await connection.execute(_QUEUE_UP, *(list(column) for column in zip(*rows, strict=True)))


async def _bounds(
    connection: Connection, known: Mapping[ConcurrencyLimitName, ConcurrencyLimit]
) -> dict[ConcurrencyLimitName, tuple[int | None, int | None]]:
    """What each gate is written with. A declared limit's own row has its bounds already, or was lifted meanwhile: a job
    that was made before must not bring them back.
    """
    followed = sorted({gate.limit for name, gate in known.items() if gate.limit is not None and gate.limit != name})
    rows = await connection.fetch(_FOLLOWED, *_columns(followed)) if followed else ()
    now = {(row["tenant_id"], row["key"]): (row["at_most"], row["per_minute"]) for row in rows}
    return {
        name: (gate.at_most, gate.per_minute) if gate.limit is None else now.get(gate.limit, (None, None))
        for name, gate in known.items()
    }


async def _know(connection: Connection, wanted: Iterable[ConcurrencyLimit]) -> None:
    """Write the gates, and lock them, in order."""
    known = {(gate.tenant_id, gate.key): gate for gate in wanted}
    names = sorted(known)
    bounds = await _bounds(connection, known)
    await connection.execute(
        _KNOW, *_columns(names), [bounds[name][0] for name in names], [bounds[name][1] for name in names]
    )


async def leave(connection: Connection, job_id: UUID, wanted: Sequence[ConcurrencyLimit]) -> None:
    """Forget that a finished job was inside any gate, for it waits at the gates `wanted` again. Their locks come first,
    as with everybody who lets in. A gate with a rate does not count the earlier admission any more.
    """
    if wanted:
        await _know(connection, wanted)
    await connection.execute("DELETE FROM gate_job WHERE job_id = $1", job_id)


# Of each asked gate the jobs that come next, and all the gates of those jobs. Tenants take turns: a tenant's first
# counts before everybody's second, and what it has inside counts before its first. `owners` is a loose index scan: one
# probe a tenant, however many jobs each has.
_WAITING = f"""
-- gates_waiting
WITH RECURSIVE asked AS (
    SELECT * FROM unnest($1::text[], $2::text[]) AS a(tenant_id, key)
), owners(tenant_id, key, owner) AS (
    SELECT asked.tenant_id, asked.key, first.owner
    FROM asked CROSS JOIN LATERAL (
        SELECT g.owner FROM gate_job g
        WHERE g.tenant_id = asked.tenant_id AND g.key = asked.key AND g.admitted_at IS NULL
        ORDER BY g.owner LIMIT 1
    ) AS first
    UNION ALL
    SELECT o.tenant_id, o.key, next.owner
    FROM owners o CROSS JOIN LATERAL (
        SELECT g.owner FROM gate_job g
        WHERE g.tenant_id = o.tenant_id AND g.key = o.key AND g.admitted_at IS NULL AND g.owner > o.owner
        ORDER BY g.owner LIMIT 1
    ) AS next
), heads AS MATERIALIZED (
    SELECT head.job_id, head.priority, head.nth + inside.n AS turn
    FROM owners o
    CROSS JOIN LATERAL (
        SELECT count(*) AS n FROM gate_job i
        WHERE o.tenant_id = $4 AND i.tenant_id = o.tenant_id AND i.key = o.key AND i.owner = o.owner
          AND i.admitted_at IS NOT NULL
    ) AS inside
    CROSS JOIN LATERAL (
        SELECT g.job_id, g.priority, row_number() OVER (ORDER BY g.priority, g.job_id) AS nth FROM gate_job g
        WHERE g.tenant_id = o.tenant_id AND g.key = o.key AND g.owner = o.owner AND g.admitted_at IS NULL
          AND g.ready_at <= clock_timestamp() AND ($5::uuid IS NULL OR g.job_id = $5) AND {not_in(JOBS, "g.job_id")}
        ORDER BY g.priority, g.job_id LIMIT $3
    ) AS head
), waiting AS MATERIALIZED (
    SELECT job_id, priority, max(turn) AS turn FROM heads GROUP BY job_id, priority
    ORDER BY turn, priority, job_id LIMIT $3
)
SELECT w.job_id, j.tenant_id, array_agg(g.tenant_id) AS tenants, array_agg(g.key) AS keys,
       j.finished_at IS NULL AS alive
FROM waiting w JOIN gate_job g ON g.job_id = w.job_id JOIN job j ON j.id = w.job_id
GROUP BY w.job_id, w.priority, w.turn, j.tenant_id, j.finished_at ORDER BY w.turn, w.priority, w.job_id
"""

# What each tenant has inside of the gates that tenants share.
_OWNERS = """
-- gates_owners
SELECT g.key, g.owner, count(*) AS n FROM gate_job g
WHERE g.tenant_id = $1 AND g.key = ANY($2::text[]) AND g.admitted_at IS NOT NULL
GROUP BY g.key, g.owner
"""

_LOCK = """
-- gates_lock
SELECT g.tenant_id, g.key, g.at_most, g.per_minute
FROM unnest($1::text[], $2::text[]) AS asked(tenant_id, key)
JOIN gate g ON g.tenant_id = asked.tenant_id AND g.key = asked.key
ORDER BY g.tenant_id, g.key
FOR UPDATE OF g
"""

# Finished jobs are no longer inside; a gate with a rate remembers their admission for its minute.
_THROUGH = """
  AND (gate.per_minute IS NULL OR g.admitted_at IS NULL OR g.admitted_at < clock_timestamp() - interval '60 seconds')
"""
_FORGET_LEFT = (
    """
-- gates_forget_left
DELETE FROM gate_job g
USING unnest($1::uuid[]) AS gone(job_id), job j, gate
WHERE g.job_id = gone.job_id AND j.id = gone.job_id AND j.finished_at IS NOT NULL
  AND gate.tenant_id = g.tenant_id AND gate.key = g.key
"""
    + _THROUGH
)
_FORGET = (
    """
-- gates_forget
DELETE FROM gate_job g
USING unnest($1::text[], $2::text[]) AS asked(tenant_id, key), gate, job j
WHERE g.tenant_id = asked.tenant_id AND g.key = asked.key AND gate.tenant_id = g.tenant_id AND gate.key = g.key
  AND j.id = g.job_id AND j.finished_at IS NOT NULL
"""
    + _THROUGH
)

# Who is finished and not forgotten yet still counts as inside: a limit is kept, and the sweeper finds it.
_INSIDE = """
-- gates_inside
SELECT gate.tenant_id, gate.key, used.inside, used.lately
FROM unnest($1::text[], $2::text[]) AS asked(tenant_id, key)
JOIN gate ON gate.tenant_id = asked.tenant_id AND gate.key = asked.key
CROSS JOIN LATERAL (
    SELECT count(*) AS inside, 0::bigint AS lately FROM gate_job g
    WHERE gate.per_minute IS NULL AND g.tenant_id = gate.tenant_id AND g.key = gate.key AND g.admitted_at IS NOT NULL
    HAVING gate.per_minute IS NULL
    UNION ALL
    SELECT count(*) FILTER (WHERE j.finished_at IS NULL),
           count(*) FILTER (WHERE g.admitted_at > clock_timestamp() - interval '60 seconds')
    FROM gate_job g JOIN job j ON j.id = g.job_id
    WHERE gate.per_minute IS NOT NULL AND g.tenant_id = gate.tenant_id AND g.key = gate.key
      AND g.admitted_at IS NOT NULL
    HAVING gate.per_minute IS NOT NULL
) AS used
"""

# The gates were one more step that each first step needed. What is told of a job is taken along from its lock.
ADMIT = f"""
-- gates_admit
WITH jobs AS MATERIALIZED (
    SELECT j.id, j.tenant_id, j.status, j.event_seq, j.trace
    FROM job j WHERE j.id = ANY($1::uuid[]) AND j.held AND {unindexed("j.finished_at IS NULL")}
    ORDER BY j.id FOR UPDATE
), passed AS (
    UPDATE gate_job g SET admitted_at = clock_timestamp() FROM jobs WHERE g.job_id = jobs.id
), freed AS (
    UPDATE task t
    SET waiting_on = t.waiting_on - 1,
        status = CASE WHEN t.available_at > clock_timestamp() THEN 'waiting' ELSE 'pending' END,
        available_at = greatest(t.available_at, clock_timestamp())
    FROM jobs
    WHERE t.job_id = jobs.id AND t.status = 'blocked' AND t.waiting_on = 1
      AND NOT EXISTS (SELECT 1 FROM task p WHERE p.job_id = t.job_id AND t.id = ANY(p.unblocks)
                        AND p.status <> 'succeeded')
    RETURNING t.id, t.job_id, t.queue, t.priority, t.status, jobs.tenant_id, jobs.status AS was, jobs.event_seq,
              jobs.trace
), counted AS MATERIALIZED (
    SELECT f.*, row_number() OVER (PARTITION BY job_id ORDER BY id) AS nth,
           CASE WHEN bool_and(starts_with(queue, 'ext:')) OVER (PARTITION BY job_id)
                THEN 'waiting_worker' ELSE was END AS becomes
    FROM freed f
), advanced AS (
    UPDATE job j
    SET held = false, event_seq = j.event_seq + 1, status = mine.becomes,
        -- Its waiting is over, and its time begins; a deadline that was given stays.
        deadline_at = CASE WHEN j.timeout_seconds IS NULL AND j.start_within_seconds IS NULL THEN j.deadline_at
                           ELSE clock_timestamp() + make_interval(secs => j.timeout_seconds) END
    FROM counted mine WHERE mine.nth = 1 AND j.id = mine.job_id
), told AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status)
    SELECT job_id, event_seq + 1, tenant_id, 'admitted', becomes FROM counted WHERE nth = 1
)
INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
SELECT id, job_id, queue, priority, trace, clock_timestamp() + interval '1 second'
FROM counted
WHERE status = 'pending' AND NOT starts_with(queue, 'ext:')
RETURNING id AS outbox_id, task_id, queue, priority, headers
"""


@dataclass(slots=True)
class _Room:
    """What a gate has left: places inside and entries; None: any number. `of`: what each tenant has inside, where
    tenants share the gate. `kept`: places that only a tenant without any may have.
    """

    inside: int | None
    entries: int | None
    kept: int = 0
    of: Counter[str] | None = None
    #: A tenant that waits had its share: whoever waits behind it has no less.
    refused: bool = False

    @property
    def left(self) -> bool:
        return self.inside != 0 and self.entries != 0

    def admits(self, tenant_id: str) -> bool:
        if not self.left:
            return False
        if self.of is None or self.inside is None or not self.of[tenant_id]:
            return True
        admits = self.inside > self.kept and self.of[tenant_id] < GREED * self.inside
        self.refused = self.refused or not admits
        return admits

    def take(self, tenant_id: str) -> None:
        self.inside = None if self.inside is None else self.inside - 1
        self.entries = None if self.entries is None else self.entries - 1
        if self.of is not None:
            self.of[tenant_id] += 1


async def admit(
    connection: Connection, names: Iterable[ConcurrencyLimitName], left: Sequence[UUID] | None = None
) -> list[Announcement]:
    """held -> runnable for as many jobs of these gates as there is room for: tenants in turn, each one's by priority
    and age.

    `left`: the jobs that may have ended since the gates were asked last; None: nobody knows, and all that were let in
    are looked at. Returns the hints to be published. A job that some other gate keeps out does not keep out those
    behind it.
    """
    asked = sorted(set(names))
    hints: list[Announcement] = []
    most = _MOST if left is None else min(_MOST, max(_FEW, 2 * len(left)))
    more = bool(asked)
    while more:
        let_in, more, found = await _admit(connection, asked, left, most)
        hints += [Announcement.from_row(row) for row in found]
        more = more and (most < _MOST or bool(let_in))
        left, most = (), min(_MOST, 4 * most)
    return hints


async def _admit(
    connection: Connection, asked: Sequence[ConcurrencyLimitName], left: Sequence[UUID] | None, most: int
) -> tuple[Sequence[UUID], bool, list[Any]]:
    """One go: the jobs that were let in, whether to look further, and the rows of their hints. Where letting them in
    together fails, each is let in by itself; one that cannot be keeps out nobody else.
    """
    more = False
    let_in: Sequence[UUID] = ()

    async def take(only: object | None) -> Sequence[UUID]:
        nonlocal more, let_in
        chosen, further = await _choose(connection, asked, left, most, only)
        if only is None:
            let_in, more = chosen, further
        return chosen

    async def enter(jobs: Sequence[UUID]) -> list[Any]:
        return await connection.fetch(ADMIT, list(jobs))

    rows = await each(connection, JOBS, take, enter)
    return let_in, more, rows


async def admit_each(connection: Connection, names: Iterable[ConcurrencyLimitName]) -> list[Announcement]:
    """As `admit`, of gates that have nothing to do with each other: one that cannot be asked is set aside."""
    known = sorted(set(names))
    try:
        return await admit(connection, known)
    except Exception as error:
        if is_away(connection, error):
            raise
    hints: list[Announcement] = []
    for name in known:
        hints += await alone(connection, GATES, "/".join(name), partial(admit, connection, [name])) or ()
    return hints


async def _choose(
    connection: Connection,
    asked: Sequence[ConcurrencyLimitName],
    left: Sequence[UUID] | None,
    most: int,
    only: object | None = None,
) -> tuple[list[UUID], bool]:
    """Of the first `most` that wait, or of `only` that job, those that every gate of theirs has room for; and whether
    to look further.
    """
    waiting = await connection.fetch(_WAITING, *_columns(asked), most, EVERYBODY, only)
    rooms = await _rooms(connection, sorted({*asked, *(name for row in waiting for name in _names(row))}), left)
    let_in = []
    for row in waiting:
        mine = [rooms[name] for name in _names(row)]
        if row["alive"] and all(room.admits(row["tenant_id"]) for room in mine):
            let_in.append(row["job_id"])
            for room in mine:
                room.take(row["tenant_id"])
    return let_in, len(waiting) == most and any(rooms[name].left and not rooms[name].refused for name in asked)


def _names(row: Any) -> list[ConcurrencyLimitName]:
    return list(zip(row["tenants"], row["keys"], strict=True))


def _columns(names: Sequence[ConcurrencyLimitName]) -> tuple[list[str], list[str]]:
    return [tenant for tenant, _ in names], [key for _, key in names]


async def _rooms(
    connection: Connection, names: Sequence[ConcurrencyLimitName], left: Sequence[UUID] | None
) -> dict[ConcurrencyLimitName, _Room]:
    """How much room each gate has, with its row locked."""
    columns = _columns(names)
    gates = await connection.fetch(_LOCK, *columns)
    if left is None:
        await connection.execute(_FORGET, *columns)
    elif left:
        await connection.execute(_FORGET_LEFT, sorted(left))
    counted = {(row["tenant_id"], row["key"]): row for row in await connection.fetch(_INSIDE, *columns)}
    shared: dict[str, Counter[str]] = {key: Counter() for tenant_id, key in names if tenant_id == EVERYBODY}
    for row in await connection.fetch(_OWNERS, EVERYBODY, list(shared)) if shared else ():
        shared[row["key"]][row["owner"]] = row["n"]
    rooms: defaultdict[ConcurrencyLimitName, _Room] = defaultdict(lambda: _Room(None, None))
    for row in gates:
        name = (row["tenant_id"], row["key"])
        inside, lately = (counted[name]["inside"], counted[name]["lately"]) if name in counted else (0, 0)
        rooms[name] = _Room(
            _left(row["at_most"], inside),
            _left(row["per_minute"], lately),
            int((row["at_most"] or 0) >= _SHARED_BY_MORE),
            shared[row["key"]] if row["tenant_id"] == EVERYBODY else None,
        )
    return rooms


def _left(bound: int | None, used: int) -> int | None:
    return None if bound is None else max(bound - used, 0)


async def gates_of(connection: Connection, job_ids: Sequence[UUID]) -> list[ConcurrencyLimitName]:
    """The gates that these jobs named: those that may have room once the jobs have ended."""
    rows = await connection.fetch(
        "SELECT DISTINCT tenant_id, key FROM gate_job WHERE job_id = ANY($1::uuid[])", list(job_ids)
    )
    return [(row["tenant_id"], row["key"]) for row in rows]


async def crowded(connection: Connection, after: ConcurrencyLimitName, limit: int = 200) -> list[ConcurrencyLimitName]:
    """Gates that somebody waits at, in order, from the one after `after` on."""
    rows = await connection.fetch(
        "SELECT g.tenant_id, g.key FROM gate g WHERE (g.tenant_id, g.key) > ($1, $2) AND EXISTS ("
        "SELECT 1 FROM gate_job w WHERE w.tenant_id = g.tenant_id AND w.key = g.key AND w.admitted_at IS NULL)"
        f" AND {not_in(GATES, _GATE_UNIT, 'text')} ORDER BY g.tenant_id, g.key LIMIT $3",
        *after,
        limit,
    )
    return [(row["tenant_id"], row["key"]) for row in rows]


async def forget_gates(connection: Connection, limit: int = 1000) -> None:
    """Forget jobs that are through, and gates that no job names and no operator declared."""
    await connection.execute(
        "DELETE FROM gate_job WHERE (tenant_id, key, job_id) IN (SELECT g.tenant_id, g.key, g.job_id FROM gate_job g"
        " JOIN job j ON j.id = g.job_id WHERE j.finished_at < clock_timestamp() - interval '60 seconds' LIMIT $1)",
        limit,
    )
    await connection.execute(
        "DELETE FROM gate WHERE (tenant_id, key) IN (SELECT g.tenant_id, g.key FROM gate g WHERE NOT g.declared"
        " AND NOT EXISTS (SELECT 1 FROM gate_job w WHERE w.tenant_id = g.tenant_id AND w.key = g.key)"
        " LIMIT $1 FOR UPDATE SKIP LOCKED)",
        limit,
    )
