"""One bad row, or one part that is silent, stops neither a worker nor the neighbours of what is bad."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from leasehold.broker import make_broker
from leasehold.broker.announcer import Announcer
from leasehold.db.database import Connection, connect, make_pool
from leasehold.domain import cron
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.errors import Invalid, StoreUnavailable
from leasehold.domain.ids import new_id
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines
from leasehold.evaluation.templates import Templates
from leasehold.exporter.exporter import families, query_all
from leasehold.kinds.metrics import questions_of
from leasehold.limits.admission import Admission, Payer
from leasehold.pipelines import SHIPPED
from leasehold.pipelines.generation import rows as generations
from leasehold.pipelines.generation.pipeline import GENERATION
from leasehold.pipelines.webhooks.pipeline import webhooks as deliveries
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.schedules import firing as schedules
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.telemetry.duties import ERRORS
from leasehold.transitions import concurrency, jobs, quarantine, settlements, sweeps, webhooks
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Completion, Suspending
from leasehold.transitions.workflows import children
from leasehold.transitions.workflows.records import Call
from leasehold.worker.attempts.reporter import Reporter
from leasehold.worker.maintenance import housekeeping as housekeepers
from leasehold.worker.maintenance.housekeeping import NEXT_BATCH_SECONDS, Housekeeping
from leasehold.worker.maintenance.relay import Relay
from leasehold.worker.worker import Worker
from tests.api.conftest import Running, client_of
from tests.api.media_api import problem
from tests.factories import ONE, SELDOM, Rows
from tests.runs.conftest import SCOPES
from tests.runs.work import pipelines
from tests.security.poison import heal, poison, set_aside, until

KEEP = 86_400
TEMPLATES = Templates(pipelines())
#: No worker serves its queue.
ELSEWHERE = Pipeline("one", module="tests.factories", steps=[Step("only", queue="elsewhere")])
FREED = "SELECT status = 'pending' FROM task WHERE id = $1"


@pytest.fixture(autouse=True)
def slow_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a test takes on a busy machine, nothing is tried again before it says so."""
    monkeypatch.setattr(quarantine, "BACKOFF", (1200, 2400, 3600, 4800, 6000, 7200))


@pytest.fixture
async def verbs(rows: Connection) -> Rows:
    return Rows(rows)


@pytest.fixture
def quick(settings: Settings, tmp_path: Path) -> Settings:
    return settings.model_copy(
        update={
            "pipelines": "tests.runs.work:pipelines",
            "work_dir": str(tmp_path),
            "poll_seconds": 0.1,
            "sweep_seconds": 0.2,
            "worker_children": 1,
        }
    )


@pytest.fixture
async def worker(quick: Settings) -> AsyncIterator[Worker]:
    async with Worker(quick, pipelines()) as worker:
        yield worker


async def schedule(rows: Connection, **columns: Any) -> UUID:
    """A schedule that is due, as no door would write it. No further tick of its comes due while a test runs."""
    row: dict[str, Any] = {
        "id": new_id(), "tenant_id": "acme", "template": "scripted", "cron": SELDOM, "timezone": "UTC",
        "payload_template": {}, "scope": "tenant", "scope_id": "", "priority": 1, "overlap": "allow_all",
        "catch_up": "one", "catch_up_seconds": 3600, "next_run_at": datetime.now(UTC) - timedelta(seconds=1),
    } | columns  # fmt: skip
    places = ", ".join(f"${n}" for n in range(1, len(row) + 1))
    await rows.execute(f"INSERT INTO schedule ({', '.join(row)}) VALUES ({places})", *row.values())
    found: UUID = row["id"]
    return found


async def runs_of(rows: Connection, schedule_id: UUID) -> int:
    return int(await rows.fetchval("SELECT count(*) FROM run WHERE schedule_id = $1", schedule_id))


async def of_schedule(rows: Connection, schedule_id: UUID) -> dict[str, Any]:
    return dict(await rows.fetchrow("SELECT * FROM schedule WHERE id = $1", schedule_id) or {})


async def write_template(rows: Connection, declaration: object) -> None:
    await rows.execute(
        "INSERT INTO template (tenant_id, type, version, declaration) VALUES ('acme', 'odd', 1, $1)", declaration
    )


# --- schedules


@pytest.mark.parametrize(
    ("broken", "code"),
    [
        ({"timezone": "Mars/Olympus_Mons"}, "invalid_timezone"),
        ({"timezone": "localtime"}, "invalid_timezone"),
        ({"cron": "every now and then"}, "invalid_cron"),
        ({"payload_template": [1, 2]}, "unforeseen"),
        ({"template": "odd"}, "template_unreadable"),
        ({"template": "odd", "version": 7}, "template_not_found"),
        ({"template": "nothing"}, "template_not_found"),
    ],
)
async def test_a_schedule_that_cannot_be_fired_fails_alone_and_says_why(
    rows: Connection, worker: Worker, broken: dict[str, Any], code: str
) -> None:
    await write_template(rows, {"type": "odd", "steps": "none", "of": {"a": "later release"}})
    bad = await schedule(rows, next_run_at=datetime.now(UTC) - timedelta(seconds=50), **broken)
    good = await schedule(rows)
    await until(lambda: runs_of(rows, good))
    said = await until(lambda: rows.fetchval("SELECT last_error FROM schedule WHERE id = $1", bad))
    assert said["code"] == code
    assert await runs_of(rows, bad) == 0
    assert not worker._failure.done()


