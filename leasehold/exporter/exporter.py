"""Exports metrics that a process must query from the database: queues, leases, the outbox, the database's own health.
The outbox has the hints (messages about due tasks) that the broker has not confirmed yet.

One elected process, the leader, exports the metrics. The leader is the process that has the row `exporter` of the table
`leadership`. Every worker and every API process tries to lead. A leader that ends in an orderly way resigns, so that
another process leads at its next try. The leader queries the database every 10 to 60 seconds, and adds the answers to
its /metrics. Other processes add nothing. So the metrics exist as long as any process lives. When the leader changes,
two processes may export the metrics for a while. Both export the same values. Dashboards take the maximum and not the
sum, so that nothing is counted twice.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext
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
from leasehold.db.replica import EXPORTER, READS, STANDBY_FAILED, Replica
from leasehold.domain.errors import DeclarationError
from leasehold.exporter import queries
from leasehold.exporter.broker_metrics import BrokerMetrics
from leasehold.exporter.snapshots import SnapshotAges
from leasehold.kinds.metrics import CAP, Question
from leasehold.kinds.metrics import gauge as _gauge
from leasehold.kinds.metrics import labelled_gauge as _labelled
from leasehold.runtime.duty_cycle import Pauses
from leasehold.runtime.periodic import Periodic
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.settings import Settings
from leasehold.telemetry.database import recording_up
from leasehold.telemetry.duties import EXPORTER_REFUSED
from leasehold.telemetry.meters import gauge, histogram
from leasehold.telemetry.outages import DATABASE
from leasehold.transitions import workers
from leasehold.transitions.jobs import EXTERNAL
from leasehold.transitions.quarantine import is_away

log = structlog.get_logger(__name__)

#: Seconds between rounds. With a backlog of ten thousand tasks a round takes PostgreSQL up to a tenth of a second.
EVERY_SECONDS = 10.0
#: A round takes longer while many deleted rows are not vacuumed yet. The pauses between rounds then grow, because
#: rounds may take at most _MAX_SHARE of the time. But no pause exceeds _MAX_PAUSE_SECONDS.
_MAX_SHARE = 1 / 50
_MAX_PAUSE_SECONDS = 60.0
#: A round chooses at most this many queues for their waiting tasks, and at most this many more for their running
#: tasks.
MAX_QUEUES = 100
#: The most seconds that one statement may take.
_STATEMENT_SECONDS = 3.0
#: The most seconds that `resign` may take, and the errors that it does not raise, because the process ends in any case.
_RESIGN_SECONDS = 3.0
_NOT_RESIGNED: tuple[type[BaseException], ...] = (asyncpg.PostgresError, *TRY_AGAIN)

#: The first words of the keys of concurrency limits. `code`: an app declares the limit. `queue`, `template`, `tenant`,
#: `payload`: an operator declares the limit, for the jobs of a queue, a template or a tenant, or for jobs with the same
#: value in their payload. `scope`: a run waits until another run of its scope has ended. `server`, `provider`: limits
#: of generations. `other`: limits of kinds of work that do not ship with the platform.
_KINDS_OF_LIMITS = ("code", "payload", "provider", "queue", "scope", "server", "template", "tenant", "other")

LEADS = gauge(
    "exporter_leads",
    "1 in the process that exports the metrics of the database. Its answers are at most three rounds old",
)
QUERY_SECONDS = histogram("exporter_look_duration_seconds", "Seconds of one round of all statements")

#: The name of a question (a statement whose rows become metrics) -> the rows of its answer.
Rows = Mapping[str, Sequence[Any]]


# The exporter's own questions: name -> (statement, values). A question that has the value CAP counts at most CAP rows.
def _questions(silent_seconds: float) -> dict[str, tuple[str, tuple[object, ...]]]:
    return {
        "queues": (queries.QUEUES, (CAP, silent_seconds, queries.MAX_LINES)),
        "leases": (queries.LEASES, (CAP, queries.MAX_LEASES)),
        "backlog": (queries.BACKLOG, (CAP,)),
        "held": (queries.HELD, (CAP,)),  # jobs that wait at a concurrency limit
        "without_code": (queries.WITHOUT_CODE, (CAP,)),  # tasks that wait for a worker that has their code
        "workers": (queries.WORKERS, (silent_seconds,)),
        "quarantine": (queries.QUARANTINE, ()),
        "retention": (queries.RETENTION, (CAP,)),
        "tables": (queries.TABLES, ()),
        "sessions": (queries.SESSIONS, ()),
        "snapshots": (queries.SNAPSHOTS, ()),
        "slow": (queries.SLOW, ()),
        "database": (queries.DATABASE, ()),
    }


#: The questions about the server itself. They go to the primary, because a standby would answer about itself.
SERVER_QUESTIONS = frozenset({"tables", "sessions", "snapshots", "slow", "database"})


async def query_all(
    connection: Connection,
    silent_seconds: float,
    kind_questions: Sequence[Question] = (),
    includes: Callable[[str], bool] = lambda _name: True,
) -> Rows:
    """The rows of one round, by question. `silent_seconds`: a worker without a heartbeat for this many seconds is
    silent. `kind_questions`: the questions that kinds of work add. `includes`: whether to ask the question with this
    name.

    Three kinds of questions are counted as refused and left out: a question that the database refuses, a question whose
    values do not fit its statement, and the first question that takes too long. A second timeout ends the round,
    because the database is then slow as a whole. Raises the error that ended the round: a timeout, or an error of the
    connection.
    """
    rows: dict[str, Sequence[Any]] = {}
    timeouts = 0
    questions = _questions(silent_seconds) | {
        question.name: (question.statement, question.values) for question in kind_questions
    }
    for name, (statement, values) in questions.items():
        if not includes(name):
            continue
        try:
            rows[name] = await connection.fetch(statement, *values, timeout=_STATEMENT_SECONDS)
        except (asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError) as error:
            timeouts += isinstance(error, TimeoutError)
            # On an open connection, an InterfaceError means that the question has too many or too few values.
            has_wrong_values = isinstance(error, asyncpg.InterfaceError) and not connection.is_closed()
            # The round ends at the second timeout, or if the database cannot be reached (`is_away`, for which a timeout
            # on an open connection does not count). In all other cases only this question is left out.
            if timeouts > 1 or (not has_wrong_values and is_away(connection, error)):
                raise
            EXPORTER_REFUSED.labels(name).inc()
            log.warning("the exporter's question was not answered", question=name, error=type(error).__name__)
    return rows


def _check_names(kind_questions: Sequence[Question]) -> None:
    # Raises DeclarationError if a kind's question has the name of another question.
    names = set(_questions(silent_seconds=0.0))  # only the names count here
    for question in kind_questions:
        if question.name in names:
            raise DeclarationError(f"two of the exporter's questions are named {question.name!r}")
        names.add(question.name)


class Exporter(Collector):
    """Asks the questions while `run` runs and this process leads. At each scrape of /metrics, the registry of metrics
    calls `collect`, which gives the metrics of the latest answers. `owner`: the id under which this process leads.
    """

    def __init__(
        self,
        settings: Settings,
        owner: UUID,
        pool: Pool,
        kind_questions: Sequence[Question] = (),
        replica: Replica | None = None,
        *,
        records_up: bool = False,
    ) -> None:
        """`records_up`: each attempt to lead records whether the database is up (`leasehold_database_up`).

        Raises DeclarationError if a kind's question has the name of another question.
        """
        _check_names(kind_questions)
        self._recording_up = recording_up if records_up else nullcontext
        self._kind_questions = kind_questions
        self._owner = owner
        self._pool = pool
        self._replica = replica
        self._silent_seconds = settings.silent_seconds
        self._is_enabled = settings.metrics
        self._latest: Rows | None = None
        self._leads = False  # the last answer to `workers.lead`
        self._pauses = Pauses(share=_MAX_SHARE, at_least=EVERY_SECONDS, at_most=_MAX_PAUSE_SECONDS)
        self._fresh_until = 0.0  # by `monotonic`: after this time, the latest answers are too old to be exported
        self._snapshots = SnapshotAges()
        for name in [*_questions(self._silent_seconds), *(question.name for question in kind_questions)]:
            EXPORTER_REFUSED.labels(name)  # at 0 from the start, because an alert must see the first increase

    async def run(self) -> None:
        """Ask the questions again and again, whenever this process leads."""
        if self._is_enabled:
            await Periodic("exporter", self._query, every=EVERY_SECONDS).run()

    async def resign(self) -> None:
        """Let another process lead from now on. Call this after the end of `run`. If the database does not answer, the
        lead ends by itself, 30 seconds after the last turn of `run`.
        """
        if not self._leads:
            return
        try:
            async with asyncio.timeout(_RESIGN_SECONDS), self._pool.acquire() as connection:
                await workers.resign(connection, self._owner)
        except _NOT_RESIGNED as error:
            log.warning("the exporter did not resign: its lead ends by itself", error=type(error).__name__)

    async def _query(self) -> None:
        # One turn of `run`: try to lead, and ask the questions if this process leads. The stack returns the connection
        # at the end. So `recording_up` covers the wait for the connection, but not the round, because an error of a
        # question does not mean that the database is down.
        async with AsyncExitStack() as stack:
            with self._recording_up():
                connection = await stack.enter_async_context(self._pool.acquire())
            await self._query_as_leader(connection)
        DATABASE.record_answer()

    async def _query_as_leader(self, connection: Connection) -> None:
        """Lead if no other process leads. Only the leader queries, and only when a round is due."""
        with self._recording_up():
            is_leader = self._leads = await workers.lead(connection, "exporter", self._owner, 3 * EVERY_SECONDS)
        if not is_leader:
            self._latest = None
            self._pauses.forget()
            return
        if not self._pauses.due:
            return
        began_at = monotonic()
        with QUERY_SECONDS.time():
            self._latest = self._with_ages(await self._query_round(connection))
        pause = self._pauses.done(began_at)
        self._fresh_until = monotonic() + 3 * pause  # after three pauses without a new round, the answers are too old

    async def _query_round(self, primary: Connection) -> Rows:
        """The rows of one round. The questions that count work go to the standby, if it exists and keeps up."""
        if self._replica is None:
            return await query_all(primary, self._silent_seconds, self._kind_questions)
        rows_of_server = await query_all(primary, self._silent_seconds, includes=lambda name: name in SERVER_QUESTIONS)
        try:
            async with self._replica.caught_up(primary) as standby:
                rows_of_work = await self._query_work(standby)
        except STANDBY_FAILED:
            READS.labels(EXPORTER, "primary").inc()
            rows_of_work = await self._query_work(primary)
        else:
            READS.labels(EXPORTER, "standby").inc()
        return {**rows_of_work, **rows_of_server}

    async def _query_work(self, connection: Connection) -> Rows:
        return await query_all(
            connection, self._silent_seconds, self._kind_questions, lambda name: name not in SERVER_QUESTIONS
        )

    def _with_ages(self, rows: Rows) -> Rows:
        """The rows, with the age of the oldest snapshot corrected. PostgreSQL does not report since when some snapshots
        have been held. So the age becomes at least the time for which this process has seen the snapshot
        (snapshots.py).
        """
        if "snapshots" not in rows:
            return rows
        (snapshot,) = rows["snapshots"]
        seen = self._snapshots.seconds(snapshot["next_xid"], snapshot["age"])
        return {**rows, "snapshots": [{**snapshot, "oldest": max(snapshot["oldest"], seen)}]}

    @property
    def exports(self) -> bool:
        """Whether this process leads, and its latest answers are not too old. Old numbers would mislead."""
        return self._latest is not None and monotonic() < self._fresh_until

    def describe(self) -> list[Metric]:
        """The list is empty, because only the leader has metrics, and the leader changes."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The latest answers, if this process exports them."""
        latest = self._latest
        if latest is not None and self.exports:
            yield from families(latest, self._kind_questions)


