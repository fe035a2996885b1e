"""What only the database knows: right, cheap at any size, and told by one process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast
from uuid import uuid4

import asyncpg
import orjson
import pytest
from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric

from leasehold.db.database import connect, make_pool
from leasehold.domain.errors import DeclarationError, Invalid, StoreError, TooMany, Unavailable
from leasehold.domain.ids import new_id
from leasehold.domain.registry import Pipelines
from leasehold.evaluation.templates import Templates
from leasehold.exporter import exporter as exporting
from leasehold.exporter import queries
from leasehold.exporter.exporter import Exporter, families, query_all
from leasehold.kinds.metrics import Question, gauge
from leasehold.schedules.firing import fire_due
from leasehold.settings import Settings
from leasehold.telemetry import database
from leasehold.transitions import jobs, sweeps, workers
from leasehold.transitions.quarantine import set_aside
from leasehold.transitions.settlements import Failure, Snoozing, fail, snooze
from tests.api.conftest import serving
from tests.factories import ONE, SELDOM, Rows
from tests.telemetry.page import Page

SILENT = 30.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that has no answer within three seconds has no metrics."""
    monkeypatch.setattr(exporting, "_STATEMENT_SECONDS", 60.0)


async def seen(rows: Rows) -> Page:
    return Page(families(await query_all(rows.connection, SILENT)))