async def test_a_schedule_that_keeps_failing_is_tried_with_growing_pauses_and_paused_in_the_end(
    rows: Connection,
) -> None:
    bad = await schedule(rows, timezone="Mars/Olympus_Mons")
    for turn in range(1, 4):
        for _ in range(3):  # only one of the three tries it: it is not retried hot
            await schedules.fire_due(rows, TEMPLATES, KEEP, pause_after=3)
        assert await set_aside(rows, schedules.DUTY) == {str(bad): turn}
        pause = await rows.fetchval("SELECT retry_at - failed_at FROM quarantine")
        assert pause == timedelta(seconds=quarantine.BACKOFF[turn - 1])
        await rows.execute("UPDATE quarantine SET retry_at = clock_timestamp()")
    row = await of_schedule(rows, bad)
    assert (row["enabled"], row["next_run_at"]) == (False, None)
    assert row["paused_because"] == "it could not be fired 3 times in a row"
    await schedules.fire_due(rows, TEMPLATES, KEEP, pause_after=3)
    assert await set_aside(rows, schedules.DUTY) == {str(bad): 3}


async def test_a_schedule_whose_tenant_was_refused_for_a_while_is_not_paused_by_its_first_failure(
    rows: Connection, settings: Settings
) -> None:
    late = await schedule(rows)
    full = Admission(settings.model_copy(update={"submissions_per_tenant": 1}), SHIPPED)
    await full.charge(rows, Payer("acme"))  # the rate of this minute is used up
    for _ in range(3):
        await schedules.fire_due(rows, TEMPLATES, KEEP, pause_after=3, admission=full)
        await rows.execute("UPDATE quarantine SET retry_at = clock_timestamp()")
    assert (await of_schedule(rows, late))["last_error"]["code"] == "rate_limited"
    await rows.execute("UPDATE schedule SET timezone = 'Mars/Olympus_Mons'")
    for failures in range(1, 4):
        assert (await of_schedule(rows, late))["enabled"]
        await schedules.fire_due(rows, TEMPLATES, KEEP, pause_after=3, admission=full)
        await rows.execute("UPDATE quarantine SET retry_at = clock_timestamp()")
        assert (await of_schedule(rows, late))["failures"] == failures
    assert (await of_schedule(rows, late))["paused_because"] == "it could not be fired 3 times in a row"


async def test_a_schedule_whose_payload_is_refused_again_and_again_is_paused(rows: Connection) -> None:
    bad = await schedule(rows, payload_template={"number": "not one"})
    for _ in range(3):
        await schedules.fire_due(rows, TEMPLATES, KEEP, pause_after=3)
        await rows.execute("UPDATE schedule SET next_run_at = clock_timestamp() WHERE next_run_at IS NOT NULL")
    row = await of_schedule(rows, bad)
    assert (row["enabled"], row["last_error"]["code"], row["failures"]) == (False, "invalid_payload", 3)


async def test_a_schedule_that_was_mended_fires_again(rows: Connection) -> None:
    bad = await schedule(rows, timezone="Mars/Olympus_Mons")
    await schedules.fire_due(rows, TEMPLATES, KEEP)
    await rows.execute("UPDATE schedule SET timezone = 'Europe/Berlin'")
    await rows.execute("UPDATE quarantine SET retry_at = clock_timestamp()")
    assert len((await schedules.fire_due(rows, TEMPLATES, KEEP))[0]) == 1
    row = await of_schedule(rows, bad)
    assert (row["last_error"], row["failures"]) == (None, 0)


async def test_a_buffered_start_that_cannot_be_made_fails_alone(rows: Connection) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    bad = await schedule(rows, next_run_at=later, buffered_at=later, payload_template=[1])
    good = await schedule(rows, next_run_at=later, buffered_at=later)
    assert [await schedules.fire_due(rows, TEMPLATES, KEEP) for _ in range(2)][1] == ([], False)
    assert (await runs_of(rows, bad), await runs_of(rows, good)) == (0, 1)
    assert await set_aside(rows, schedules.DUTY) == {str(bad): 1}


async def test_nothing_of_a_firing_that_failed_midway_is_left(rows: Connection) -> None:
    bad = await schedule(rows, cron="* * * * *", catch_up="all", next_run_at=datetime.now(UTC) - timedelta(minutes=30))
    await poison(rows, "schedule", "{row}.next_run_at < NEW.next_run_at", on="UPDATE")  # its last statement
    assert await schedules.fire_due(rows, TEMPLATES, KEEP) == ([], False)
    assert await runs_of(rows, bad) == 0
    assert await set_aside(rows, schedules.DUTY) == {str(bad): 1}