def families(rows: Rows, kind_questions: Sequence[Question] = ()) -> Iterator[Metric]:
    """The metrics of one round."""
    if "queues" in rows and "leases" in rows:
        yield from _queues_metrics(rows["queues"], rows["leases"])
    for name, to_metrics in _FAMILIES.items():
        if name in rows:
            yield from to_metrics(rows[name])
    for question in kind_questions:
        if question.name in rows:
            yield from _metrics_of_kind(question, rows[question.name])


def _metrics_of_kind(question: Question, rows: Sequence[Mapping[str, Any]]) -> list[Metric]:
    """The metrics of a kind's question. If the kind's code fails, the list is empty, because the other metrics must
    still reach the scrape.
    """
    try:
        return list(question.to_metrics(rows))
    except Exception as error:  # noqa: BLE001 - code of others
        EXPORTER_REFUSED.labels(question.name).inc()
        log.warning("a question's rows became no metrics", question=question.name, error=type(error).__name__)
        return []


def _backlog_metrics(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    (backlog,) = rows
    bound = f"; counted up to {CAP}"
    yield _gauge("outbox_rows", f"Hints written and not yet confirmed by the broker{bound}", backlog["outbox"])
    yield _gauge("outbox_oldest_seconds", "Age of the oldest row of the outbox", backlog["outbox_oldest"])
    yield _gauge("dead_letters", f"Failed tasks that wait for somebody to replay them{bound}", backlog["dead_letters"])
    yield _gauge(
        "schedule_oldest_due_seconds", "How long the most overdue schedule has been due", backlog["schedule_oldest"]
    )
    yield _gauge("jobs_unfinished", f"Jobs that have not ended{bound}", backlog["unfinished"])


def _held_metrics(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """Give each kind of limit a value, even if no job waits there, because a graph without values means that the
    exporter got no answer.
    """
    jobs, oldest = dict.fromkeys(_KINDS_OF_LIMITS, 0), dict.fromkeys(_KINDS_OF_LIMITS, 0.0)
    for row in rows:
        limit = row["limit"] if row["limit"] in jobs else "other"
        jobs[limit] += row["jobs"]
        oldest[limit] = max(oldest[limit], row["oldest"])
    yield _labelled(
        "jobs_held",
        "Jobs that wait at a limit, by the kind of the limit. Their tasks are in no queue yet. A job at several limits "
        f"counts at each. Counted up to {CAP} in all",
        ["limit"],
        [((limit,), count) for limit, count in jobs.items()],
    )
    yield _labelled(
        "job_held_oldest_seconds",
        "How long the oldest of the counted jobs has waited at a limit, by the kind of the limit",
        ["limit"],
        [((limit,), seconds) for limit, seconds in oldest.items()],
    )


def _without_code_metrics(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    meaning = f"Tasks that wait for a worker with their code: those of the queue lack it. Counted up to {CAP} in all"
    yield _labelled("queue_tasks_without_code", meaning, ["queue"], [((row["queue"],), row["n"]) for row in rows])


def _workers_metrics(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    (fleet,) = rows
    yield _labelled("workers", "Registered workers", ["state"], [((state,), fleet[state]) for state in fleet.keys()])  # noqa: SIM118 - iterating over a Record gives its values


def _quarantine_metrics(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    meaning = "Units of a duty (such as one schedule of all) that are set aside because they fail alone, too"
    yield _labelled("quarantined_units", meaning, ["duty"], [((row["duty"],), row["n"]) for row in rows])


def _retention_metrics(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    (retention,) = rows
    yield _gauge(
        "retention_oldest_due_seconds",
        "How long retention could have deleted the most overdue job, of the 10,000 jobs that expired first",
        retention["oldest"],
    )


def _database_metrics(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    (database,) = rows
    yield _gauge("database_bytes", "Size of the database", database["bytes"])
    yield _gauge("database_sessions_max", "Sessions that the server allows", database["max_sessions"])


def _queues_metrics(queues: Sequence[Mapping[str, Any]], leases: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    by_queue = {row["queue"]: row for row in queues}
    leases_by_queue = {row["queue"]: row for row in leases}
    # First come the queues of workers, then the queues of external workers. In each of these two groups, the queue with
    # the longest overdue lease is first.
    first_leases = sorted(leases, key=lambda row: (_is_external(row), -row["overdue_oldest"], -row["oldest"]))
    # A queue that is only in `leases_by_queue` has running tasks, but no other tasks and no workers.
    names = sorted({row["queue"] for row in [*_by_urgency(queues)[:MAX_QUEUES], *first_leases[:MAX_QUEUES]]})
    tasks = [((name, state), by_queue[name][state]) for name in names if name in by_queue for state in ("due", "later")]
    tasks += [((name, "running"), leases_by_queue[name]["running"] if name in leases_by_queue else 0) for name in names]
    yield _labelled(
        "queue_tasks",
        f"Tasks of a queue. due: could run now; later: wait for their time; running. Counted up to {CAP}",
        ["queue", "state"],
        tasks,
    )
    yield _metric_per_queue(
        "queue_oldest_due_seconds", "How long the oldest due task has waited", by_queue, names, "oldest"
    )
    yield _metric_per_queue(
        "queue_workers", "Workers that serve the queue and are not draining", by_queue, names, "workers"
    )
    yield _metric_per_queue("queue_paused", "1 while somebody has paused the queue", by_queue, names, "paused")
    yield _metric_per_queue(
        "lease_oldest_seconds", "How long the oldest attempt has been running", leases_by_queue, names, "oldest"
    )
    yield _metric_per_queue(
        "leases_overdue", "Leases that have expired and that nobody has taken over", leases_by_queue, names, "overdue"
    )
    yield _metric_per_queue(
        "lease_overdue_oldest_seconds",
        "How long ago the oldest overdue lease expired",
        leases_by_queue,
        names,
        "overdue_oldest",
    )


def _by_urgency(queues: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The queues, the most urgent first. Tenants name queues, so there may be many.

    There are four groups, in this order:

    1. queues of the platform's workers, with due tasks
    2. queues of the platform's workers, without due tasks
    3. queues of external workers, with due tasks
    4. queues of external workers, without due tasks

    The queues of external workers come last, because the alerts about waiting tasks leave them out. In each group,
    served and unserved queues take turns, so that many queues of one sort do not hide the other sort. (A queue is
    served if at least one worker serves it and is not draining.) Within a sort, the queue whose oldest task has waited
    longest comes first.
    """
    turns = Counter[tuple[bool, bool, bool]]()  # sort -> how many queues of this sort have a key already
    keys: dict[str, tuple[bool, bool, int, bool]] = {}  # queue -> its place in the order: smaller keys come first
    for row in sorted(queues, key=lambda row: -row["oldest"]):
        is_external, is_idle, is_unserved = sort = _is_external(row), row["due"] == 0, row["workers"] == 0
        keys[row["queue"]] = (is_external, is_idle, turns[sort], is_unserved)
        turns[sort] += 1
    return sorted(queues, key=lambda row: keys[row["queue"]])


def _is_external(row: Mapping[str, Any]) -> bool:
    return str(row["queue"]).startswith(EXTERNAL)


def _tables_metrics(tables: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    rows = [((row["name"], kind), row[kind]) for row in tables for kind in ("live", "dead")]
    yield _labelled("table_rows", "Rows of a table, as PostgreSQL itself estimates them", ["table", "kind"], rows)
    sizes = [((row["name"],), row["bytes"]) for row in tables]
    yield _labelled("table_bytes", "Size of a table with its indexes", ["table"], sizes)


def _sessions_metrics(sessions: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    counts = [((row["state"],), row["n"]) for row in sessions]
    yield _labelled("database_sessions", "Sessions in this database, by state", ["state"], counts)
    statement_oldest = max((float(row["statement_oldest"]) for row in sessions), default=0.0)
    yield _gauge("database_statement_oldest_seconds", "Longest statement under way", statement_oldest)


def _snapshots_metrics(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    (snapshot,) = rows
    yield _gauge(
        "database_snapshot_oldest_seconds",
        "Age of the oldest snapshot: of a transaction, prepared or not, or of a standby or its replication slot. "
        "Vacuum keeps all rows that were deleted since. If PostgreSQL does not tell it: since the leader first saw it",
        snapshot["oldest"],
    )
    yield _gauge("database_snapshot_age_transactions", "Age of the oldest snapshot, in transactions", snapshot["age"])


def _slow_metrics(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    by_name = {"other": 0} | {row["statement"]: row["n"] for row in rows}
    meaning = "Statements that have been under way for over a second, by the name in their first line"
    yield _labelled("database_slow_statements", meaning, ["statement"], [((name,), n) for name, n in by_name.items()])


#: The name of a question -> the function that makes metrics of the rows of its answer. The questions `queues` and
#: `leases` are not here, because `_queues_metrics` needs the rows of both.
_FAMILIES: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], Iterator[Metric]]] = {
    "backlog": _backlog_metrics,
    "held": _held_metrics,
    "without_code": _without_code_metrics,
    "workers": _workers_metrics,
    "quarantine": _quarantine_metrics,
    "retention": _retention_metrics,
    "tables": _tables_metrics,
    "sessions": _sessions_metrics,
    "snapshots": _snapshots_metrics,
    "slow": _slow_metrics,
    "database": _database_metrics,
}


def _metric_per_queue(
    name: str, meaning: str, rows: Mapping[str, Mapping[str, Any]], queues: Sequence[str], column: str
) -> Metric:
    # The metric has a value for each of `queues`: the `column` of the queue's row, or 0 if the queue has no row.
    values = [((queue,), rows[queue][column] if queue in rows else 0) for queue in queues]
    return _labelled(name, meaning, ["queue"], values)


@contextmanager
def exporting(
    settings: Settings,
    owner: UUID,
    pool: Pool,
    broker: Broker,
    kind_questions: Sequence[Question] = (),
    replica: Replica | None = None,
    *,
    records_up: bool = False,
) -> Iterator[Exporter]:
    """Add the metrics of the database and of the broker's connections to /metrics. The caller runs the exporter.

    `kind_questions`: the questions of kinds of work, in addition to the exporter's own. `replica`: the standby that
    answers the questions that count work, as long as it keeps up. `records_up`: the exporter records whether the
    database is up, because this process has no heartbeat that does so.
    """
    exporter = Exporter(settings, owner, pool, kind_questions, replica, records_up=records_up)
    LEADS.set_function(lambda: exporter.exports)
    collectors: tuple[Collector, ...] = (exporter, BrokerMetrics(broker)) if settings.metrics else ()
    for collector in collectors:
        REGISTRY.register(collector)
    try:
        yield exporter
    finally:
        LEADS.set_function(lambda: False)
        for collector in collectors:
            REGISTRY.unregister(collector)
