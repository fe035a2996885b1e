"""What the API reads of runs and queues: each row that a statement is about, and no other row."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import orjson
import pytest

from leasehold.db import run_reads
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.states import JobState
from leasehold.transitions import claims, progress, queues, settlements
from leasehold.transitions.jobs import RunOf, request_cancel
from leasehold.transitions.progress import Progress
from leasehold.transitions.settlements import Completion, Failure, Output
from tests.factories import Rows

RUN = RunOf("template", 1, "tenant", "")
#: A run whose first step may be tried again.
PATIENT = Pipeline(
    "patient",
    module="tests.factories",
    steps=[Step("a", max_attempts=9), Step("b", needs=("a",)), Step("c", needs=("b",)), Step("d", needs=("c",))],
)


async def fail_first_step(rows: Rows, tags: dict[str, str], *codes: str) -> UUID:
    """A run whose first step fails with each of the codes, and then succeeds with one output."""
    claimed = await rows.leased(PATIENT, run=RUN, tags=tags)
    for code in codes:
        failure = Failure(claimed.lease, "error", code, f"{code} weather", retryable=True, delay=0)
        await settlements.fail(rows.connection, [failure])
        (claimed,) = await claims.claim(rows.connection, rows.terms, [claimed.lease.task_id])
    output = Output(f"{codes[-1]}.txt", f"key-{codes[-1]}", 3, "sha", "text/plain")
    await settlements.complete(rows.connection, [Completion(claimed.lease, [output])])
    return claimed.job_id


async def test_a_run_is_read_with_its_own_tags_errors_outputs_and_events(rows: Rows) -> None:
    """Two runs of one tenant differ in their tags, errors, outputs and events."""
    short = await fail_first_step(rows, {"color": "red"}, "bad")
    long = await fail_first_step(rows, {"size": "s", "shape": "round"}, "wet", "cold", "windy")
    expected: dict[UUID, Any] = {
        short: ({"color": "red"}, ["bad", None, None, None], ["bad.txt"]),
        long: ({"size": "s", "shape": "round"}, ["windy", None, None, None], ["windy.txt"]),
    }
    for run_id, own in expected.items():
        run = await run_reads.find_run(rows.connection, "t", run_id)
        assert run is not None
        codes = [None if step["error"] is None else step["error"]["code"] for step in run["steps"]]
        assert (run["tags"], codes, [output["name"] for output in run["outputs"]]) == own
        assert run["updated_at"] == (await rows.events(run_id))[-1]["at"]


async def test_a_skipped_step_counts_as_done_in_the_progress_of_a_run(rows: Rows) -> None:
    """The first page of a short run has all its steps. A later page needs the progress of those before it."""
    claimed = await rows.leased(PATIENT, run=RUN)
    await settlements.complete(rows.connection, [Completion(claimed.lease)])
    (claimed,) = await rows.claim_all()
    await progress.report(rows.connection, [Progress(claimed.lease, 40.0, "begun")])
    await rows.connection.execute(
        "UPDATE task SET status = 'skipped', finished_at = now(), lease_owner = NULL, lease_until = NULL,"
        " waiting_on = 0 WHERE job_id = $1 AND step IN ('b', 'c')",
        claimed.job_id,
    )
    first = await run_reads.find_run(rows.connection, "t", claimed.job_id)
    assert first is not None
    later = await run_reads.find_run(rows.connection, "t", claimed.job_id, first["last_step"])
    assert later is not None
    assert first["all_steps"] is None
    assert (later["steps"], later["all_steps"]) == (None, {"n": 4, "percent": 75, "phase": "d"})


async def listed(rows: Rows, status: str | None, before: UUID | None = None) -> list[UUID]:
    page = await run_reads.list_runs(
        rows.connection, "t", template=None, scope=None, status=status, before=before, limit=10
    )
    return [row["id"] for row in page]


async def test_a_run_past_its_retention_is_neither_found_nor_listed(rows: Rows) -> None:
    """Retention may delete its objects at any moment."""
    ids = []
    for _ in range(2):
        claimed = await rows.leased(run=RUN)
        await settlements.complete(rows.connection, [Completion(claimed.lease)])
        ids.append(claimed.job_id)
    kept, expired = ids
    await rows.connection.execute(
        "UPDATE job SET expires_at = clock_timestamp() + CASE WHEN id = $1 THEN interval '1 h' ELSE '0' END", kept
    )
    for find in (run_reads.find_run, run_reads.find_listed_run):
        assert await find(rows.connection, "t", kept) is not None
        assert await find(rows.connection, "t", expired) is None
    assert await listed(rows, None) == await listed(rows, "succeeded") == [kept]


async def test_a_list_of_runs_with_a_status_goes_on_after_the_last_run_of_its_page(rows: Rows) -> None:
    """It has no run of another tenant, no run with another status, and no job that is no run."""
    runs: dict[str, list[UUID]] = {status: [] for status in JobState}
    for _ in range(3):
        for tenant in ("t", "other"):
            await rows.submit(run=RUN, tenant=tenant)
            await rows.submit(tenant=tenant)
            cancelled, asked_to_end, failed, done, _running = [
                await rows.leased(run=RUN, tenant=tenant) for _ in range(5)
            ]
            await settlements.release(rows.connection, [cancelled.lease])
            for claimed in (cancelled, asked_to_end):
                await request_cancel(rows.connection, [claimed.job_id], tenant, reason="r", by="b")
            failure = Failure(failed.lease, "error", "bad", "bad weather", retryable=False, delay=0)
            await settlements.fail(rows.connection, [failure])
            await settlements.complete(rows.connection, [Completion(done.lease)])
    for row in await rows.connection.fetch(
        "SELECT j.id, j.status FROM job j JOIN run r ON r.job_id = j.id WHERE j.tenant_id = 't' ORDER BY j.id DESC"
    ):
        runs[row["status"]].append(row["id"])
    found = {status: len(of_status) for status, of_status in runs.items() if of_status}
    assert found == dict.fromkeys(("queued", "running", "cancel_requested", "cancelled", "failed", "succeeded"), 3)
    for status, of_status in runs.items():
        assert await listed(rows, status) == of_status
        for place, run_id in enumerate(of_status, 1):
            assert await listed(rows, status, run_id) == of_status[place:]


def rows_read_of(node: Mapping[str, Any]) -> int:
    """The rows that a plan read in tables and indexes, also those that a condition dropped. What it read about each
    row of its answer does not count.
    """
    if node.get("Parent Relationship") == "SubPlan":
        return 0
    own = 0
    if "Relation Name" in node:
        own = round((node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"])
    return own + sum(rows_read_of(child) for child in node.get("Plans", ()))


async def explained(rows: Rows, statement: str, *values: Any) -> dict[str, Any]:
    plan = await rows.connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", *values)
    (whole,) = orjson.loads(plan) if isinstance(plan, str) else plan
    found: dict[str, Any] = whole["Plan"]
    return found


@pytest.mark.parametrize("status", ["failed", "running"])
async def test_a_later_page_of_runs_with_a_status_reads_no_more_runs_than_it_shows(rows: Rows, status: str) -> None:
    """Beside many runs with other statuses, and many runs of other tenants."""
    await rows.connection.execute(
        "WITH made AS (INSERT INTO job (id, tenant_id, pipeline, pipeline_version, status, steps_left, event_seq,"
        " params, inputs, output_prefix, error, finished_at) SELECT ('00' || substr(md5(n::text), 3))::uuid,"
        " CASE WHEN n % 2 = 0 THEN 't' ELSE 'other' END, 'report', 1, CASE WHEN n % 8 < 2 THEN $1 ELSE 'succeeded' END,"
        " 0, 1, '{}', '{}', 'x', CASE WHEN n % 8 < 2 AND $1 = 'failed' THEN '{}'::jsonb END,"
        " CASE WHEN n % 8 >= 2 OR $1 = 'failed' THEN now() END FROM generate_series(1, 12000) AS n"
        " RETURNING id, tenant_id)"
        " INSERT INTO run (job_id, tenant_id, template, version, scope, scope_id)"
        " SELECT id, tenant_id, 'report', 1, 'tenant', '' FROM made",
        status,
    )
    await rows.connection.execute("ANALYZE job, run")
    ids = await rows.connection.fetch(
        "SELECT id FROM job WHERE tenant_id = 't' AND status = $1 ORDER BY id DESC", status
    )
    before = ids[len(ids) // 2]["id"]
    statement = run_reads.list_statement(template=False, scope=False, status=status)
    plan = await explained(rows, statement, "t", before, 20, status)
    assert plan["Actual Rows"] == 20
    assert rows_read_of(plan) < 60, plan  # 20 runs and 20 jobs


EARLY, LATE, FUTURE = (
    datetime(2026, 1, 1, tzinfo=UTC),
    datetime(2026, 1, 2, tzinfo=UTC),
    datetime(2999, 1, 1, tzinfo=UTC),
)
_TASK = (
    "INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, status, max_attempts, available_at,"
    " lease_owner, lease_until, finished_at) SELECT new.id, j.id, j.tenant_id, new.id::text, 9, $1, 1, $2, 1, new.at,"
    " CASE WHEN $2 = 'running' THEN new.id END, CASE WHEN $2 = 'running' THEN new.at END,"
    " CASE WHEN $2 = 'succeeded' THEN new.at END"
    " FROM job j, (SELECT gen_random_uuid() AS id, $3::timestamptz AS at) AS new"
)


async def queues_of_each_sort(rows: Rows) -> None:
    """Tasks with every status that waits, due and not due. Nothing waits in the last queue."""
    await rows.submit()
    await rows.connection.execute("DELETE FROM task")
    tasks = {
        "a": [("retry", EARLY)],
        "b": [("waiting", LATE), ("waiting", EARLY)],
        "c": [("pending", LATE), ("pending", FUTURE), ("retry", FUTURE), ("running", EARLY)],
        "d": [("waiting", FUTURE)],
        "paused": [("pending", EARLY)],
        "z": [("running", EARLY), ("succeeded", EARLY)],
    }
    for queue, of_queue in tasks.items():
        for status, at in of_queue:
            await rows.connection.execute(_TASK, queue, status, at)
    await queues.pause(rows.connection, "paused", "a look")


async def test_the_list_of_queues_counts_what_is_due_whichever_way_it_waits(rows: Rows) -> None:
    """Also in the first queue of the list."""
    await queues_of_each_sort(rows)
    expected = {"a": (1, EARLY), "b": (2, EARLY), "c": (1, LATE), "d": (0, None), "paused": (1, EARLY)}
    while expected:
        found = await run_reads.queues(rows.connection, 30.0)
        assert {row["queue"]: (row["runnable"], row["oldest"]) for row in found} == expected
        queue = next(iter(expected))
        await rows.connection.execute("DELETE FROM task WHERE queue = $1", queue)
        await rows.connection.execute("DELETE FROM paused_queue WHERE queue = $1", queue)
        del expected[queue]
    assert await run_reads.queues(rows.connection, 30.0) == []


async def test_only_due_tasks_of_queues_that_are_not_paused_are_runnable(rows: Rows) -> None:
    await queues_of_each_sort(rows)
    bounds = {"a": 9, "b": 9, "c": 9, "d": 9, "paused": 9, "z": 9, "unknown": 9}
    runnable = {"a": 1, "b": 2, "c": 1, "d": 0, "z": 0, "unknown": 0}
    assert await run_reads.count_runnable(rows.connection, bounds) == runnable
    assert await run_reads.count_runnable(rows.connection, bounds | {"b": 1}) == runnable | {"b": 1}


async def test_the_depth_of_a_queue_counts_what_waits_in_it_now_or_later(rows: Rows) -> None:
    await queues_of_each_sort(rows)
    found = {queue: await run_reads.depth(rows.connection, queue, 9) for queue in ("a", "b", "c", "d", "z")}
    assert found == {"a": 1, "b": 2, "c": 3, "d": 1, "z": 0}
    assert await run_reads.depth(rows.connection, "c", 2) == 2


def recursion_of(node: Mapping[str, Any]) -> list[int]:
    """How many rows each recursion of a plan made."""
    own = [round(node["Actual Rows"] * node["Actual Loops"])] if node["Node Type"] == "Recursive Union" else []
    return own + [count for child in node.get("Plans", ()) for count in recursion_of(child)]


async def test_the_list_of_queues_visits_each_queue_once_however_many_tasks_wait_there(rows: Rows) -> None:
    """If a visit led to two queues, forty queues would take a thousand billion visits."""
    for queue in ("a", "b", "c", "d", "e"):
        for number in range(3):
            await rows.submit(Pipeline(f"{queue}{number}", module="tests.factories", steps=[Step("x", queue=queue)]))
    plan = await explained(rows, run_reads._QUEUES, 10, 100, 30.0, None, 10)
    assert (plan["Actual Rows"], recursion_of(plan)) == (5, [5])