async def test_one_unreadable_schedule_or_template_does_not_take_the_list_away(
    api: Running, make_key: Any, rows: Connection
) -> None:
    await write_template(rows, {"type": "odd", "steps": 7})
    good = {"type": "good", "steps": [{"id": "only"}]}
    await rows.execute(
        "INSERT INTO template (tenant_id, type, version, declaration) VALUES ('acme', 'good', 1, $1)", good
    )
    bad = await schedule(rows, timezone="Mars/Olympus_Mons", enabled=False)
    key = await make_key(scopes=SCOPES)
    async with client_of(api.url, key.text) as http:
        listed = (await http.get("/v1/schedules")).json()["schedules"]
        assert [(one["id"], one["next_runs"]) for one in listed] == [(str(bad), [])]
        assert (await http.get(f"/v1/schedules/{bad}")).status_code == 200
        types = [one["type"] for one in (await http.get("/v1/templates")).json()["templates"]]
        assert "good" in types
        assert "odd" not in types
        problem(await http.get("/v1/templates/odd/1"), 409, "template_unreadable")
        problem(await http.post("/v1/runs", json={"template": "odd"}), 409, "template_unreadable")


@pytest.mark.parametrize("name", ["localtime", "posixrules", "right/UTC", "../etc/passwd", "posix/Europe/Berlin", ""])
def test_zones_of_the_host_are_none_of_ours(name: str) -> None:
    with pytest.raises(Exception, match="IANA time zone"):
        cron.zone(name)


def test_zones_are_read_from_the_package_whatever_the_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's are not asked: by its name, a zone of a machine with old rules would fire at another time."""
    opened: list[str] = []
    monkeypatch.setattr("zoneinfo._common.load_tzdata", opened.append)
    cron._load.cache_clear()
    for name in cron.zone_names():
        assert cron.zone(name).key == name
    assert opened == []
    assert len(cron.zone_names()) > 500


BEYOND = {(422, code) for code in ("invalid_request", "range_too_long", "range_not_past")}


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("0001-01-01T00:00:00Z", "2026-01-01T00:00:00Z"),
        ("0001-01-01T00:00:00+14:00", "0001-01-02T00:00:00Z"),
        ("2026-01-01T00:00:00Z", "9999-12-31T23:59:59.999999-14:00"),
        ("1969-12-31T23:59:59Z", "1970-01-01T00:00:00Z"),
        ("2026-01-01T00:00:00", "2026-01-02T00:00:00"),
        ("+12026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"),
    ],
)
async def test_a_backfill_beyond_the_calendar_is_refused(
    api: Running, make_key: Any, rows: Connection, start: str, end: str
) -> None:
    made = await schedule(rows, timezone="Asia/Kolkata", cron="@yearly", enabled=False)
    key = await make_key(scopes=SCOPES)
    async with client_of(api.url, key.text) as http:
        answer = await http.post(f"/v1/schedules/{made}/backfill", json={"start": start, "end": end})
        assert (answer.status_code, answer.json()["code"]) in BEYOND
        for when in (start, end):
            if not when.startswith("2026") and not when.startswith("19"):
                later = await http.post("/v1/runs", json={"template": "demo-long-task", "scheduled_at": when})
                problem(later, 422, "invalid_request")


@pytest.mark.parametrize("instant", [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)])
@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "Etc/GMT+12"])
def test_times_at_the_calendars_ends_are_an_error_with_a_code(instant: datetime, zone: str) -> None:
    """Of a row: no request gets that far."""
    codes = []
    for after in (instant - timedelta(days=3) if instant.year > 1 else instant, instant):
        try:
            cron.between("@daily", zone, after, instant, 3)
            cron.next_after("@daily", zone, after)
        except Invalid as refused:
            codes.append(refused.code)
    assert set(codes) <= {"range_too_long"}


# --- what time does by itself


async def two_leased(verbs: Rows) -> tuple[Any, Any]:
    """The first of which cannot be changed any more."""
    bad, good = await verbs.leased(), await verbs.leased()
    await poison(verbs.connection, "job", f"{{row}}.id = '{bad.job_id}'")
    return bad, good


async def test_a_lost_lease_that_cannot_be_ended_keeps_back_no_other(verbs: Rows) -> None:
    bad, good = await verbs.leased(), await verbs.leased()
    condition = f"{{row}}.id = '{bad.lease.task_id}' AND NEW.status = 'pending'"
    await poison(verbs.connection, "task", condition, on="UPDATE")
    for claimed in (bad, good):
        await verbs.lapse(claimed.lease.task_id)
    for _ in range(3):
        await sweeps.expire_leases(verbs.connection, [], 5)
    assert await verbs.statuses(good.job_id) == {"only": "pending"}
    assert await verbs.statuses(bad.job_id) == {"only": "running"}
    assert await set_aside(verbs.connection, sweeps.LEASES) == {str(bad.job_id): 1}
    await heal(verbs.connection, "task")
    await verbs.connection.execute("UPDATE quarantine SET retry_at = clock_timestamp()")
    assert (await sweeps.expire_leases(verbs.connection, [], 5))[0] == 1


