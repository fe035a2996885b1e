"""`@app.cron`: schedules in code are written when a worker starts, and paused when the code drops them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
import time_machine

from leasehold import App, DeclarationError, current
from leasehold.db.database import Connection, connect
from leasehold.domain.errors import TooMany
from leasehold.domain.ids import new_id
from leasehold.domain.registry import DeclaredSchedule
from leasehold.evaluation.templates import Templates
from leasehold.schedules.declared import (
    UNDECLARED,
    apps_to_take_over,
    apps_with_writer,
    reconcile,
    reconcile_apps,
)
from leasehold.schedules.firing import ON_TIME, fire_due
from leasehold.settings import Settings
from leasehold.transitions import workers
from leasehold.transitions.quarantine import set_aside
from leasehold.worker.maintenance import duties
from tests.app.conftest import Serve

SECONDS = 60.0


def shop(*, nightly: str | None = "0 3 * * *", hourly: bool = True) -> App:
    """A release of the same app."""
    app = App("shop")
    if nightly is not None:

        @app.cron(nightly, zone="Europe/Berlin", queue="night", catch_up="one", catch_up_within=timedelta(hours=2))
        def report(days: int = 7) -> str:
            return f"{days} {current().task}"

    if hourly:

        @app.cron("@hourly")
        async def tidy() -> None: ...

    return app


async def rows(connection: Connection) -> dict[str, dict[str, Any]]:
    found = await connection.fetch("SELECT * FROM schedule ORDER BY template")
    return {row["template"]: dict(row) for row in found}


async def written(connection: Connection, app: App) -> list[str]:
    paused = await reconcile(connection, "default", "shop", app.pipelines().schedules["shop"])
    assert paused is not None
    return paused


async def test_a_worker_writes_the_schedules_and_runs_what_is_due(connection: Connection, serve: Serve) -> None:
    async with serve(shop()), asyncio.timeout(SECONDS):
        while len(found := await rows(connection)) < 2:
            await asyncio.sleep(0.02)
        report = found["shop.report"]
        assert (report["cron"], report["timezone"], report["declared_by"]) == ("0 3 * * *", "Europe/Berlin", "shop")
        assert (report["catch_up"], report["catch_up_seconds"], report["tenant_id"]) == ("one", 7200, "default")
        assert report["payload_template"] == {"days": 7}
        await connection.execute("UPDATE schedule SET next_run_at = clock_timestamp() WHERE template = 'shop.report'")
        of_report = "(SELECT t.id FROM task t JOIN job j ON j.id = t.job_id WHERE j.pipeline = 'shop.report')"
        while (value := await connection.fetchval(f"SELECT value FROM result WHERE task_id IN {of_report}")) is None:
            await asyncio.sleep(0.02)
        assert value == {"value": "7 shop.report"}


async def test_runs_of_a_schedule_in_code_have_the_priority_of_any_other_run(connection: Connection) -> None:
    await written(connection, shop())
    assert {row["priority"] for row in (await rows(connection)).values()} == {1}


@pytest.mark.parametrize("hours", [-2, 2])
async def test_the_first_tick_is_the_next_by_the_clock_of_the_database(connection: Connection, hours: int) -> None:
    with time_machine.travel(datetime.now(UTC) + timedelta(hours=hours), tick=True):  # a worker whose clock is wrong
        await written(connection, shop())
    wait = (await rows(connection))["shop.tidy"]["next_run_at"] - await connection.fetchval("SELECT clock_timestamp()")
    assert timedelta(0) < wait <= timedelta(hours=1)


async def test_schedules_that_the_code_drops_are_paused_and_come_back_with_the_code(connection: Connection) -> None:
    await written(connection, shop())
    before = await rows(connection)
    assert await written(connection, shop(nightly=None)) == ["shop.report"]
    paused = (await rows(connection))["shop.report"]
    assert (paused["enabled"], paused["next_run_at"], paused["paused_because"]) == (False, None, UNDECLARED)
    assert (await rows(connection))["shop.tidy"] == before["shop.tidy"]
    assert await written(connection, shop()) == []
    back = (await rows(connection))["shop.report"]
    assert (back["id"], back["enabled"], back["paused_because"]) == (paused["id"], True, None)
    assert back["next_run_at"] == before["shop.report"]["next_run_at"]


async def test_what_the_code_drops_is_paused_for_its_app_and_its_tenant_alone(connection: Connection) -> None:
    """Other schedules of the same templates stay: of another tenant, of another app, and of a client."""
    declared = shop().pipelines().schedules["shop"]
    for tenant, app in (("default", "shop"), ("other", "shop"), ("default", "kiosk"), ("default", "client")):
        await reconcile(connection, tenant, app, declared)
    await connection.execute("UPDATE schedule SET declared_by = NULL WHERE declared_by = 'client'")
    others = "SELECT * FROM schedule WHERE (tenant_id, declared_by) IS DISTINCT FROM ('default', 'shop') ORDER BY id"
    before = await connection.fetch(others)
    assert len(before) == 6
    assert await written(connection, shop(nightly=None)) == ["shop.report"]
    assert await reconcile(connection, "default", "shop", []) == ["shop.tidy"]
    assert await connection.fetch(others) == before


async def test_a_changed_clock_has_a_new_next_tick_and_an_unchanged_one_keeps_a_due_tick(
    connection: Connection,
) -> None:
    await written(connection, shop())
    await connection.execute("UPDATE schedule SET next_run_at = '2026-01-01 00:00:00Z'")
    await written(connection, shop())
    assert {row["next_run_at"].year for row in (await rows(connection)).values()} == {2026}
    await connection.execute("UPDATE schedule SET next_run_at = '2020-01-01 00:00:00Z'")
    await written(connection, shop(nightly="30 4 * * *"))
    found = await rows(connection)
    assert found["shop.report"]["cron"] == "30 4 * * *"
    assert found["shop.report"]["next_run_at"].minute == 30
    assert found["shop.tidy"]["next_run_at"].year == 2020


@pytest.mark.parametrize(("overlap", "is_kept"), [("buffer_one", True), ("skip", False), ("allow_all", False)])
async def test_a_tick_that_waits_for_the_run_before_it_is_dropped_where_the_code_drops_its_policy(
    connection: Connection, overlap: Any, is_kept: bool
) -> None:
    def release(overlap: Any) -> App:
        app = App("shop")
        app.cron("@yearly", overlap=overlap)(without_parameters)
        return app

    await written(connection, release("buffer_one"))
    for _ in range(2):  # the second tick waits for the run of the first
        await connection.execute("UPDATE schedule SET next_run_at = clock_timestamp()")
        await fire_due(connection, Templates(release("buffer_one").pipelines()), 60)
    await written(connection, release(overlap))
    await connection.execute("UPDATE job SET status = 'succeeded', finished_at = clock_timestamp()")
    assert len((await fire_due(connection, Templates(release(overlap).pipelines()), 60))[0]) == is_kept


async def test_what_a_person_paused_stays_paused(connection: Connection) -> None:
    await written(connection, shop())
    await connection.execute("UPDATE schedule SET enabled = false, next_run_at = NULL, paused_because = 'a person'")
    for release in (shop(), shop(nightly="30 4 * * *"), shop(nightly=None), shop()):
        await written(connection, release)
        assert {(row["enabled"], row["next_run_at"]) for row in (await rows(connection)).values()} == {(False, None)}


async def test_workers_that_start_at_once_write_each_schedule_once(connection: Connection, settings: Settings) -> None:
    connections = [await connect(settings, "test") for _ in range(6)]
    await asyncio.gather(*(written(one, shop()) for one in connections))
    for one in connections:
        await one.close()
    assert sorted(await rows(connection)) == ["shop.report", "shop.tidy"]


async def write_as(connection: Connection, writer: UUID, app: App) -> None:
    assert await reconcile_apps(connection, "default", app.pipelines().schedules, writer) == ["shop"]


async def register(connection: Connection, worker: UUID) -> None:
    await workers.register(connection, worker, host="h", pid=1, version="v", queues=[])


async def take_over(connection: Connection, writer: UUID, app: App) -> bool:
    """As a worker does when it looks. Returns whether it has written the schedules of its app."""
    declared = app.pipelines().schedules
    apps = await apps_to_take_over(connection, "default", list(declared), writer)
    taken = {name: declared[name] for name in apps}
    return await reconcile_apps(connection, "default", taken, writer, only_without_writer=True) != []


@pytest.mark.parametrize("ends", ["it resigns", "it drains", "its time passes"])
async def test_the_release_of_a_worker_that_started_late_and_ended_is_replaced_by_one_that_still_runs(
    connection: Connection, ends: str
) -> None:
    first, second, late = new_id(), new_id(), new_id()
    for worker in (first, second):
        await write_as(connection, worker, shop(nightly=None))
    written_by_the_new = await rows(connection)
    await register(connection, late)
    await write_as(connection, late, shop(hourly=False))
    for worker in (first, second, late):
        assert not await take_over(connection, worker, shop(nightly=None))  # the last to start still runs
    if ends == "it resigns":
        await workers.resign(connection, late)
    elif ends == "it drains":
        await workers.ask_to_drain(connection, late)
    else:
        await connection.execute("UPDATE leadership SET until = clock_timestamp() - interval '1 second'")
    assert await take_over(connection, first, shop(nightly=None))
    for worker in (first, second):
        assert not await take_over(connection, worker, shop(nightly=None))
    found = await rows(connection)
    assert {template: row["enabled"] for template, row in found.items()} == {"shop.report": False, "shop.tidy": True}
    assert found["shop.tidy"]["next_run_at"] == written_by_the_new["shop.tidy"]["next_run_at"]
    # One that starts and ends between two looks of the worker that wrote the schedules.
    await write_as(connection, late, shop(hourly=False))
    await workers.resign(connection, late)
    assert await take_over(connection, first, shop(nightly=None))


async def test_a_worker_that_writes_the_schedules_stays_their_writer_while_it_looks(connection: Connection) -> None:
    first, second = new_id(), new_id()
    await write_as(connection, second, shop())
    await write_as(connection, first, shop())
    leads_until = "SELECT until - clock_timestamp() FROM leadership"
    assert timedelta(minutes=9) < await connection.fetchval(leads_until) <= timedelta(minutes=10)
    await connection.execute("UPDATE leadership SET until = clock_timestamp() - interval '1 second'")
    assert await apps_to_take_over(connection, "default", ["shop"], first) == []
    assert timedelta(minutes=9) < await connection.fetchval(leads_until) <= timedelta(minutes=10)
    assert await apps_to_take_over(connection, "default", ["shop"], second) == []
    assert await connection.fetchval("SELECT owner FROM leadership") == first
    assert await apps_to_take_over(connection, "other", ["shop"], second) == ["shop"]
    assert await apps_to_take_over(connection, "default", ["kiosk", "shop"], second) == ["kiosk"]


async def test_the_apps_with_a_writer_are_those_of_the_tenant_whose_writer_goes_on(connection: Connection) -> None:
    declared = shop().pipelines().schedules["shop"]
    writes, drains, away, writes_for_another, writes_nothing = [new_id() for _ in range(5)]
    for worker in (writes, drains, writes_nothing):
        await register(connection, worker)
    for tenant, app, writer in (
        ("default", "shop", writes), ("default", "kiosk", drains), ("default", "stall", away),
        ("default", "own shop", new_id()), ("default2", "shop", writes_for_another), ("other", "stand", writes),
    ):  # fmt: skip
        assert await reconcile_apps(connection, tenant, {app: declared}, writer) == [app]
    for worker in (drains, writes_nothing):
        await workers.ask_to_drain(connection, worker)
    await connection.execute(
        "UPDATE leadership SET until = clock_timestamp() - interval '1 second' WHERE owner = $1", away
    )
    leads_until = "SELECT until FROM leadership WHERE role = 'schedules of default ' || $1"
    assert await apps_with_writer(connection, "default") == {
        app: await connection.fetchval(leads_until, app) for app in ("own shop", "shop")
    }


async def test_a_writer_that_has_lost_its_session_for_a_moment_stays_the_writer(connection: Connection) -> None:
    """A worker cuts the connection of its heartbeat at any error."""
    older, newer = new_id(), new_id()
    await write_as(connection, older, shop(nightly=None))
    await register(connection, newer)
    await connection.execute(f"UPDATE worker SET present = true, incarnation = {workers.INCARNATION}")
    await write_as(connection, newer, shop(hourly=False))
    assert await workers.dead(connection) == [newer]
    assert not await take_over(connection, older, shop(nightly=None))
    assert await connection.fetchval("SELECT owner FROM leadership") == newer


async def test_schedules_whose_taking_over_fails_are_taken_over_at_the_next_look(connection: Connection) -> None:
    """Also if the answer of a statement was lost: until the schedules are written, they have no writer."""
    worker = new_id()
    for _ in range(2):
        assert await apps_to_take_over(connection, "default", ["shop"], worker) == ["shop"]
    assert await take_over(connection, worker, shop())
    assert await apps_to_take_over(connection, "default", ["shop"], worker) == []


async def test_a_worker_that_starts_while_another_takes_over_stays_the_writer(connection: Connection) -> None:
    older, newer = new_id(), new_id()
    assert await apps_to_take_over(connection, "default", ["shop"], older) == ["shop"]
    await write_as(connection, newer, shop(hourly=False))
    taken = shop(nightly=None).pipelines().schedules
    await reconcile_apps(connection, "default", taken, older, only_without_writer=True)
    assert await connection.fetchval("SELECT owner FROM leadership") == newer
    assert {name for name, row in (await rows(connection)).items() if row["enabled"]} == {"shop.report"}


async def test_a_running_worker_writes_its_schedules_again_after_an_older_release_has_run_beside_it(
    connection: Connection, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duties, "_DECLARED_SECONDS", 0.1)

    async def until_enabled(*templates: str) -> None:
        async with asyncio.timeout(SECONDS):
            while {name for name, row in (await rows(connection)).items() if row["enabled"]} != {*templates}:
                await asyncio.sleep(0.02)

    async with serve(shop(nightly=None)):
        await until_enabled("shop.tidy")
        async with serve(shop(hourly=False)):
            await until_enabled("shop.report")
        await until_enabled("shop.tidy")


async def test_a_worker_without_the_code_leaves_the_schedule_to_one_that_has_it(connection: Connection) -> None:
    await written(connection, shop())
    await connection.execute("UPDATE schedule SET next_run_at = clock_timestamp()")
    assert await fire_due(connection, Templates(App("other").pipelines()), 60) == ([], False)
    assert {(row["failures"], row["last_error"]) for row in (await rows(connection)).values()} == {(0, None)}
    assert len((await fire_due(connection, Templates(shop().pipelines()), 60))[0]) == 2


async def test_a_worker_without_the_code_also_leaves_a_tick_that_waits_to_one_that_has_it(
    connection: Connection,
) -> None:
    app = App("shop")
    app.cron("@yearly", overlap="buffer_one")(without_parameters)
    await written(connection, app)
    for _ in range(2):  # the second tick waits for the run of the first
        await connection.execute("UPDATE schedule SET next_run_at = clock_timestamp()")
        await fire_due(connection, Templates(app.pipelines()), 60)
    await connection.execute("UPDATE job SET status = 'succeeded', finished_at = clock_timestamp()")
    before = await rows(connection)
    assert await fire_due(connection, Templates(App("other").pipelines()), 60) == ([], False)
    assert await rows(connection) == before
    assert len((await fire_due(connection, Templates(app.pipelines()), 60))[0]) == 1


OTHER = Templates(App("other").pipelines())
HANDLERS = [f"{pipeline.name}.{step.name}" for pipeline in shop().pipelines() for step in pipeline.steps]


async def schedules_of_a_client(connection: Connection, *, late: int = 0) -> None:
    """For the templates of the app `shop`: each has a tick that is due for `late` seconds."""
    await written(connection, shop())
    await connection.execute(
        "UPDATE schedule SET next_run_at = clock_timestamp() - make_interval(secs => $1), declared_by = NULL", late
    )


async def a_worker_with(connection: Connection, handlers: Sequence[str] | None) -> UUID:
    """As a worker without presence registers itself."""
    worker = new_id()
    await workers.register(connection, worker, host="h", pid=1, version="1", queues=[], handlers=handlers)
    return worker


async def a_template(connection: Connection, tenant_id: str, template: str) -> None:
    await connection.execute(
        "INSERT INTO template (tenant_id, type, version, enabled, declaration) VALUES ($1, $2, 1, true, $3)",
        tenant_id, template, {"type": "letter", "steps": [{"id": "a"}]},
    )  # fmt: skip


async def codes(connection: Connection) -> set[str | None]:
    return {(row["last_error"] or {}).get("code") for row in (await rows(connection)).values()}


@pytest.mark.parametrize("has", ["it", "presence", "unnamed", "had it", "other", "nothing"])
async def test_a_worker_without_the_code_also_leaves_a_clients_schedule_to_a_worker_that_has_it(
    connection: Connection, has: str
) -> None:
    """Or that may have it, or had it before it ended. If nobody has or had the code, the schedule says so. That its
    tenant wrote a template of another name changes nothing.
    """
    await schedules_of_a_client(connection)
    await a_template(connection, "default", "letter")
    handlers = {"unnamed": None, "other": ["shop.other", "shopping.report.run"]}.get(has, HANDLERS)
    worker = await a_worker_with(connection, handlers)
    if has == "presence":
        await connection.execute("UPDATE worker SET present = true")
    if has in ("had it", "nothing"):
        await workers.unregister(connection, worker)
    if has == "nothing":
        await connection.execute("DELETE FROM known_handler")
    before = await rows(connection)
    assert await fire_due(connection, OTHER, 60) == ([], False)
    is_left = has not in ("other", "nothing")
    assert (await rows(connection) == before) is is_left
    assert await codes(connection) == ({None} if is_left else {"template_not_found"})
    assert len((await fire_due(connection, Templates(shop().pipelines()), 60))[0]) == (2 if is_left else 0)


@pytest.mark.parametrize("leaves", ["drains", "drains, with code that its row does not name", "has ended"])
async def test_while_the_workers_with_the_code_are_away_a_tick_waits_and_its_schedule_says_so(
    connection: Connection, leaves: str
) -> None:
    await schedules_of_a_client(connection, late=int(ON_TIME.total_seconds()) - 20)
    worker = await a_worker_with(connection, None if "does not name" in leaves else HANDLERS)
    if leaves != "has ended":
        assert await workers.ask_to_drain(connection, worker)
    else:
        await workers.unregister(connection, worker)
    before = await rows(connection)
    assert await fire_due(connection, OTHER, 60) == ([], False)
    assert await rows(connection) == before
    await connection.execute("UPDATE schedule SET next_run_at = next_run_at - interval '30 seconds', catch_up = 'all'")
    before = await rows(connection)
    assert await fire_due(connection, OTHER, 60) == ([], False)
    found = await rows(connection)
    for template, row in found.items():
        assert (row["last_error"]["code"], row["failures"]) == ("template_not_found", 0)
        assert (
            datetime.fromisoformat(row["last_error"]["tick"]) == row["next_run_at"] == before[template]["next_run_at"]
        )
    assert len((await fire_due(connection, Templates(shop().pipelines()), 60))[0]) == 2
    assert await codes(connection) == {None}


async def test_each_late_schedule_says_that_its_code_is_away_however_few_a_call_writes(connection: Connection) -> None:
    """A worker with other code runs meanwhile."""
    await schedules_of_a_client(connection, late=300)
    await workers.unregister(connection, await a_worker_with(connection, HANDLERS))
    await a_worker_with(connection, ["letter.write"])
    for _ in range(2):
        await fire_due(connection, OTHER, 60, limit=1)
    assert await codes(connection) == {"template_not_found"}


async def test_a_late_schedule_that_this_worker_has_yet_to_fire_says_nothing_of_a_missing_template(
    connection: Connection,
) -> None:
    await schedules_of_a_client(connection, late=300)
    await workers.unregister(connection, await a_worker_with(connection, HANDLERS))
    await fire_due(connection, Templates(shop().pipelines()), 60, limit=1)
    assert await connection.fetchval("SELECT count(*) FROM schedule WHERE next_run_at <= clock_timestamp()") == 1
    assert await codes(connection) == {None}


async def test_a_schedule_that_another_transaction_holds_delays_no_word_about_the_code_of_the_others(
    connection: Connection, settings: Settings
) -> None:
    await schedules_of_a_client(connection, late=300)
    await workers.unregister(connection, await a_worker_with(connection, HANDLERS))
    worker = await connect(settings, "test")
    await worker.execute("SET lock_timeout = '5s'")  # a firing that waits fails soon
    async with connection.transaction():
        await connection.execute("SELECT FROM schedule WHERE template = 'shop.tidy' FOR UPDATE")
        assert await fire_due(worker, OTHER, 60) == ([], False)
    written_meanwhile = await rows(connection)
    assert written_meanwhile["shop.report"]["last_error"]["code"] == "template_not_found"
    assert written_meanwhile["shop.tidy"]["last_error"] is None
    await fire_due(worker, OTHER, 60)
    await worker.close()
    assert await codes(connection) == {"template_not_found"}


@pytest.mark.parametrize(
    "who",
    [
        "a worker has the code", "a worker may have the code", "this worker has the code", "the app declares it",
        "it is set aside",
    ],
)  # fmt: skip
async def test_a_late_schedule_says_nothing_of_a_missing_template_if_a_worker_has_its_code_or_its_app_declares_it(
    connection: Connection, settings: Settings, who: str
) -> None:
    await schedules_of_a_client(connection, late=300)
    worker = await a_worker_with(connection, HANDLERS)
    if who != "a worker has the code":
        await workers.unregister(connection, worker)
    if who == "a worker may have the code":  # it has more than a worker's row names
        await a_worker_with(connection, None)
    if who == "the app declares it":
        await connection.execute("UPDATE schedule SET declared_by = 'shop'")
    if who == "it is set aside":  # and its tenant wrote the template
        for template, row in (await rows(connection)).items():
            too_many = TooMany("rate_limited", "m", policy="rate", at_most=1, retry_after=1.0)
            await set_aside(connection, "schedules", row["id"], too_many)
            await a_template(connection, row["tenant_id"], template)
    before = await rows(connection)
    if who == "this worker has the code":
        other = await connect(settings, "test")
        async with other.transaction():
            await other.execute("SELECT FROM schedule FOR UPDATE")  # another worker fires them
            assert await fire_due(connection, Templates(shop().pipelines()), 60) == ([], False)
        await other.close()
    else:
        assert await fire_due(connection, OTHER, 60) == ([], False)
    assert await rows(connection) == before


@pytest.mark.parametrize("has", ["unnamed", "had it", "it"])
async def test_a_tenants_own_template_is_fired_by_any_worker_unless_a_worker_has_code_of_its_name(
    connection: Connection, has: str
) -> None:
    await schedules_of_a_client(connection)
    worker = await a_worker_with(connection, None if has == "unnamed" else ["letter.write"])
    if has == "had it":
        await workers.unregister(connection, worker)
    await connection.execute("UPDATE schedule SET template = 'letter', tenant_id = CASE template WHEN 'shop.report'"
                             " THEN 'acme' ELSE 'another' END")  # fmt: skip
    await a_template(connection, "acme", "letter")
    made, _ = await fire_due(connection, OTHER, 60)
    assert len(made) == (has != "it")
    assert await codes(connection) == {None}
    left = await connection.fetchval("SELECT count(*) FROM schedule WHERE next_run_at <= clock_timestamp()")
    assert left == (2 if has == "it" else 1), "that of the other tenant, who has no such template"


@pytest.mark.parametrize(
    ("expression", "zone", "words"),
    [("61 * * * *", "UTC", "minute"), ("0 3 * * *", "Berlin", "IANA time zone"), ("0 0 31 2 *", "UTC", "day-of-month")],
)
def test_a_clock_that_cannot_be_is_refused_at_import(expression: str, zone: str, words: str) -> None:
    with pytest.raises(DeclarationError, match=rf"test_cron\.py:\d+: .*{words}"):
        App("shop").cron(expression, zone=zone)(without_parameters)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overlap": "queue"}, "overlap is one of skip, buffer_one, cancel_other, allow_all, not 'queue'"),
        ({"catch_up": True}, "catch_up is one of skip, one, all, not True"),
        ({"catch_up_within": timedelta(seconds=-1)}, "catch_up_within is 0 to 3660 days"),
        ({"catch_up_within": timedelta(days=3660, seconds=1)}, "catch_up_within is 0 to 3660 days"),
    ],
)
def test_a_policy_that_no_schedule_has_is_refused_at_import(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DeclarationError, match=rf"test_cron\.py:\d+: {words}"):
        App("shop").cron("@daily", **options)(without_parameters)


@pytest.mark.parametrize("within", [timedelta(0), timedelta(days=3660)])
async def test_the_longest_and_the_shortest_window_can_be_written(connection: Connection, within: timedelta) -> None:
    app = App("shop")
    app.cron("@daily", catch_up_within=within)(without_parameters)
    await written(connection, app)
    assert (await rows(connection))["shop.without_parameters"]["catch_up_seconds"] == within.total_seconds()


def test_a_function_that_the_clock_cannot_call_is_refused_at_import() -> None:
    with pytest.raises(DeclarationError, match=r"test_cron\.py:\d+: a schedule calls it without arguments: missing"):
        App("shop").cron("@daily")(with_a_parameter)


def without_parameters() -> None: ...
def with_a_parameter(n: int) -> None: ...


async def test_an_app_whose_schedules_cannot_be_written_keeps_no_other_from_it(connection: Connection) -> None:
    broken = DeclaredSchedule("broken", "@daily", "UTC", {"text": "\x00"})  # PostgreSQL stores no such text
    fine = DeclaredSchedule("fine", "@daily", "UTC", {})
    unwritten = {"broken": [broken], "fine": [fine]}
    assert await reconcile_apps(connection, "default", unwritten) == ["fine"]
    assert await connection.fetchval("SELECT array_agg(template) FROM schedule") == ["fine"]
    unwritten["broken"] = [fine]
    assert await reconcile_apps(connection, "default", unwritten) == ["fine"]  # the other is not tried again at once
    await connection.execute("UPDATE quarantine SET retry_at = now() WHERE duty = 'declared_schedules'")
    assert await reconcile_apps(connection, "default", {"broken": unwritten["broken"]}) == ["broken"]
