"""What only the database knows (queues, leases, the outbox, its own health), told by one elected process.

Every worker and every API process offers itself; the one that holds the leadership row looks every few seconds and
adds what it saw to its /metrics, the others add nothing. So the numbers are there as long as anybody is, and two
that tell them at once, around a change of leader, tell the same: dashboards take the greatest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any
from uuid import UUID

import asyncpg
import structlog
from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from leasehold.broker.base import Broker
from leasehold.db.database import Connection, Pool
from leasehold.exporter import queries
from leasehold.exporter.broker_parts import BrokerParts
from leasehold.kinds.metrics import CAP, Question
from leasehold.kinds.metrics import gauge as _gauge
from leasehold.kinds.metrics import labelled as _labelled
from leasehold.runtime.duty_cycle import Pauses
from leasehold.runtime.periodic import Periodic
from leasehold.settings import Settings
from leasehold.telemetry.duties import EXPORTER_REFUSED
from leasehold.telemetry.meters import gauge, histogram
from leasehold.telemetry.outages import DATABASE
from leasehold.transitions import workers
from leasehold.transitions.quarantine import is_away

log = structlog.get_logger(__name__)

#: Seconds between looks. Beside a backlog of ten thousand tasks one takes PostgreSQL up to a tenth of a second.
EVERY = 10.0
#: Beside much that has gone through and is not vacuumed yet a look takes longer, and then comes so seldom that it takes
#: no more than this share of the time; but so often at least.
_SHARE = 1 / 50
_AT_LEAST_EVERY = 60.0
#: The most queues that are told of.
MOST_QUEUES = 100
#: The longest that one statement of a look may take, in seconds.
_PATIENCE = 3.0

LEADS = gauge("exporter_leads", "1 in the process that tells what only the database knows")
LOOK_SECONDS = histogram("exporter_look_duration_seconds", "One look into the database, all statements together")

Rows = Mapping[str, Sequence[Any]]


def _questions(silent: float) -> dict[str, tuple[str, tuple[object, ...]]]:
    return {
        "queues": (queries.QUEUES, (CAP, silent, queries.MOST_LINES)),
        "leases": (queries.LEASES, (CAP,)),
        "backlog": (queries.BACKLOG, (CAP,)),
        "workers": (queries.WORKERS, (silent,)),
        "quarantine": (queries.QUARANTINE, ()),
        "tables": (queries.TABLES, ()),
        "sessions": (queries.SESSIONS, ()),
        "slow": (queries.SLOW, ()),
        "database": (queries.DATABASE, ()),
    }


async def look(connection: Connection, silent: float, of_kinds: Sequence[Question] = ()) -> Rows:
    """All that one look finds. `silent`: seconds after which a worker that was not seen counts as silent.

    A question that the database refuses is left out and counted, and the others are asked. Raises one of TRY_AGAIN.
    """
    found: dict[str, Sequence[Any]] = {}
    slow = 0
    asked = _questions(silent) | {question.name: (question.statement, question.values) for question in of_kinds}
    for name, (statement, values) in asked.items():
        try:
            found[name] = await connection.fetch(statement, *values, timeout=_PATIENCE)
        except (asyncpg.PostgresError, TimeoutError) as error:
            slow += isinstance(error, TimeoutError)
            if is_away(connection, error) or slow > 1:
                raise
            EXPORTER_REFUSED.labels(name).inc()
            log.warning("the exporter's question was not answered", question=name, error=type(error).__name__)
    return found


class Exporter(Collector):
    """`run` for as long as the process lives; registered, it adds the last look to what a scrape gets."""

    def __init__(self, settings: Settings, owner: UUID, pool: Pool, of_kinds: Sequence[Question] = ()) -> None:
        self._of_kinds = of_kinds
        self._owner = owner
        self._pool = pool
        self._silent = 3 * settings.renew_seconds
        self._on = settings.metrics
        self._seen: Rows | None = None
        self._pauses = Pauses(share=_SHARE, least=EVERY, most=_AT_LEAST_EVERY)
        self._fresh_until = 0.0

    async def run(self) -> None:
        if self._on:
            await Periodic("exporter", self._look, every=EVERY).run()

    async def _look(self) -> None:
        async with self._pool.acquire() as connection:
            await self._turn(connection)
        DATABASE.answered()

    async def _turn(self, connection: Connection) -> None:
        leads = await workers.lead(connection, "exporter", self._owner, 3 * EVERY)
        LEADS.set(leads)
        if not leads:
            self._seen = None
            self._pauses.forget()
            return
        if not self._pauses.due:
            return
        began = monotonic()
        with LOOK_SECONDS.time():
            self._seen = await look(connection, self._silent, self._of_kinds)
        pause = self._pauses.done(began)
        self._fresh_until = monotonic() + 3 * pause

    def describe(self) -> list[Metric]:
        """Nothing is promised: who leads, changes."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Nothing, unless we lead and what we saw is fresh: an old number is worse than none."""
        seen = self._seen
        if seen is not None and monotonic() < self._fresh_until:
            yield from families(seen, self._of_kinds)


def families(seen: Rows, of_kinds: Sequence[Question] = ()) -> Iterator[Metric]:
    """The metrics that a look amounts to."""
    if "queues" in seen and "leases" in seen:
        yield from _of_queues(seen["queues"], seen["leases"])
    every = dict(_FAMILIES) | {question.name: question.families for question in of_kinds}
    for name, of in every.items():
        if name in seen:
            yield from of(seen[name])