async def test_a_deadline_that_cannot_be_kept_keeps_back_no_other(verbs: Rows) -> None:
    bad, good = await two_leased(verbs)
    past = "deadline_at = clock_timestamp() - interval '1 second'"
    await verbs.connection.execute("ALTER TABLE job DISABLE TRIGGER poison")
    await verbs.connection.execute(f"UPDATE job SET {past}")
    await verbs.connection.execute("ALTER TABLE job ENABLE TRIGGER poison")
    ended = [one.pipeline for _ in range(3) for one in await sweeps.expire_jobs(verbs.connection)]
    assert len(ended) == 1
    assert (await verbs.job(good.job_id))["status"] == "expired"
    assert await set_aside(verbs.connection, sweeps.DEADLINES) == {str(bad.job_id): 1}


async def test_a_cancel_that_cannot_be_ended_keeps_back_no_other(verbs: Rows) -> None:
    bad, good = await verbs.leased(), await verbs.leased()
    asked = [bad.job_id, good.job_id]
    await jobs.request_cancel(verbs.connection, asked, "t", reason="", by="test")
    await verbs.connection.execute("UPDATE job SET cancel_by = clock_timestamp() - interval '1 second'")
    await poison(verbs.connection, "job", f"{{row}}.id = '{bad.job_id}'")
    ended = [one for _ in range(3) for one in await sweeps.end_cancels(verbs.connection, [], 5)]
    assert len(ended) == 1
    assert (await verbs.job(good.job_id))["status"] == "cancelled"
    assert await set_aside(verbs.connection, sweeps.CANCELS) == {str(bad.job_id): 1}


async def test_a_job_that_cannot_be_let_in_keeps_out_nobody_behind_it(verbs: Rows) -> None:
    async with verbs.connection.transaction():
        await verbs.submit(count=3, limits=[ConcurrencyLimit("t", "tenant", at_most=2)])
    (bad, *_) = [row["id"] for row in await verbs.connection.fetch("SELECT id FROM job ORDER BY id")]
    await poison(verbs.connection, "job", f"{{row}}.id = '{bad}'")
    hints = [hint for _ in range(3) for hint in await concurrency.admit(verbs.connection, [("t", "tenant")])]
    assert len(hints) == 2
    assert await set_aside(verbs.connection, concurrency.JOBS) == {str(bad): 1}


async def test_a_limit_that_cannot_be_asked_keeps_shut_no_other(verbs: Rows) -> None:
    async with verbs.connection.transaction():
        await verbs.submit(limits=[ConcurrencyLimit("t", "bad", at_most=1)])
        await verbs.submit(limits=[ConcurrencyLimit("t", "good", at_most=1)])
    await poison(verbs.connection, "gate_job", "{row}.key = 'bad'")
    names = await concurrency.with_waiting_jobs(verbs.connection, ("", ""))
    assert len(names) == 2
    assert len(await concurrency.admit_each(verbs.connection, names)) == 1
    names = await concurrency.with_waiting_jobs(verbs.connection, ("", ""))
    assert await concurrency.admit_each(verbs.connection, names) == []


async def test_a_run_that_webhooks_cannot_be_told_of_keeps_back_no_other(verbs: Rows) -> None:
    rows = verbs.connection
    await rows.execute(
        "INSERT INTO webhook (id, tenant_id, url, secrets, events) VALUES ($1, 'acme', 'https://x', '{}', $2)",
        uuid4(),
        ["run.cancelled"],
    )
    ids = []
    for _ in range(2):
        await schedule(rows)
        (made,), _ = await schedules.fire_due(rows, TEMPLATES, KEEP)
        ids.append(made.id)
    await jobs.request_cancel(rows, ids, "acme", reason="", by="test")
    assert await rows.fetchval("SELECT count(*) FROM job WHERE notify") == 2
    await poison(rows, "job", f"{{row}}.id = '{ids[0]}'")
    told = [hint for _ in range(3) for hint in (await webhooks.dispatch(rows, deliveries, KEEP))[0]]
    assert len(told) == 1
    assert await set_aside(rows, webhooks.DUTY) == {str(ids[0]): 1}


async def calling(verbs: Rows, kind: str, ended: bool) -> tuple[Claimed, Claimed]:
    """A workflow that has made a call of this kind and waits, and the run that the call names."""
    child = await verbs.leased(ONE)
    workflow = await verbs.leased(ONE)
    call = Call("", 1, kind, "one", child=child.job_id)
    await settlements.suspend(verbs.connection, [Suspending(workflow.lease, (call,), 0)])
    if ended:
        await settlements.complete(verbs.connection, [Completion(child.lease)])
    return workflow, child


async def test_a_workflow_that_cannot_be_woken_keeps_back_no_other(verbs: Rows) -> None:
    (good, _), (bad, _), (later, _) = [await calling(verbs, "result", ended=True) for _ in range(3)]
    await poison(verbs.connection, "task", f"{{row}}.id = '{bad.lease.task_id}'")
    woken = [hint for _ in range(2) for hint in await children.wake_waiting(verbs.connection)]
    assert [hint.hint.task_id for hint in woken] == [good.lease.task_id, later.lease.task_id]
    assert await set_aside(verbs.connection, children.DUTY) == {str(bad.job_id): 1}