def _one(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    yield gauge("one", "One", rows[0]["one"])


def _none(_rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    raise KeyError("column")


GOOD = Question("good", "SELECT 1 AS one", (), _one)
REFUSED = Question("refused", "SELECT 1 FROM missing", (), _one)
NOT_ENCODED = Question("not_encoded", "SELECT $1::int AS one", ("text",), _one)
TOO_FEW_VALUES = Question("too_few_values", "SELECT $1::int AS one", (), _one)
NO_METRIC = Question("no_metric", "SELECT 1 AS one", (), _none)


@pytest.mark.parametrize("bad", [REFUSED, NOT_ENCODED, TOO_FEW_VALUES, NO_METRIC], ids=lambda bad: bad.name)
async def test_a_question_that_cannot_be_answered_leaves_the_other_metrics(rows: Rows, bad: Question) -> None:
    questions = [bad, GOOD]
    names = {metric.name for metric in families(await query_all(rows.connection, SILENT, questions), questions)}
    assert {"leasehold_one", "leasehold_jobs_unfinished", "leasehold_database_bytes"} <= names


@pytest.mark.parametrize("name", ["queues", "backlog", "good"])
def test_a_question_with_the_name_of_another_is_refused(settings: Settings, name: str) -> None:
    with pytest.raises(DeclarationError, match=f"two of the exporter's questions are named '{name}'"):
        Exporter(settings, uuid4(), cast("Any", None), [GOOD, Question(name, "SELECT 1", (), _one)])


def of_queue(page: Page, name: str, queue: str = "default", **labels: str) -> float | None:
    return page[f"leasehold_{name}", {"queue": queue, **labels}]


async def test_a_queue_tells_what_waits_runs_and_is_overdue(rows: Rows) -> None:
    await rows.submit(ONE, count=5)
    await rows.connection.execute("UPDATE task SET available_at = clock_timestamp() - interval '100 seconds'")
    later, running, lapsed = (await rows.claim_all())[:3]
    retried = Failure(later.lease, "error", "e", "m", retryable=True, delay=500.0)
    await fail(rows.connection, [retried])
    await rows.connection.execute(
        "UPDATE task SET status = 'pending', lease_owner = NULL, lease_until = NULL WHERE status = 'running'"
        " AND id <> ALL($1)",
        [running.lease.task_id, lapsed.lease.task_id],
    )
    await rows.lapse(lapsed.lease.task_id)
    page = await seen(rows)
    tasks = {state: of_queue(page, "queue_tasks", state=state) for state in ("due", "later", "running")}
    assert tasks == {"due": 2, "later": 1, "running": 2}
    assert 100 <= (of_queue(page, "queue_oldest_due_seconds") or 0) < 200
    assert of_queue(page, "leases_overdue") == 1
    assert 1 <= (of_queue(page, "lease_overdue_oldest_seconds") or 0) < 100
    assert page["leasehold_outbox_rows"] == 5
    assert page["leasehold_jobs_unfinished"] == 5
    assert page["leasehold_dead_letters"] == 0


def held(page: Page, name: str) -> dict[str, float | None]:
    limits = ("queue", "scope", "tenant", "template", "other")
    return {limit: page[f"leasehold_{name}", {"limit": limit}] for limit in limits}


async def test_jobs_that_wait_at_limits_are_told_by_the_kind_of_the_limit(rows: Rows) -> None:
    """Their steps are blocked, and so in no queue. A job at two limits waits at both; a tenant's words are not told."""
    assert set(held(await seen(rows), "jobs_held").values()) == {0}
    await rows.submit(ONE, count=5)
    first, second, admitted, later, other = [row["id"] for row in await rows.connection.fetch("SELECT id FROM job")]
    waits = "clock_timestamp() - interval '100 seconds', NULL"
    for job_id, key, times in (
        (first, "queue:default", waits),
        (first, "tenant", waits),
        (second, "queue:other", "clock_timestamp() - interval '900 seconds', NULL"),
        (admitted, "queue:default", "clock_timestamp() - interval '1 day', clock_timestamp()"),
        (later, "template:t", "clock_timestamp() + interval '1 day', NULL"),
        (other, "scope:orders:17", waits),
        (other, "ovens:third", waits),
        (other, "trays:first", "clock_timestamp() - interval '500 seconds', NULL"),
    ):
        await rows.connection.execute(
            "INSERT INTO gate_job (tenant_id, key, job_id, priority, ready_at, admitted_at)"
            f" SELECT '*', $1, $2, 1, {times}",
            key,
            job_id,
        )
    page = await seen(rows)
    assert held(page, "jobs_held") == {"queue": 2, "scope": 1, "tenant": 1, "template": 0, "other": 2}
    oldest = held(page, "job_held_oldest_seconds")
    assert oldest["template"] == 0
    assert 900 <= (oldest["queue"] or 0) < 1000
    assert 100 <= (oldest["tenant"] or 0) < 900
    assert 500 <= (oldest["other"] or 0) < 900
    words = {sample.labels["limit"] for sample in page.samples if sample.name == "leasehold_jobs_held"}
    assert words == set(exporting._KINDS_OF_LIMITS), "the rest of a key names a tenant's things"


async def test_tasks_that_no_worker_has_the_code_of_are_told_until_they_are_claimed_or_end(rows: Rows) -> None:
    """They are put off, so they are not due: no other metric would tell that nobody does them."""
    await rows.submit(ONE, count=4)
    for claimed in await rows.claim_all():
        await snooze(rows.connection, [Snoozing(claimed.lease, 3600.0, missing_handler="one.only")])
    page = await seen(rows)
    assert (of_queue(page, "queue_tasks_without_code"), of_queue(page, "queue_tasks", state="due")) == (4, 0)
    ids = [row["id"] for row in await rows.connection.fetch("SELECT id FROM task ORDER BY id")]
    await rows.connection.execute("UPDATE task SET available_at = clock_timestamp() WHERE id = $1", ids[0])
    (claimed,) = await rows.claim_all()
    job_id = await rows.connection.fetchval("SELECT job_id FROM task WHERE id = $1", ids[1])
    await jobs.request_cancel(rows.connection, [job_id], "t", reason="r", by="b")
    await workers.register(rows.connection, uuid4(), host="h", pid=1, version="0", queues=["media"])
    page = await seen(rows)
    assert of_queue(page, "queue_tasks_without_code") == 2
    assert of_queue(page, "queue_tasks_without_code", "media") == 0
    assert (await rows.task(claimed.lease.task_id))["id"] == ids[0]


async def test_a_schedule_that_is_refused_for_its_tenants_sake_is_not_late(rows: Rows) -> None:
    """Nobody else can mend it, so it must not page anybody. An unforeseen error may be ours."""
    refused, due = new_id(), new_id()
    for schedule_id, seconds in ((refused, 500), (due, 100)):
        await rows.connection.execute(
            "INSERT INTO schedule (id, tenant_id, template, cron, timezone, payload_template, scope, scope_id,"
            " priority, overlap, catch_up, catch_up_seconds, next_run_at) VALUES ($1, 't', 'scripted', $2, 'UTC', '{}',"
            " 'tenant', '', 1, 'allow_all', 'one', 3600, clock_timestamp() - make_interval(secs => $3))",
            schedule_id, SELDOM, seconds,
        )  # fmt: skip

    async def late() -> float:
        return (await seen(rows))["leasehold_schedule_oldest_due_seconds"] or 0

    assert await late() >= 500
    too_many = TooMany("too_many_jobs", "m", policy="jobs", at_most=1, retry_after=1.0)
    for error in (too_many, Invalid("unknown_template", "m")):
        await set_aside(rows.connection, "schedules", refused, error)
        assert 100 <= await late() < 500
    for own_error in (RuntimeError(), Unavailable("evaluator_busy", "m"), StoreError("m")):
        await set_aside(rows.connection, "schedules", refused, own_error)
        assert await late() >= 500
    await set_aside(rows.connection, "schedules", refused, too_many)
    assert await late() < 500
    await rows.connection.execute("UPDATE quarantine SET retry_at = clock_timestamp() - interval '1 second'")
    assert await late() >= 500, "its next try should have come"
    tell = "UPDATE schedule SET last_error = jsonb_build_object('code', 'c', 'tick', next_run_at{}) WHERE id = $1"
    await rows.connection.execute(tell.format(""), refused)  # no worker has the code of the tick that is due
    assert 100 <= await late() < 500
    for handlers in (["scripted.step"], None):  # a worker has the code since, or may have it
        worker = new_id()
        await workers.register(rows.connection, worker, host="h", pid=1, version="v", queues=[], handlers=handlers)
        assert await late() >= 500
        await workers.ask_to_drain(rows.connection, worker)
        assert 100 <= await late() < 500
    await rows.connection.execute(tell.format(" - interval '1 minute'"), refused)  # that of an earlier tick was refused
    assert await late() >= 500


async def miss_ticks(rows: Rows) -> None:
    """A schedule with a thousand missed ticks, all of which are caught up."""
    await rows.connection.execute(
        "INSERT INTO schedule (id, tenant_id, template, cron, timezone, payload_template, scope, scope_id, priority,"
        " overlap, catch_up, catch_up_seconds, next_run_at) VALUES ($1, 't', $2, '* * * * *', 'UTC', '{}', 'tenant',"
        " '', 1, 'allow_all', 'all', 600000, date_trunc('minute', clock_timestamp()) - interval '1000 min')",
        new_id(), ONE.name,
    )  # fmt: skip


async def lateness(rows: Rows) -> float:
    return (await seen(rows))["leasehold_schedule_oldest_due_seconds"] or 0


async def test_a_schedule_that_catches_up_is_late_only_when_it_makes_no_run_any_more(rows: Rows) -> None:
    """After an outage it has missed ticks for a while, and nobody can do anything about it."""
    await miss_ticks(rows)
    assert await lateness(rows) >= 60_000, "no worker has begun to catch up"
    created_runs, _ = await fire_due(rows.connection, Templates(Pipelines(ONE)), 3600)
    assert len(created_runs) == 101
    assert await lateness(rows) == 0
    await rows.connection.execute("UPDATE schedule SET catch_up = 'one'")
    assert await lateness(rows) >= 50_000, "its next firing would end its lateness"
    await rows.connection.execute("UPDATE schedule SET catch_up = 'all'")
    await rows.connection.execute("UPDATE job SET created_at = created_at - interval '61 s'")
    assert await lateness(rows) >= 50_000, "it has stopped"
    await rows.connection.execute(
        "UPDATE job SET created_at = clock_timestamp() WHERE id <> (SELECT id FROM job ORDER BY id DESC LIMIT 1)"
    )
    assert await lateness(rows) >= 50_000, "the newest run says when it was fired last"


async def test_a_schedule_that_catches_up_hides_no_other_one_that_no_worker_fires(rows: Rows) -> None:
    for _ in range(2):
        await miss_ticks(rows)
    created_runs, _ = await fire_due(rows.connection, Templates(Pipelines(ONE)), 3600, limit=1)
    assert len(created_runs) == 101
    assert await lateness(rows) >= 60_000


async def test_retention_is_late_by_the_oldest_job_that_it_may_delete(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that must stay, and one that is set aside, do not count: retention leaves them out."""
    await rows.submit(count=4)
    ids = [row["id"] for row in await rows.connection.fetch("SELECT id FROM job ORDER BY id")]
    await jobs.request_cancel(rows.connection, ids, "t", reason="", by="test")

    async def late() -> float | None:
        return (await seen(rows))["leasehold_retention_oldest_due_seconds"]

    assert await late() == 0, "none has expired"
    expire = "UPDATE job SET expires_at = clock_timestamp() - make_interval(secs => $2) WHERE id = $1"
    for job_id, seconds in zip(ids, (900, 500, 100, -1000), strict=True):
        await rows.connection.execute(expire, job_id, seconds)
    assert 900 <= (await late() or 0) < 1000
    await rows.connection.execute("UPDATE job SET notify = true WHERE id = $1", ids[0])  # its end is not reported yet
    assert 500 <= (await late() or 0) < 600
    await set_aside(rows.connection, sweeps.RETENTION, ids[1], StoreError("m"))
    assert 100 <= (await late() or 0) < 200
    monkeypatch.setattr(exporting, "CAP", 2)
    assert await late() == 0, "a round reads no more jobs than that"


async def test_a_dead_letter_is_counted_until_it_is_replayed(rows: Rows) -> None:
    claimed = await rows.leased(ONE)
    await fail(rows.connection, [Failure(claimed.lease, "error", "e", "m", retryable=False, delay=0.0)])
    assert (await seen(rows))["leasehold_dead_letters"] == 1


async def test_a_queue_that_nobody_serves_has_no_workers_and_one_without_tasks_is_told_too(rows: Rows) -> None:
    await rows.submit(ONE)
    for queues in (["media"], ["media", "other"]):
        await workers.register(rows.connection, uuid4(), host="h", pid=1, version="0", queues=queues)
    silent = uuid4()
    await workers.register(rows.connection, silent, host="h", pid=1, version="0", queues=["media"])
    await rows.connection.execute(
        "UPDATE worker SET seen_at = clock_timestamp() - interval '1 hour' WHERE id = $1", silent
    )
    page = await seen(rows)
    assert {queue: of_queue(page, "queue_workers", queue) for queue in ("default", "media", "other")} == {
        "default": 0,
        "media": 2,
        "other": 1,
    }
    assert of_queue(page, "queue_tasks", "other", state="due") == 0
    assert page["leasehold_workers", {"state": "silent"}] == 1


async def test_a_queue_that_is_told_for_its_running_tasks_alone_is_told_as_it_is(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the queues without running tasks only the first are told."""
    monkeypatch.setattr(exporting, "MAX_QUEUES", 1)
    await rows.submit(ONE, count=7)
    _running, older, hidden, *due = [claimed.lease.task_id for claimed in await rows.claim_all()]
    statement = (
        "UPDATE task SET status = 'pending', lease_owner = NULL, lease_until = NULL, queue = $2,"
        " available_at = clock_timestamp() - make_interval(secs => $3) WHERE id = ANY($1)"
    )
    await rows.connection.execute(statement, due, "default", 100)
    await rows.connection.execute(statement, [older], "older", 5000)
    await rows.connection.execute(statement, [hidden], "hidden", 50)
    queues = ["default", "older", "hidden"]
    await workers.register(rows.connection, uuid4(), host="h", pid=1, version="0", queues=queues)
    await rows.connection.execute("INSERT INTO paused_queue (queue, reason) VALUES ('default', 'because')")
    page = await seen(rows)
    tasks = {state: of_queue(page, "queue_tasks", state=state) for state in ("due", "later", "running")}
    assert tasks == {"due": 4, "later": 0, "running": 1}
    assert (of_queue(page, "queue_workers"), of_queue(page, "queue_paused")) == (1, 1)
    assert 100 <= (of_queue(page, "queue_oldest_due_seconds") or 0) < 5000
    assert (of_queue(page, "queue_workers", "older"), of_queue(page, "queue_workers", "hidden")) == (1, None)


async def test_no_tenant_hides_another(rows: Rows) -> None:
    """Lines of several tenants and bands add up, and the oldest of any is told."""
    await rows.submit(ONE, count=2)
    await rows.submit(ONE, priority=0)
    await jobs.submit(rows.connection, [jobs.NewJob(ONE, "another") for _ in range(3)])
    await rows.connection.execute(
        "UPDATE task SET available_at = clock_timestamp() - interval '500 seconds' WHERE tenant_id = 'another'"
    )
    page = await seen(rows)
    assert of_queue(page, "queue_tasks", state="due") == 6
    assert (of_queue(page, "queue_oldest_due_seconds") or 0) >= 500


async def test_no_queue_hides_another(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue with tasks of many tenants took all lines that a round reads. The queues after it, by name, had no due
    tasks, and so no page. Queues of external workers come last.
    """
    monkeypatch.setattr(queries, "MAX_LINES", 6)
    await rows.submit(ONE, count=33)
    ids = [row["id"] for row in await rows.connection.fetch("SELECT id FROM task")]
    for number, (queue, tenants) in enumerate((("a", 9), ("ext:t:b", 9), ("y", 2), ("z", 1))):
        await rows.connection.execute(
            "UPDATE task SET queue = $2, tenant_id = 't' || (n % $3) FROM unnest($1::uuid[]) WITH ORDINALITY AS u(i, n)"
            " WHERE id = i",
            ids[number::4][:9], queue, tenants,
        )  # fmt: skip
    await rows.connection.execute("UPDATE task SET available_at = clock_timestamp() - interval '400 seconds'")
    page = await seen(rows)
    due = {queue: of_queue(page, "queue_tasks", queue, state="due") for queue in ("a", "y", "z", "ext:t:b")}
    assert (due["y"], due["z"], due["ext:t:b"]) == (8, 8, None), due
    assert 0 < (due["a"] or 0) < 9
    assert 400 <= (of_queue(page, "queue_oldest_due_seconds", "z") or 0) < 500
    monkeypatch.setattr(queries, "MAX_LINES", 13)
    page = await seen(rows)
    assert of_queue(page, "queue_tasks", "a", state="due") == 9
    assert of_queue(page, "queue_tasks", "ext:t:b", state="due") == 1


async def move_to_queues(rows: Rows, *waits: tuple[str, float]) -> None:
    """One task for each queue, which has been due for the seconds beside it."""
    await rows.submit(ONE, count=len(waits))
    ids = [row["id"] for row in await rows.connection.fetch("SELECT id FROM task WHERE queue = 'default'")]
    for task_id, (queue, seconds) in zip(ids, waits, strict=True):
        await rows.connection.execute(
            "UPDATE task SET queue = $2, available_at = clock_timestamp() - make_interval(secs => $3) WHERE id = $1",
            task_id, queue, seconds,
        )  # fmt: skip


def told(page: Page, queues: Sequence[str]) -> list[str]:
    return [queue for queue in queues if of_queue(page, "queue_tasks", queue, state="due") is not None]


async def test_a_round_that_cannot_tell_all_queues_tells_those_that_an_alert_is_about(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queues of external workers come last, queues without due tasks before them. Queues with workers and queues
    without take turns.
    """
    waits = (("ext:t:a", 900.0), ("ext:t:b", 800.0), ("y", 50.0), ("z", 40.0), ("busy", 20.0), ("busier", 30.0))
    await move_to_queues(rows, *waits, ("later", -600.0))
    served = ["busy", "busier", "idle", "idler"]
    await workers.register(rows.connection, uuid4(), host="h", pid=1, version="0", queues=served)
    queues = [*(queue for queue, _ in waits), "later", "idle", "idler"]
    order = [
        ["busier"],
        ["y"],
        ["busy"],
        ["z"],
        ["idle", "idler"],
        ["later"],
        ["idle", "idler"],
        ["ext:t:a"],
        ["ext:t:b"],
    ]
    seen_before: set[str] = set()
    for count, next_queues in enumerate(order, 1):
        monkeypatch.setattr(exporting, "MAX_QUEUES", count)
        page = await seen(rows)
        (added,) = {*told(page, queues)} - seen_before
        assert added in next_queues, count
        seen_before.add(added)
    assert seen_before == {*queues}


async def test_running_tasks_of_many_queues_do_not_hide_a_lease_that_has_passed(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rows.submit(ONE, count=4)
    claimed = [one.lease.task_id for one in await rows.claim_all()]
    for task_id, (queue, started, lapsed) in zip(
        claimed, (("ext:t:a", 900, 800), ("b", 700, -60), ("c", 800, -60), ("y", 100, 50)), strict=True
    ):
        await rows.connection.execute(
            "UPDATE task SET queue = $2, started_at = clock_timestamp() - make_interval(secs => $3),"
            " lease_until = clock_timestamp() - make_interval(secs => $4) WHERE id = $1",
            task_id, queue, started, lapsed,
        )  # fmt: skip
    for count, queues in enumerate((["y"], ["c", "y"], ["b", "c", "y"], ["b", "c", "ext:t:a", "y"]), 1):
        monkeypatch.setattr(exporting, "MAX_QUEUES", count)
        page = await seen(rows)
        found = [queue for queue in ("b", "c", "ext:t:a", "y") if of_queue(page, "leases_overdue", queue) is not None]
        assert found == queues
    assert of_queue(page, "leases_overdue", "y") == 1


async def test_jobs_that_wait_for_their_time_hide_none_that_wait_at_a_limit(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a tenant that has many waiting jobs, each at a limit of its own."""
    monkeypatch.setattr(exporting, "CAP", 4)
    await rows.submit(ONE, count=9)
    ids = [row["id"] for row in await rows.connection.fetch("SELECT id FROM job")]
    statement = (
        "INSERT INTO gate_job (tenant_id, key, job_id, priority, ready_at)"
        " SELECT $1, $2 || n, id, 1, clock_timestamp() + make_interval(secs => $3)"
        " FROM unnest($4::uuid[]) WITH ORDINALITY AS u(id, n)"
    )
    await rows.connection.execute(statement, "a", "template:", 3600, ids)
    await rows.connection.execute(statement, "b", "tenant:", -700, ids[:1])
    page = await seen(rows)
    assert held(page, "jobs_held") == {"queue": 0, "scope": 0, "tenant": 1, "template": 0, "other": 0}
    assert 700 <= (held(page, "job_held_oldest_seconds")["tenant"] or 0) < 800
    await rows.connection.execute("UPDATE gate_job SET key = 'template:1', ready_at = ready_at - interval '2 hours'")
    page = await seen(rows)
    assert held(page, "jobs_held")["tenant"] == 0
    assert 2 <= (held(page, "jobs_held")["template"] or 0) <= 4


async def test_a_lease_that_nobody_takes_over_is_told_however_many_run(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "CAP", 4)
    await rows.submit(ONE, count=9)
    claimed = sorted(await rows.claim_all(), key=lambda one: one.lease.task_id)
    await rows.lapse(claimed[-1].lease.task_id)
    page = await seen(rows)
    assert of_queue(page, "leases_overdue") == 1
    assert 1 <= (of_queue(page, "lease_overdue_oldest_seconds") or 0) < 100
    assert of_queue(page, "queue_tasks", state="running") == 4


async def test_a_paused_queue_says_so(rows: Rows) -> None:
    await rows.submit(ONE)
    assert of_queue(await seen(rows), "queue_paused") == 0
    await rows.connection.execute("INSERT INTO paused_queue (queue, reason) VALUES ('default', 'because')")
    assert of_queue(await seen(rows), "queue_paused") == 1


async def test_a_held_snapshot_and_the_tables_are_told(rows: Rows) -> None:
    page = await seen(rows)
    assert page["leasehold_table_rows", {"table": "task", "kind": "dead"}] is not None
    assert (page["leasehold_table_bytes", {"table": "event"}] or 0) > 0
    assert page["leasehold_database_snapshot_oldest_seconds"] == 0
    assert (page["leasehold_database_sessions_max"] or 0) > 0


async def test_a_slow_statement_is_told_by_the_name_in_its_first_line(settings: Settings, rows: Rows) -> None:
    """A row that somebody has locked, and a renewal that waits for it."""
    held = (await rows.leased(ONE)).lease
    locker, slow = [await connect(settings, "test") for _ in range(2)]
    async with locker.transaction():
        await locker.fetchval("SELECT id FROM task WHERE id = $1 FOR UPDATE", held.task_id)
        waiting = asyncio.create_task(
            slow.execute("\n-- a_name\nSELECT FROM task WHERE id = $1 FOR UPDATE", held.task_id)
        )
        async with asyncio.timeout(60):
            while (page := await seen(rows))["leasehold_database_slow_statements", {"statement": "a_name"}] is None:
                await asyncio.sleep(0.1)
    await waiting
    for connection in (locker, slow):
        await connection.close()
    assert page["leasehold_database_slow_statements", {"statement": "a_name"}] == 1
    assert page["leasehold_database_slow_statements", {"statement": "other"}] == 0


async def test_only_the_elected_process_tells_and_another_takes_its_place(settings: Settings, rows: Rows) -> None:
    first, second = (Exporter(settings, uuid4(), pool=None) for _ in range(2))  # type: ignore[arg-type]  # its turns are given a connection here
    for exporter in (first, second):
        await exporter._query_as_leader(rows.connection)
    assert (bool(list(first.collect())), bool(list(second.collect()))) == (True, False)
    await workers.resign(rows.connection, first._owner)
    for exporter in (second, first):
        await exporter._query_as_leader(rows.connection)
    assert (bool(list(first.collect())), bool(list(second.collect()))) == (False, True)


class NoBroker:
    """What the metrics ask of a broker."""

    name = "none"

    def describe(self) -> dict[str, Any]:
        return {"connected": True, "connects": {}}


async def test_a_process_leads_while_its_answers_are_fresh_whatever_question_has_none(
    settings: Settings, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alert that nothing is told must not fire for one question, and must fire if the rounds stand still."""

    def leads() -> float | None:
        return REGISTRY.get_sample_value("leasehold_exporter_leads")

    def refused() -> float | None:
        return REGISTRY.get_sample_value("leasehold_exporter_refused_total", {"question": "backlog"})

    monkeypatch.setattr(queries, "BACKLOG", "SELECT 1 FROM missing")
    with exporting.exporting(settings, uuid4(), cast("Any", None), cast("Any", NoBroker()), [GOOD]) as exporter:
        assert leads() == 0
        assert REGISTRY.get_sample_value("leasehold_exporter_refused_total", {"question": "good"}) is not None
        before = refused()
        assert before is not None
        await exporter._query_as_leader(rows.connection)
        assert leads() == 1
        assert refused() == before + 1
        assert REGISTRY.get_sample_value("leasehold_database_bytes") is not None
        assert REGISTRY.get_sample_value("leasehold_jobs_unfinished") is None
        exporter._fresh_until = 0.0  # the rounds since then ended with errors
        assert leads() == 0
        assert REGISTRY.get_sample_value("leasehold_database_bytes") is None
        await workers.resign(rows.connection, exporter._owner)
    assert leads() == 0


async def test_an_api_tells_whether_it_reaches_the_database_also_if_nobody_asks_whether_it_is_ready(
    settings: Settings, rows: Rows
) -> None:
    """Or it would seem to be without one from its start, and later never."""
    database.UP.set(0)
    async with make_pool(settings, "test", 1) as pool:
        exporter = Exporter(settings, uuid4(), pool, records_up=True)
        await exporter._query()
        assert REGISTRY.get_sample_value("leasehold_database_up") == 1
        await rows.connection.execute("ALTER TABLE leadership RENAME TO elsewhere")
        with pytest.raises(asyncpg.PostgresError):
            await exporter._query()
        assert REGISTRY.get_sample_value("leasehold_database_up") == 0
        await exporter.resign()  # the end of a process raises nothing
        await rows.connection.execute("ALTER TABLE elsewhere RENAME TO leadership")


@pytest.mark.parametrize("changes", [{}, {"console_only": True}], ids=["api", "console"])
async def test_when_the_leading_api_or_console_ends_another_process_tells_at_its_next_try(
    settings: Settings, rows: Rows, changes: dict[str, Any]
) -> None:
    leader = "SELECT owner FROM leadership WHERE role = 'exporter'"
    async with serving(settings.model_copy(update=changes)):
        while await rows.connection.fetchval(leader) is None:
            await asyncio.sleep(0.01)
        other = Exporter(settings, uuid4(), pool=None)  # type: ignore[arg-type]  # its turns are given a connection here
        await other._query_as_leader(rows.connection)
        await other.resign()
        assert not list(other.collect())
    await other._query_as_leader(rows.connection)
    assert list(other.collect())


@pytest.fixture
async def crowded(rows: Rows) -> Rows:
    """Twenty thousand finished jobs, ten thousand that wait for later and as many that are due, in four queues."""
    await rows.connection.execute(
        """
        INSERT INTO job (id, tenant_id, pipeline, pipeline_version, steps_left, event_seq, params, inputs,
                         output_prefix, status, finished_at)
        SELECT gen_random_uuid(), 't', 'one', 1, 1, 1, '{}', '{}', '', CASE WHEN n < 20000 THEN 'succeeded'
               ELSE 'queued' END, CASE WHEN n < 20000 THEN now() END
        FROM generate_series(0, 39999) AS n
        """
    )
    await rows.connection.execute(
        """
        INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, status, max_attempts, available_at,
                          finished_at)
        SELECT gen_random_uuid(), id, 't' || (n % 5), 'only', 0, 'q' || (n % 4), n % 3,
               CASE WHEN status = 'succeeded' THEN 'succeeded' WHEN n % 2 = 0 THEN 'waiting' ELSE 'pending' END, 3,
               CASE WHEN n % 2 = 0 THEN now() + interval '1 hour' ELSE now() - interval '1 minute' END, finished_at
        FROM (SELECT id, status, finished_at, row_number() OVER () AS n FROM job) AS j
        """
    )
    await rows.connection.execute(
        """
        INSERT INTO gate_job (tenant_id, key, job_id, priority, admitted_at)
        SELECT '*', 'queue:q' || (n % 4), id, 1, CASE WHEN n % 2 = 0 THEN now() END
        FROM (SELECT id, row_number() OVER () AS n FROM job) AS j
        """
    )
    await rows.connection.execute("VACUUM ANALYZE task, job, gate_job")
    return rows


MAX_PAGES = {"QUEUES": 60 * 30, "LEASES": 50, "BACKLOG": 500, "HELD": 300, "WORKERS": 50}
LOOKS: dict[str, tuple[Any, ...]] = {
    "QUEUES": (100, SILENT, 1000),
    "LEASES": (100, 1000),
    "BACKLOG": (100,),
    "HELD": (100,),
    "WORKERS": (SILENT,),
}


@pytest.mark.parametrize("name", LOOKS)
async def test_a_look_reads_no_more_than_its_cap_whatever_the_tables_hold(crowded: Rows, name: str) -> None:
    """In pages. Sixty lines of which ten each are counted, and not the twenty thousand tasks that wait."""
    statement = getattr(queries, name)
    plan = await crowded.connection.fetchval(
        f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {_literal(statement, LOOKS[name])}"
    )
    (explained,) = orjson.loads(plan)
    root = explained["Plan"]
    assert "Seq Scan on task" not in plan
    assert "Seq Scan on gate_job" not in plan
    assert root["Shared Hit Blocks"] + root["Shared Read Blocks"] < MAX_PAGES[name], plan


def _literal(statement: str, values: tuple[Any, ...]) -> str:
    """EXPLAIN takes no parameters."""
    for number, value in enumerate(values, 1):
        statement = statement.replace(f"${number}", str(value))
    return statement
