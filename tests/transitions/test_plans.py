"""The hot statements find each row by its key, and touch no row that they do not need: a backlog, and whatever else
runs, cost a claim and a completion nothing.
"""

from __future__ import annotations

import re

import pytest

from leasehold.db import event_reads, statistics
from leasehold.pipelines.media import reads as media_reads
from leasehold.transitions import claims
from leasehold.transitions.settlements import cancellation, completion, releasing, snoozing, suspending
from leasehold.transitions.workflows import reading, recording
from tests.factories import THREE, Rows
from tests.transitions.conftest import Open

STATEMENTS = {
    "claim": ("uuid[], uuid, interval, int, uuid[], bool", claims.CLAIM),
    "complete": ("uuid[], uuid[], int[], jsonb[], jsonb[], bool[], interval", completion.COMPLETE),
    "complete_last": ("uuid[], uuid[], int[], jsonb[]", completion.COMPLETE_LAST),
}
#: These, and the others that a worker sends for its tasks.
OF_WORKERS = STATEMENTS | {
    "renew": ("uuid, uuid[], int[], interval", claims.RENEW),
    "to_cancel": ("uuid, uuid[]", claims.CANCELLED),
    "release": ("uuid[], uuid[], int[]", releasing.RELEASE),
    "acknowledge_cancel": ("uuid[], uuid[], int[]", cancellation.ACKNOWLEDGE_CANCEL),
    "snooze": ("uuid[], uuid[], int[], float8[], jsonb[], jsonb[], text[], bool[]", snoozing.SNOOZE),
}
#: What the API reads while a client polls or streams.
READS = {
    "find_media": ("uuid, text", media_reads.FIND_MEDIA),
    "read_journal": ("uuid[], uuid[], int[], text, int, int", reading.READ),
    "read_short_journal": ("uuid[], uuid[], int[]", reading.READ_SHORT),
    "read_open_calls": ("uuid[], uuid[], int[], jsonb[]", reading.READ_OPEN),
    "read_signal": ("uuid, uuid, int, text, bigint", reading.READ_SIGNAL),
    "last_event_numbers": ("uuid[]", event_reads.LAST_EVENT_NUMBERS),
    "events_after": ("uuid, text, int, int", event_reads.EVENTS_AFTER),
}
#: What a worker sends for the calls of its workflows.
RECORDS = {
    "record_calls": ("uuid[], uuid[], int[], jsonb[]", recording.RECORD),
    "suspend": (
        "uuid[], uuid[], int[], jsonb[], int[], int[], float8[], uuid[], interval",
        suspending.SUSPEND,
    ),
}
#: What an index of all that waits, or all that runs, is called.
OF_MANY = ("task_runnable", "task_running", "job_live")


async def plan_of(rows: Rows, types: str, statement: str) -> str:
    """As the platform's own connections plan it."""
    nothing = ", ".join("NULL" for _ in types.split(","))
    await rows.connection.execute(f"PREPARE planned ({types}) AS {statement}")
    try:
        said = await rows.connection.fetch(f"EXPLAIN (COSTS OFF) EXECUTE planned ({nothing})")
    finally:
        await rows.connection.execute("DEALLOCATE planned")
    return "\n".join(row[0] for row in said)