async def test_a_run_of_a_workflow_that_cannot_be_cancelled_keeps_back_no_other(verbs: Rows) -> None:
    (workflow, bad), (another, good) = [await calling(verbs, "start", ended=False) for _ in range(2)]
    await jobs.request_cancel(verbs.connection, [workflow.job_id, another.job_id], "t", reason="", by="test")
    await poison(verbs.connection, "job", f"{{row}}.id = '{bad.job_id}'")
    for _ in range(2):
        await children.cancel_orphans(verbs.connection)
    assert (await verbs.job(good.job_id))["status"] == "cancel_requested"
    assert await set_aside(verbs.connection, children.ORPHANS) == {str(bad.job_id): 1}


# --- what is forgotten


@pytest.fixture
async def housekeeping(settings: Settings) -> AsyncIterator[Housekeeping]:
    store = ObjectStore.from_settings(settings)
    await store.open()
    async with make_pool(settings, "test", 3) as pool:
        yield Housekeeping(settings, pool.acquire, store, SHIPPED)
    await store.close()


async def finished(verbs: Rows, prefix: str) -> UUID:
    (hint,) = await verbs.submit(ONE, output_prefix=prefix)
    job_id: UUID = await verbs.connection.fetchval("SELECT job_id FROM task WHERE id = $1", hint.hint.task_id)
    await jobs.request_cancel(verbs.connection, [job_id], "t", reason="", by="test")
    await verbs.connection.execute("UPDATE job SET expires_at = clock_timestamp() - interval '1 second'")
    return job_id


async def test_a_job_that_cannot_be_forgotten_keeps_no_other(verbs: Rows, housekeeping: Housekeeping) -> None:
    """Neither one whose row stays, nor one whose objects the store will not tell of."""
    rows = verbs.connection
    unlistable = await finished(verbs, "x" * 2000)
    stays = await finished(verbs, "jobs/stays")
    goes = await finished(verbs, "jobs/goes")
    await poison(rows, "job", f"{{row}}.id = '{stays}'")
    for _ in range(3):
        await housekeeping.retention()
    left = {row["id"] for row in await rows.fetch("SELECT id FROM job")}
    assert goes not in left
    assert stays in left
    assert str(stays) in await set_aside(rows, sweeps.RETENTION)
    assert (unlistable in left) == (str(unlistable) in await set_aside(rows, sweeps.RETENTION))


async def test_an_upload_that_cannot_be_forgotten_keeps_no_other(rows: Connection, housekeeping: Housekeeping) -> None:
    keys = ["", "media/stays", "media/goes"]  # no store has an object without a name
    for key in keys:
        await rows.execute(
            "INSERT INTO media (id, tenant_id, content_type, original_key, file_name, expires_at)"
            " VALUES ($1, 't', 'image/jpeg', $2, '', clock_timestamp() - interval '1 second')",
            uuid4(),
            key,
        )
    await poison(rows, "media", "{row}.original_key = 'media/stays'")
    for _ in range(3):
        await housekeeping.turns_of_kinds()["abandoned_uploads"]()
    assert {row["original_key"] for row in await rows.fetch("SELECT original_key FROM media")} == {"", "media/stays"}
    assert sorted((await set_aside(rows, "abandoned_uploads")).values()) == [1, 1]


async def test_a_source_image_that_cannot_be_forgotten_keeps_no_other(
    rows: Connection, housekeeping: Housekeeping
) -> None:
    for key in ("", "sources/stays", "sources/goes"):
        await rows.execute(
            "INSERT INTO source_image (key, tenant_id, expires_at)"
            " VALUES ($1, 't', clock_timestamp() - interval '1 second')",
            key,
        )
    await poison(rows, "source_image", "{row}.key = 'sources/stays'")
    for _ in range(3):
        await housekeeping.turns_of_kinds()["expired_sources"]()
    assert await set_aside(rows, generations.SOURCES) == {"": 1, "sources/stays": 1}
    assert await rows.fetchval("SELECT count(*) FROM source_image") == 2


async def test_a_store_that_refuses_every_unit_is_asked_for_one_batch_a_minute(
    rows: Connection, housekeeping: Housekeeping
) -> None:
    """As one whose policy forbids deletes: all expired units would be set aside as fast as the store refuses them."""
    insert = (
        "INSERT INTO source_image (key, tenant_id, expires_at)"
        " VALUES ($1, 't', clock_timestamp() - interval '1 second')"
    )
    turn = housekeeping.turns_of_kinds()[generations.SOURCES]
    await rows.execute(insert, "")  # no store has an object without a name
    assert await turn() is None  # the usual pause
    assert await set_aside(rows, generations.SOURCES) == {"": 1}
    await rows.execute("DELETE FROM quarantine")
    await rows.execute(insert, "sources/goes")
    assert await turn() == NEXT_BATCH_SECONDS


async def test_while_the_store_is_away_no_unit_is_set_aside_and_no_row_is_forgotten(
    rows: Connection, settings: Settings
) -> None:
    away = settings.model_copy(update={"s3_endpoint": "http://127.0.0.1:1", "s3_operation_timeout": 1.0})
    store = ObjectStore.from_settings(away)
    await store.open()
    await rows.execute(
        "INSERT INTO source_image (key, tenant_id, expires_at) VALUES ('sources/x', 't', clock_timestamp())"
    )
    async with make_pool(settings, "test", 3) as pool:
        turn = Housekeeping(settings, pool.acquire, store, SHIPPED).turns_of_kinds()[generations.SOURCES]
        with pytest.raises(StoreUnavailable):
            await turn()
    await store.close()
    assert await set_aside(rows, generations.SOURCES) == {}
    assert await rows.fetchval("SELECT count(*) FROM source_image") == 1