def _of_backlog(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    (backlog,) = rows
    capped = f"; counted up to {CAP}"
    yield _gauge("outbox_rows", f"Hints written and not yet confirmed by the broker{capped}", backlog["outbox"])
    yield _gauge("outbox_oldest_seconds", "Age of the oldest row of the outbox", backlog["outbox_oldest"])
    yield _gauge("dead_letters", f"Failed tasks that wait for somebody to replay them{capped}", backlog["dead_letters"])
    yield _gauge(
        "schedule_oldest_due_seconds", "How long ago the schedule that is latest was due", backlog["schedule_oldest"]
    )
    yield _gauge("jobs_unfinished", f"Jobs that have not ended{capped}", backlog["unfinished"])


def _of_workers(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    (fleet,) = rows
    yield _labelled("workers", "Registered workers", ["state"], [((state,), fleet[state]) for state in fleet.keys()])  # noqa: SIM118 - a Record's iteration gives values


def _of_quarantine(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    meaning = "Units of a duty that are set aside because they failed by themselves"
    yield _labelled("quarantined_units", meaning, ["duty"], [((row["duty"],), row["n"]) for row in rows])


def _of_database(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    (database,) = rows
    yield _gauge("database_bytes", "Size of the database", database["bytes"])
    yield _gauge("database_sessions_max", "Sessions that the server allows", database["max_sessions"])


def _of_queues(queues: Sequence[Mapping[str, Any]], leases: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    leased = {row["queue"]: row for row in leases}
    # Those that workers serve, then those that have waited longest: tenants name queues, so there may be many.
    first = sorted(queues, key=lambda row: (row["workers"] == 0, -row["oldest"]))[:MOST_QUEUES]
    found = {row["queue"]: row for row in first}
    names = sorted({*found, *sorted(leased)[:MOST_QUEUES]})
    tasks = [((name, state), found[name][state]) for name in names if name in found for state in ("due", "later")]
    tasks += [((name, "running"), leased[name]["running"] if name in leased else 0) for name in names]
    yield _labelled(
        "queue_tasks",
        f"Tasks of a queue. due: could run now; later: wait for their time; running. Counted up to {CAP}",
        ["queue", "state"],
        tasks,
    )
    yield _per_queue("queue_oldest_due_seconds", "How long the oldest due task has waited", found, names, "oldest")
    yield _per_queue("queue_workers", "Workers that serve the queue and are not draining", found, names, "workers")
    yield _per_queue("queue_paused", "1 while somebody has paused the queue", found, names, "paused")
    yield _per_queue("lease_oldest_seconds", "How long the oldest attempt has been running", leased, names, "oldest")
    yield _per_queue("leases_overdue", "Leases that have passed and that nobody has taken", leased, names, "overdue")
    yield _per_queue(
        "lease_overdue_oldest_seconds", "How long ago the oldest of them passed", leased, names, "overdue_oldest"
    )


def _of_tables(tables: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    rows = [((row["name"], kind), row[kind]) for row in tables for kind in ("live", "dead")]
    yield _labelled("table_rows", "PostgreSQL's own estimate", ["table", "kind"], rows)
    sizes = [((row["name"],), row["bytes"]) for row in tables]
    yield _labelled("table_bytes", "Size of a table with its indexes", ["table"], sizes)


def _of_sessions(sessions: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    def greatest(column: str) -> float:
        return max((float(row[column]) for row in sessions), default=0.0)

    counts = [((row["state"],), row["n"]) for row in sessions]
    yield _labelled("database_sessions", "Sessions in this database, by state", ["state"], counts)
    yield _gauge(
        "database_snapshot_oldest_seconds", "Oldest snapshot: vacuum keeps all since", greatest("snapshot_oldest")
    )
    yield _gauge("database_snapshot_age_transactions", "The same in transactions", greatest("snapshot_age"))
    yield _gauge("database_statement_oldest_seconds", "Longest statement under way", greatest("statement_oldest"))


def _of_slow(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    found = {"other": 0} | {row["statement"]: row["n"] for row in rows}
    meaning = "Statements that have been under way for over a second, by the name in their first line"
    yield _labelled("database_slow_statements", meaning, ["statement"], [((name,), n) for name, n in found.items()])


_FAMILIES: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], Iterator[Metric]]] = {
    "backlog": _of_backlog,
    "workers": _of_workers,
    "quarantine": _of_quarantine,
    "tables": _of_tables,
    "sessions": _of_sessions,
    "slow": _of_slow,
    "database": _of_database,
}


def _per_queue(
    name: str, meaning: str, rows: Mapping[str, Mapping[str, Any]], queues: Sequence[str], column: str
) -> Metric:
    values = [((queue,), rows[queue][column] if queue in rows else 0) for queue in queues]
    return _labelled(name, meaning, ["queue"], values)


@contextmanager
def exporting(
    settings: Settings, owner: UUID, pool: Pool, broker: Broker, of_kinds: Sequence[Question] = ()
) -> Iterator[Exporter]:
    """Add to /metrics what the database and the broker's connections tell; the caller runs the exporter.

    `of_kinds`: what kinds of work ask of the database, beside what the exporter asks itself.
    """
    exporter = Exporter(settings, owner, pool, of_kinds)
    parts: tuple[Collector, ...] = (exporter, BrokerParts(broker)) if settings.metrics else ()
    for part in parts:
        REGISTRY.register(part)
    try:
        yield exporter
    finally:
        for part in parts:
            REGISTRY.unregister(part)