@pytest.mark.parametrize("backlog", [0, 2000])
@pytest.mark.parametrize("name", STATEMENTS)
async def test_a_hot_statement_reads_nothing_but_the_rows_it_is_about(rows: Rows, name: str, backlog: int) -> None:
    for _ in range(backlog // 500):
        await rows.submit(THREE, 500)
    if backlog:
        await rows.connection.execute("ANALYZE task, job")
    plan = await plan_of(rows, *STATEMENTS[name])
    # `o`: a job's other steps, looked at only where some are done outside.
    assert not re.search(r"Seq Scan on (?!task o\b)", plan), plan
    for index in OF_MANY:
        assert index not in plan, plan
    # Two loops over a batch, each row against each: what is needed of a job is taken along instead.
    assert not re.search(r"Join Filter: .*job_id", plan), plan


@pytest.mark.parametrize("jobs", [0, 1, 100, 400])
@pytest.mark.parametrize("name", OF_WORKERS)
async def test_a_hot_statement_reads_no_index_from_end_to_end_while_the_tables_are_young(
    rows: Rows, name: str, jobs: int
) -> None:
    """PostgreSQL has no statistics of them then. A worker's connection keeps its plan while the tables grow."""
    for table in ("task", "job"):  # an autovacuum in between would make the statistics
        await rows.connection.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
    if jobs:
        await rows.submit(count=jobs)
    finds_rows_by_key((await plan_of(rows, *OF_WORKERS[name])).splitlines())


@pytest.mark.parametrize("jobs", [0, 3])
@pytest.mark.parametrize("name", OF_WORKERS)
async def test_a_burst_after_a_quiet_time_does_not_keep_the_plans_of_the_quiet_time(
    rows: Rows, name: str, jobs: int
) -> None:
    """A vacuum has found no jobs, or three. Then thousands come, a minute before autovacuum counts them."""
    for table in ("task", "job"):
        await rows.connection.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
    if jobs:
        await rows.submit(count=jobs)
    await rows.connection.execute("VACUUM ANALYZE")
    types, statement = OF_WORKERS[name]
    nothing = ", ".join("NULL" for _ in types.split(","))
    await rows.connection.execute(f"PREPARE kept ({types}) AS {statement}")
    await rows.connection.fetch(f"EXPLAIN EXECUTE kept ({nothing})")  # plans it; a worker keeps this plan
    assert await statistics.analyze_grown_tables(rows.connection) == []
    for _ in range(4):
        await rows.submit(count=500)
    assert {"task", "job"} <= set(await statistics.analyze_grown_tables(rows.connection))
    explained = await rows.connection.fetch(f"EXPLAIN (COSTS OFF) EXECUTE kept ({nothing})")
    finds_rows_by_key([row[0] for row in explained])
    assert await statistics.analyze_grown_tables(rows.connection) == []


@pytest.mark.parametrize(
    ("pages", "analyzed_pages", "is_analyzed"),
    [(32, 0, False), (33, 0, True), (80, 40, False), (81, 40, True), (16383, 0, True), (16384, 0, False)],
)
async def test_statistics_are_renewed_while_a_table_is_young_and_has_more_than_doubled(
    rows: Rows, pages: int, analyzed_pages: int, is_analyzed: bool
) -> None:
    """Autovacuum comes in time to a table that needs long to double."""
    await rows.connection.execute("CREATE TABLE grown (x text) WITH (fillfactor = 10, autovacuum_enabled = off)")
    row_of_a_page = "INSERT INTO grown SELECT repeat('x', 900) FROM generate_series(1, $1::int)"
    await rows.connection.execute(row_of_a_page, analyzed_pages)
    await rows.connection.execute("ANALYZE grown")
    await rows.connection.execute(row_of_a_page, pages - analyzed_pages)
    assert await rows.connection.fetchval("SELECT pg_relation_size('grown') / 8192") == pages
    assert await statistics.analyze_grown_tables(rows.connection) == ["grown"] * is_analyzed
    known = await rows.connection.fetchval("SELECT relpages FROM pg_class WHERE oid = 'grown'::regclass")
    assert known == (pages if is_analyzed else analyzed_pages)


async def test_statistics_do_not_wait_for_a_table_that_autovacuum_works_on(rows: Rows, another: Open) -> None:
    """Autovacuum gives a table up if another session waits for it."""
    for _ in range(4):
        await rows.submit(count=500)
    other = (await another()).connection
    async with other.transaction():
        await other.execute("LOCK TABLE task IN SHARE UPDATE EXCLUSIVE MODE")
        names = await statistics.analyze_grown_tables(rows.connection)
        assert "job" in names
        assert "task" not in names
    assert await statistics.analyze_grown_tables(rows.connection) == ["task"]


def finds_rows_by_key(lines: list[str]) -> None:
    # `o`: a job's other steps, looked at only where some are done outside.
    of_rows = re.compile(r"Scan (using \w+ )?on (task(?! o\b)|job)\b")
    scans = [number for number, line in enumerate(lines) if of_rows.search(line)]
    assert scans
    for number in scans:
        assert re.search(r"(Index|Recheck) Cond:", lines[number + 1]), "\n".join(lines[number:])


@pytest.mark.parametrize("backlog", [0, 2000])
@pytest.mark.parametrize("name", READS)
async def test_a_read_of_the_api_finds_every_row_by_its_key(rows: Rows, name: str, backlog: int) -> None:
    for _ in range(backlog // 500):
        await rows.submit(THREE, 500)
    if backlog:
        await rows.connection.execute("ANALYZE media, task, job, output, failure, result")
    plan = await plan_of(rows, *READS[name])
    assert "Seq Scan" not in plan, plan
    for index in OF_MANY:
        assert index not in plan, plan


@pytest.mark.parametrize("name", ["read_journal", "read_short_journal", "read_open_calls"])
async def test_a_journal_of_many_calls_is_read_row_by_row(rows: Rows, name: str) -> None:
    """A workflow waits for thousands of steps: no call is compared with each other call, or with each run."""
    plan = await plan_of(rows, *READS[name])
    assert "Join Filter" not in plan, plan
    assert "Index Scan using task_pkey on task s" in plan, plan
    assert "Index Scan using job_pkey on job c" in plan, plan
    assert name != "read_open_calls" or "number = ((p.place ->> 1))::integer" in plan, plan


@pytest.mark.parametrize("name", ["read_journal", "read_short_journal", "read_open_calls"])
async def test_no_call_of_a_journal_is_compared_with_each_result_where_there_were_few(rows: Rows, name: str) -> None:
    """A worker plans while PostgreSQL knows of few results; the next workflow has thousands."""
    await rows.connection.execute("VACUUM ANALYZE journal, task, job, result, failure")
    plan = await plan_of(rows, *READS[name])
    assert "Join Filter: (r.task_id" not in plan, plan
    assert "Index Scan using result_pkey on result r\n" in plan, plan


@pytest.mark.parametrize("is_analyzed", [False, True])
@pytest.mark.parametrize("name", RECORDS)
async def test_a_recorded_result_finds_the_call_that_started_its_run_by_the_run(
    rows: Rows, name: str, *, is_analyzed: bool
) -> None:
    """A workflow may have started thousands of runs, and awaits all of them. PostgreSQL may know of many workflows with
    one call only, which await few runs.
    """
    if is_analyzed:
        await rows.submit(count=500)
        await rows.connection.execute(
            "INSERT INTO journal (job_id, branch, number, kind, name, state, child_id, epoch)"
            " SELECT id, '', 1, 'result', 'one', 'open',"
            " md5((row_number() OVER () % 100)::text)::uuid, 1 FROM job"
        )
        await rows.connection.execute("VACUUM ANALYZE journal, task, job")
    plan = await plan_of(rows, *RECORDS[name])
    assert "Seq Scan on journal" not in plan, plan
    by_run = re.findall(r"Scan (?:using|on) journal_child.*\n\s+Index Cond: (.*)", plan)
    assert [re.sub(r"\w+\.", "", condition) for condition in by_run] == ["(child_id = child_id)"], plan
    by_place = re.findall(r"Index Scan using journal_pkey on journal \w+\n\s+Index Cond: (.*)", plan)
    assert by_place
    assert all("number = " in condition for condition in by_place), plan


async def test_a_claim_takes_only_what_it_was_asked_for_from_a_backlog(rows: Rows) -> None:
    hints = [*await rows.submit(count=300)]
    wanted = [hint.hint.task_id for hint in hints[::100]]
    taken = await claims.claim(rows.connection, rows.terms, [*wanted, *wanted])
    assert [claimed.lease.task_id for claimed in taken] == sorted(wanted)