_EXPIRED_SOURCE = (
    "INSERT INTO source_image (key, tenant_id, expires_at) VALUES ($1, 't', clock_timestamp() - interval '1 second')"
)


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Housekeeping deletes the objects of one unit after the other, so that a test knows their order."""
    monkeypatch.setattr(housekeepers, "_UNITS_AT_ONCE", 1)


@pytest.mark.usefixtures("one_at_a_time")
async def test_while_the_database_is_away_for_a_moment_no_unit_is_set_aside_and_what_is_deleted_is_forgotten(
    rows: Connection, settings: Settings, housekeeping: Housekeeping
) -> None:
    """As during a failover: the units were set aside, each as if it failed by itself."""
    lent = 0

    @asynccontextmanager
    async def connections() -> AsyncIterator[Connection]:
        nonlocal lent
        async with pool.acquire() as connection:
            lent += 1
            if lent == 3:  # that of the second unit
                await rows.execute("SELECT pg_terminate_backend($1, 60000)", connection.get_server_pid())
            yield connection

    for key in ("sources/a", "sources/b", "sources/c"):
        await rows.execute(_EXPIRED_SOURCE, key)
    async with make_pool(settings, "test", 3) as pool:
        turn = Housekeeping(settings, connections, housekeeping._store, SHIPPED).turns_of_kinds()[generations.SOURCES]
        with pytest.raises(TRY_AGAIN):
            await turn()
        assert await set_aside(rows, generations.SOURCES) == {}
        left = [row["key"] for row in await rows.fetch("SELECT key FROM source_image ORDER BY key")]
        assert left == ["sources/b", "sources/c"]
        await turn()
    assert await rows.fetchval("SELECT count(*) FROM source_image") == 0


@pytest.mark.parametrize("failure", [FileNotFoundError("the kind's own"), TimeoutError()])
async def test_a_unit_whose_own_code_fails_as_a_connection_might_keeps_no_other(
    rows: Connection, housekeeping: Housekeeping, failure: OSError
) -> None:
    """The database answers, so it is no outage: a turn that ended here would never come to the units after it."""
    gone: list[str] = []

    async def delete(unit: str) -> None:
        if unit == "bad":
            raise failure
        gone.append(unit)

    async def forget(_connection: Connection, _units: object) -> None:
        """There are no rows."""

    assert await housekeeping._forget("own", ["bad", "good"], str, delete, forget) == NEXT_BATCH_SECONDS
    assert gone == ["good"]
    assert await set_aside(rows, "own") == {"bad": 1}


@pytest.mark.usefixtures("one_at_a_time")
async def test_a_unit_whose_connection_was_lost_is_not_at_fault_although_the_database_answers_again(
    rows: Connection, housekeeping: Housekeeping
) -> None:
    tried: list[str] = []

    async def delete(unit: str) -> None:
        tried.append(unit)
        raise ConnectionResetError

    async def forget(_connection: Connection, _units: object) -> None:
        """There are no rows."""

    with pytest.raises(ConnectionResetError):
        await housekeeping._forget("own", ["a", "b"], str, delete, forget)
    assert tried == ["a"]
    assert await set_aside(rows, "own") == {}


@pytest.mark.usefixtures("one_at_a_time")
async def test_a_unit_that_waited_for_a_silent_database_is_not_at_fault(
    rows: Connection, settings: Settings, housekeeping: Housekeeping
) -> None:
    """A host that is gone answers nothing, so the unit's connection timed out; and the next one is refused."""
    tries: list[str] = []

    @asynccontextmanager
    async def connections() -> AsyncIterator[Connection]:
        tries.append("connection")
        if tries == ["a", "connection"]:
            raise ConnectionRefusedError
        async with pool.acquire() as connection:
            yield connection

    async def delete(unit: str) -> None:
        tries.append(unit)
        raise TimeoutError

    async def forget(_connection: Connection, _units: object) -> None:
        """There are no rows."""

    async with make_pool(settings, "test", 1) as pool:
        house = Housekeeping(settings, connections, housekeeping._store, SHIPPED)
        with pytest.raises(TimeoutError):
            await house._forget("own", ["a", "b"], str, delete, forget)
    assert tries == ["a", "connection"]
    assert await set_aside(rows, "own") == {}


# --- what is told


async def test_a_hint_that_cannot_be_sent_keeps_back_no_other_and_is_dropped_in_the_end(
    verbs: Rows, settings: Settings
) -> None:
    rows = verbs.connection
    (bad,), (good,) = [await verbs.submit() for _ in range(2)]
    await rows.execute("UPDATE outbox SET headers = '\"no mapping\"'")  # which by itself does no harm
    broker = make_broker(settings.model_copy(update={"broker": "postgres"}))
    async with make_pool(settings, "test", 3) as pool:

        async def on_connection(work: Any) -> None:
            async with pool.acquire() as connection:
                await work(connection)

        class Strict(Announcer):
            """As a broker does that has no form for a hint."""

            async def publish(self, batch: Any) -> int:
                if bad.outbox_id in {announcement.outbox_id for announcement in batch}:
                    raise ValueError("no such frame")
                return await super().publish(batch)

        await broker.open()
        await until(lambda: asyncio.sleep(0, result=broker.connected))
        relay = Relay(pool, broker, Strict(broker, on_connection))
        for turn in range(1, quarantine.STUCK_AFTER + 1):
            await rows.execute("UPDATE outbox SET relay_at = clock_timestamp()")
            relay._window.forget()
            await relay.turn()
            assert good.outbox_id not in {row["id"] for row in await rows.fetch("SELECT id FROM outbox")}
            assert await set_aside(rows, "relay") == {str(bad.outbox_id): turn}
            if turn < quarantine.STUCK_AFTER:
                assert await rows.fetchval(
                    "SELECT o.relay_at = q.retry_at FROM outbox o JOIN quarantine q ON q.unit = o.id::text"
                )
        assert await rows.fetchval("SELECT count(*) FROM outbox") == 0
        await broker.close()


async def test_a_word_of_progress_that_cannot_be_stored_costs_no_other(verbs: Rows, settings: Settings) -> None:
    bad, good, odd = await verbs.leased(), await verbs.leased(), await verbs.leased()
    await poison(verbs.connection, "progress", "{row}.summary = 'bad'", on="INSERT")
    async with make_pool(settings, "test", 3) as pool:
        reporter = Reporter(pool)
        reporter.report(bad.lease, 50.0, "bad")
        reporter.report(good.lease, 50.0, "half")
        reporter.report(odd.lease, 50.0, "half a character: \ud83d")
        await reporter.turn()
    rows = await verbs.connection.fetch("SELECT task_id, summary FROM progress")
    assert {row["task_id"]: row["summary"] for row in rows} == {
        good.lease.task_id: "half",
        odd.lease.task_id: "half a character: ?",
    }


async def test_a_question_that_the_database_refuses_takes_no_other_metric_away(rows: Connection) -> None:
    await rows.execute("ALTER TABLE generation RENAME TO generation_of_tomorrow")
    asked = questions_of([GENERATION])
    names = {family.name for family in families(await query_all(rows, 30.0, asked), asked)}
    assert "leasehold_jobs_unfinished" in names
    assert "leasehold_database_bytes" in names
    assert "leasehold_generation_tasks" not in names


# --- the worker


async def test_a_value_that_no_statement_takes_fails_its_own_attempt_and_settles_the_others(
    rows: Connection, quick: Settings
) -> None:
    """asyncpg reports it as it does a lost connection; repeated for ever, it kept every settlement waiting."""
    odd = Pipeline("odd", module="tests.security.test_duties", steps=[Step("only", max_attempts=1)])

    @odd.handles("only")
    async def only(attempt: Any) -> dict[str, Any]:
        return {"text": "half a character: \ud83d" if attempt.tenant_id == "bad" else "whole"}

    await jobs.submit(rows, [jobs.NewJob(odd, tenant) for tenant in ("bad", "good", "bad", "good")])
    async with Worker(quick, Pipelines(odd)):
        ended = "SELECT count(*) FROM job WHERE finished_at IS NOT NULL"
        await until(lambda: rows.fetchval(f"SELECT ({ended}) = 4"))
    found = await rows.fetch("SELECT tenant_id, status, error ->> 'code' AS code FROM job ORDER BY tenant_id")
    assert [tuple(row) for row in found] == [
        ("bad", "failed", "bad_output"), ("bad", "failed", "bad_output"),
        ("good", "succeeded", None), ("good", "succeeded", None),
    ]  # fmt: skip


async def test_errors_that_nobody_foresaw_in_many_duties_end_neither_the_worker_nor_the_others(
    rows: Connection, worker: Worker
) -> None:
    verbs = Rows(rows)
    for table in ("rate_bucket", "idempotency", "download", "source_image", "webhook", "progress", "gate"):
        await rows.execute(f"ALTER TABLE {table} RENAME TO {table}_of_tomorrow")
    claimed = await verbs.leased(ELSEWHERE)
    worker.parts.reporter.report(claimed.lease, 1.0, "said into a table that is not there")
    worker.parts.admitter.may_have_ended(claimed.job_id)
    await verbs.lapse(claimed.lease.task_id)
    await until(partial(rows.fetchval, FREED, claimed.lease.task_id))
    for table in ("gate", "webhook", "source_image"):  # what a submission needs; the last counts in the stored bytes
        await rows.execute(f"ALTER TABLE {table}_of_tomorrow RENAME TO {table}")
    good = await schedule(rows)
    await until(lambda: runs_of(rows, good))
    await until(lambda: rows.fetchval("SELECT bool_and(finished_at IS NOT NULL) FROM job WHERE pipeline = 'scripted'"))
    assert not worker._failure.done()
    ended = {loop.get_name() for loop in worker._loops if loop.done()}
    assert ended <= {"self-check", "isolated queues"}  # these are done once


@pytest.mark.parametrize("table", ["worker", "paused_queue"])
async def test_a_heartbeat_or_a_look_that_fails_as_nobody_foresaw_goes_on(
    rows: Connection, quick: Settings, table: str
) -> None:
    """Before, the first ended the worker, and after the second it never looked again."""
    settings = quick.model_copy(
        update={"broker": "postgres", "renew_seconds": 0.2, "pipelines": "tests.runs.work:pipelines"}
    )
    async with Worker(settings, pipelines()) as worker:
        duty = {"worker": "heartbeat", "paused_queue": "look"}[table]
        before = ERRORS.labels(duty)._value.get()
        await rows.execute(f"ALTER TABLE {table} RENAME TO {table}_of_tomorrow")
        await until(lambda: asyncio.sleep(0, result=ERRORS.labels(duty)._value.get() > before))
        await rows.execute(f"ALTER TABLE {table}_of_tomorrow RENAME TO {table}")
        good = await schedule(rows)
        await until(lambda: runs_of(rows, good))
        await until(lambda: rows.fetchval("SELECT bool_and(status = 'succeeded') FROM job"))
        assert not worker._failure.done()


async def test_beside_a_store_that_hangs_leases_are_taken_over_and_schedules_fire(
    rows: Connection, quick: Settings
) -> None:
    """The leader asks the store to delete something all the while, and holds no connection to the database for it."""
    silent: set[asyncio.StreamWriter] = set()

    async def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent.add(writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await rows.execute(
        "INSERT INTO media (id, tenant_id, content_type, original_key, file_name, expires_at)"
        " VALUES ($1, 't', 'image/jpeg', 'media/x', '', clock_timestamp() - interval '1 second')",
        uuid4(),
    )
    changes = {"s3_endpoint": f"http://127.0.0.1:{port}", "s3_conditional_puts": "yes"}
    async with Worker(quick.model_copy(update=changes), pipelines()) as worker:
        await until(lambda: asyncio.sleep(0, result=bool(silent)))
        verbs = Rows(rows)
        for _ in range(5):
            claimed = await verbs.leased(ELSEWHERE)
            await verbs.lapse(claimed.lease.task_id)
            await until(partial(rows.fetchval, FREED, claimed.lease.task_id))
        good = await schedule(rows)
        await until(lambda: runs_of(rows, good))
        held = (  # a transaction between two statements is idle, too, but not for so long
            "SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction' AND datname = current_database()"
            " AND state_change < clock_timestamp() - interval '1 second'"
        )
        for _ in range(10):  # a transaction in which a process stands still ends before the store's minute does
            await until(lambda: rows.fetchval(f"SELECT ({held}) = 0"), 30)
            await asyncio.sleep(0.2)
        assert not worker._failure.done()
        for writer in silent:
            writer.transport.abort()
        server.close()
        for writer in silent:
            writer.transport.abort()


async def test_what_was_set_aside_and_has_succeeded_since_is_forgotten(rows: Connection) -> None:
    await quarantine.set_aside(rows, "leases", "a", RuntimeError())
    await quarantine.set_aside(rows, "leases", "b", RuntimeError())
    await rows.execute("UPDATE quarantine SET retry_at = clock_timestamp() - interval '1 hour' WHERE unit = 'a'")
    assert [row["unit"] for row in await quarantine.list_units(rows)] == ["b"]
    await quarantine.forget(rows)
    assert await set_aside(rows, "leases") == {"b": 1}


async def test_a_statement_that_takes_too_long_for_one_unit_is_that_units_fault(
    verbs: Rows, settings: Settings
) -> None:
    """The database is there, so the others are done and that one is set aside."""
    bad, good = await verbs.leased(), await verbs.leased()
    rows = verbs.connection
    await rows.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(30); RETURN NEW; END $$"
    )
    await rows.execute(
        "CREATE TRIGGER slow BEFORE UPDATE ON task FOR EACH ROW"
        f" WHEN (OLD.id = '{bad.lease.task_id}' AND NEW.status = 'pending') EXECUTE FUNCTION slow()"
    )
    await rows.execute("UPDATE task SET lease_until = clock_timestamp() - interval '1 second'")
    hasty = await connect(settings.model_copy(update={"database_timeout": 3.0}), "test")
    try:
        await sweeps.expire_leases(hasty, [], 5)
    finally:
        await hasty.close()
    assert await verbs.statuses(good.job_id) == {"only": "pending"}
    assert await set_aside(rows, sweeps.LEASES) == {str(bad.job_id): 1}


async def test_a_database_that_is_away_is_nobodys_fault(verbs: Rows, settings: Settings) -> None:
    claimed = await verbs.leased()
    await verbs.lapse(claimed.lease.task_id)
    doomed = await connect(settings, "test")
    pid = doomed.get_server_pid()
    await verbs.connection.execute("SELECT pg_terminate_backend($1)", pid)
    with pytest.raises(TRY_AGAIN):
        await sweeps.expire_leases(doomed, [], 5)
    assert await set_aside(verbs.connection, sweeps.LEASES) == {}
