"""One firing beside others: what it takes, what it leaves, and what the schedule says when no run comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Literal, TypeAlias
from uuid import UUID

import pytest
from pydantic import BaseModel

from leasehold.db.database import Connection, connect
from leasehold.domain.errors import Invalid
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines
from leasehold.evaluation.templates import Templates
from leasehold.limits.admission import Admission, Payer
from leasehold.pipelines import SHIPPED
from leasehold.schedules import firing as schedules
from leasehold.settings import Settings
from leasehold.transitions.quarantine import run_unit
from tests.api.conftest import Running
from tests.api.media_api import problem
from tests.runs.conftest import Client
from tests.runs.test_schedules import KEEP, TEMPLATES, due, make, runs_of
from tests.support.lock_waits import until_waiting

#: What a firing finds: a schedule whose tick is due, or one whose tick waits for the run before it, which has ended.
Finds: TypeAlias = Literal["due", "buffered"]
BOTH = pytest.mark.parametrize("finds", ["due", "buffered"])


class Needs(BaseModel):
    what: str


#: A release of the template in which no payload of these tests is valid.
STRICTER = Templates(Pipelines(Pipeline("scripted", module="tests.runs.work", params=Needs, steps=[Step("first")])))


@pytest.fixture
async def scheduler(settings: Settings) -> AsyncIterator[Connection]:
    """It waits for no lock for long: a test that holds one fails soon."""
    connection = await connect(settings, "scheduler")
    await connection.execute("SET lock_timeout = '5s'")
    yield connection
    await connection.close()


async def row_of(rows: Connection, schedule: str) -> dict[str, Any]:
    return dict(await rows.fetchrow("SELECT * FROM schedule WHERE id = $1", UUID(schedule)) or {})


async def make_ready(
    client: Client, rows: Connection, finds: Finds, count: int, *, are_busy: bool = False
) -> list[str]:
    """Schedules that the next firing takes. `are_busy`: it does not take them yet, because of runs under way."""
    made = [(await make(client, overlap="buffer_one"))["id"] for _ in range(count)]
    started = []
    for schedule in made:
        if finds == "buffered":
            started.append((await client.post(f"/v1/schedules/{schedule}/run-now")).json()["id"])
        await due(rows, schedule)
    if finds == "buffered":
        await schedules.fire_due(rows, TEMPLATES, KEEP)
        assert await ticked(rows, *made) == [0] * count
    for run in () if are_busy else started:
        await client.post(f"/v1/runs/{run}/cancel")
    return made


async def ticked(rows: Connection, *of: str) -> list[int]:
    """How many ticks of each schedule have a run."""
    return [len([run for run in await runs_of(rows, schedule) if run["tick"] is not None]) for schedule in of]


async def end_runs(rows: Connection, status: str) -> None:
    await rows.execute(
        "UPDATE job SET status = $1, error = '{}', finished_at = clock_timestamp() WHERE finished_at IS NULL", status
    )


@pytest.mark.parametrize(("overlap", "statuses"), [
    ("skip", ["cancelled"]), ("allow_all", ["cancelled", "cancelled"]), ("cancel_other", ["cancelled", "cancelled"]),
    ("buffer_one", ["cancelled", "pending"]),
])  # fmt: skip
async def test_what_becomes_of_a_schedule_is_nothing_to_the_others(
    client: Client, stranger: Client, rows: Connection, overlap: str, statuses: list[str]
) -> None:
    """Of its tenant and of another: they have failed runs, one under way, a tick that waits for it, and an error."""
    schedule = (await make(client, overlap=overlap, pause_after_failures=2))["id"]
    others = [(whose, (await make(whose, overlap="buffer_one"))["id"]) for whose in (client, stranger)]
    for ending in ("failed", "failed", None):
        for whose, other in others:
            assert (await whose.post(f"/v1/schedules/{other}/run-now")).status_code == 202
        if ending is not None:
            await end_runs(rows, ending)
    for release in (TEMPLATES, STRICTER):
        for _, other in others:
            await due(rows, other)
        assert await schedules.fire_due(rows, release, KEEP) == ([], False)

    async def state_of_others() -> list[Any]:
        return [(await row_of(rows, other), await runs_of(rows, other)) for _, other in others]

    before = await state_of_others()
    assert all(row["buffered_at"] is not None and row["failures"] == 1 for row, _ in before)
    for ago in (20, 1):
        await due(rows, schedule, timedelta(seconds=ago))
        await schedules.fire_due(rows, TEMPLATES, KEEP)
        assert (await row_of(rows, schedule))["enabled"]
    for run in await runs_of(rows, schedule):
        await client.post(f"/v1/runs/{run['job_id']}/cancel")
    await schedules.fire_due(rows, TEMPLATES, KEEP)  # the run of the tick that waited
    made = [run["status"].replace("queued", "pending") for run in await runs_of(rows, schedule)]
    assert made == statuses
    await due(rows, schedule)
    await schedules.fire_due(rows, STRICTER, KEEP, pause_after=1)
    paused = await row_of(rows, schedule)
    assert (paused["enabled"], paused["failures"]) == (False, 1)
    assert await state_of_others() == before


async def test_of_two_schedules_with_the_same_ticks_each_is_filled_in(client: Client) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    span = {"start": (hour - timedelta(hours=3)).isoformat(), "end": hour.isoformat()}
    for _ in range(2):
        schedule = (await make(client, cron="0 * * * *"))["id"]
        assert len((await client.post(f"/v1/schedules/{schedule}/backfill", **span)).json()["runs"]) == 3


async def test_a_backfill_takes_a_hundred_ticks_and_not_one_more(client: Client) -> None:
    path = f"/v1/schedules/{(await make(client, cron='* * * * *'))['id']}/backfill"
    end = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(hours=1)
    for minutes in (100, 101):
        span = {"start": (end - timedelta(minutes=minutes)).isoformat(), "end": end.isoformat(), "dry_run": True}
        answer = await client.post(path, **span)
        if minutes == 100:
            assert (answer.status_code, answer.json()["ticks"]) == (200, 100)
        else:
            problem(answer, 422, "range_too_long")


async def test_a_tick_waits_also_for_the_run_of_a_tick_that_waited(client: Client, rows: Connection) -> None:
    (schedule,) = await make_ready(client, rows, "buffered", 1)
    for ticks in (1, 2):
        ((created,), _) = await schedules.fire_due(rows, TEMPLATES, KEEP)
        await due(rows, schedule)
        assert await schedules.fire_due(rows, TEMPLATES, KEEP) == ([], False)
        assert await ticked(rows, schedule) == [ticks]
        await client.post(f"/v1/runs/{created.id}/cancel")


@BOTH
async def test_a_schedule_that_is_set_aside_is_not_tried_before_its_time_and_the_next_one_is(
    client: Client, rows: Connection, finds: Finds
) -> None:
    first, second = await make_ready(client, rows, finds, 2)

    async def fail() -> None:
        raise Invalid("broken", "It cannot be fired.")

    await run_unit(rows, schedules.DUTY, UUID(first), fail)
    before = await row_of(rows, first)
    await schedules.fire_due(rows, TEMPLATES, KEEP)
    assert await ticked(rows, first, second) == [0, 1]
    assert await row_of(rows, first) == before
    await rows.execute("UPDATE quarantine SET retry_at = clock_timestamp()")
    await schedules.fire_due(rows, TEMPLATES, KEEP)
    assert await ticked(rows, first, second) == [1, 1]


@BOTH
async def test_a_firing_takes_no_more_than_its_limit_and_says_whether_more_may_be_due(
    client: Client, rows: Connection, finds: Finds
) -> None:
    """Schedules that are not due take no place from those that are."""
    idle = [(await make(client, overlap="buffer_one"))["id"] for _ in range(2)]
    busy = await make_ready(client, rows, "buffered", 2, are_busy=True)
    ready = await make_ready(client, rows, finds, 3)
    firings = [await schedules.fire_due(rows, TEMPLATES, KEEP, limit=2) for _ in range(3)]
    assert [(len(made), may_be_more) for made, may_be_more in firings] == [(2, True), (1, False), (0, False)]
    assert await ticked(rows, *idle, *busy, *ready) == [0, 0, 0, 0, 1, 1, 1]


async def test_a_tenants_missed_ticks_make_no_tick_of_another_tenant_a_missed_one(
    client: Client, stranger: Client, rows: Connection
) -> None:
    """Nor one of the same tenant that may be dropped. A tick that becomes due meanwhile comes next."""
    backlog = {"cron": "* * * * *", "catch_up": "all", "overlap": "allow_all"}
    missed = [(await make(client, **backlog))["id"] for _ in range(4)]
    hourly = [(await make(whose, cron="@hourly"))["id"] for whose in (client, stranger)]
    for schedule in missed:
        await due(rows, schedule, timedelta(minutes=60))
    await due(rows, hourly[0], timedelta(seconds=20))
    made, may_be_more = await schedules.fire_due(rows, TEMPLATES, KEEP)
    assert await ticked(rows, *hourly, *missed[2:]) == [1, 0, 0, 0], "the call has made enough runs of missed ticks"
    assert (len(made), may_be_more) == (1 + sum(await ticked(rows, *missed)), True)
    await due(rows, hourly[1], timedelta(seconds=20))
    assert (await schedules.fire_due(rows, TEMPLATES, KEEP, limit=1))[1]
    assert await ticked(rows, *hourly, *missed[2:]) == [1, 1, 0, 0]
    while (await schedules.fire_due(rows, TEMPLATES, KEEP))[1]:
        pass
    assert min(await ticked(rows, *missed)) >= 60


@pytest.mark.parametrize("catch_up", ["skip", "one", "all"])
@pytest.mark.parametrize("minutes", [0, 30])
async def test_the_tenants_take_turns_and_those_that_are_due_for_longest_come_first(
    client: Client, stranger: Client, rows: Connection, catch_up: str, minutes: int
) -> None:
    first, second = [(await make(client, cron="@yearly", catch_up=catch_up))["id"] for _ in range(2)]
    other = (await make(stranger, cron="@yearly", catch_up=catch_up))["id"]
    for seconds, schedule in ((40, first), (30, second), (20, other)):
        await due(rows, schedule, timedelta(minutes=minutes, seconds=seconds))
    late = "SELECT array_agg(id::text) FROM schedule WHERE next_run_at < clock_timestamp()"
    assert (await schedules.fire_due(rows, TEMPLATES, KEEP, limit=2))[1]
    assert await rows.fetchval(late) == [second]
    for seconds, schedule in ((30, first), (40, second), (50, other)):
        await due(rows, schedule, timedelta(minutes=minutes, seconds=seconds))
    for left in (sorted((first, second)), [first], None):
        await schedules.fire_due(rows, TEMPLATES, KEEP, limit=1)
        assert await rows.fetchval(late.replace("id::text", "id::text ORDER BY id")) == left


async def test_a_tenants_missed_ticks_cost_its_other_schedules_no_turn(
    client: Client, stranger: Client, rows: Connection
) -> None:
    missed = (await make(client, catch_up="all"))["id"]
    mine, *others = [(await make(whose))["id"] for whose in (client, stranger, stranger)]
    await due(rows, missed, timedelta(minutes=60))
    for seconds, schedule in ((20, mine), (40, others[0]), (30, others[1])):
        await due(rows, schedule, timedelta(seconds=seconds))
    await schedules.fire_due(rows, TEMPLATES, KEEP, limit=2)
    assert await ticked(rows, missed, mine, *others) == [0, 1, 1, 0]


async def test_each_call_reads_no_more_due_schedules_than_need_turns_however_many_are_due(rows: Connection) -> None:
    """A backlog of missed ticks takes no place from the others, and thousands of one tenant none from another."""

    async def write(count: int, tenant: str, catch_up: str, late: timedelta) -> None:
        await rows.execute(
            "INSERT INTO schedule (id, tenant_id, template, cron, timezone, payload_template, scope, scope_id,"
            " priority, overlap, catch_up, catch_up_seconds, next_run_at)"
            " SELECT gen_random_uuid(), $2, 'scripted', '@yearly', 'UTC', '{}', 'tenant', '', 1, 'skip', $3, 3600,"
            " statement_timestamp() - $4::interval - n * interval '1 microsecond' FROM generate_series(1, $1) AS n",
            count, tenant, catch_up, late,
        )  # fmt: skip

    await write(1, "few", "skip", timedelta(seconds=5))
    await write(10_001, "many", "all", timedelta(minutes=10))
    await write(9_999, "many", "skip", timedelta(seconds=30))
    await write(1, "few", "skip", timedelta(seconds=10))
    pipelines = [pipeline.name for pipeline in TEMPLATES.pipelines]
    found = [row["id"] for row in await rows.fetch(schedules._FIND_DUE, 100_000, pipelines, schedules.ON_TIME)]
    first, last = await rows.fetch("SELECT id FROM schedule WHERE tenant_id = 'few' ORDER BY next_run_at")
    assert len(found) == 20_000
    assert found.index(first["id"]) == 1
    assert last["id"] not in found


async def test_of_missed_ticks_those_that_may_be_dropped_come_first(client: Client, rows: Connection) -> None:
    everything, latest, nothing = [(await make(client, cron="@yearly", catch_up=policy))["id"]
                                   for policy in ("all", "one", "skip")]  # fmt: skip
    for minutes, schedule in ((40, everything), (30, latest), (20, nothing)):
        await due(rows, schedule, timedelta(minutes=minutes))
    assert len((await schedules.fire_due(rows, TEMPLATES, KEEP, limit=2))[0]) == 1
    assert await ticked(rows, everything, latest, nothing) == [0, 1, 0]
    still_due = await rows.fetchval("SELECT array_agg(id::text) FROM schedule WHERE next_run_at < clock_timestamp()")
    assert still_due == [everything]


async def test_a_tick_on_time_comes_before_missed_ticks_also_where_its_schedule_drops_none(
    client: Client, rows: Connection
) -> None:
    missed, on_time = [(await make(client, cron="@yearly", catch_up="all"))["id"] for _ in range(2)]
    await due(rows, missed, timedelta(minutes=40))
    await due(rows, on_time, timedelta(seconds=20))
    await schedules.fire_due(rows, TEMPLATES, KEEP, limit=1)
    assert await ticked(rows, missed, on_time) == [0, 1]


@BOTH
async def test_a_call_that_takes_long_looks_again_before_it_goes_on(
    client: Client, rows: Connection, finds: Finds, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await make_ready(client, rows, finds, 3)
    monkeypatch.setattr(schedules, "_SECONDS_AT_ONCE", 0.0)
    for number in (1, 2):
        assert (await schedules.fire_due(rows, TEMPLATES, KEEP))[1]
        assert sum(await ticked(rows, *made)) == number
    monkeypatch.setattr(schedules, "_SECONDS_AT_ONCE", 60.0)
    assert not (await schedules.fire_due(rows, TEMPLATES, KEEP))[1]
    assert sum(await ticked(rows, *made)) == 3


async def test_a_policy_that_allows_all_runs_reads_none_of_them(
    client: Client, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule with many missed ticks would read, for each of them, the runs of all others."""
    schedule = (await make(client, overlap="allow_all"))["id"]
    await due(rows, schedule)
    monkeypatch.delattr(schedules, "_unfinished_runs")
    assert len((await schedules.fire_due(rows, TEMPLATES, KEEP))[0]) == 1


@BOTH
async def test_a_schedule_that_another_worker_fires_is_left_to_it(
    client: Client, rows: Connection, scheduler: Connection, finds: Finds
) -> None:
    first, second = await make_ready(client, rows, finds, 2)
    async with rows.transaction():
        await rows.execute("SELECT FROM schedule WHERE id = $1 FOR UPDATE", UUID(first))  # as a firing begins
        made, may_be_more = await schedules.fire_due(scheduler, TEMPLATES, KEEP)
        assert (len(made), may_be_more) == (1, False)
        # A full batch of which this worker fired nothing: the other worker looks again, and not this one.
        assert await schedules.fire_due(scheduler, TEMPLATES, KEEP, limit=1) == ([], False)
    assert await ticked(rows, first, second) == [0, 1]
    assert await rows.fetchval("SELECT count(*) FROM quarantine") == 0


@pytest.mark.parametrize(("finds", "change"), [
    ("due", {"enabled": False}), ("due", {"cron": "0 0 2 1 *"}),
    ("buffered", {"enabled": False}), ("buffered", {"overlap": "skip"}),
])  # fmt: skip
async def test_a_schedule_that_is_changed_while_the_one_before_it_fires_is_fired_as_it_is_then(
    client: Client, rows: Connection, scheduler: Connection, settings: Settings, finds: Finds, change: dict[str, Any]
) -> None:
    pair = await make_ready(client, rows, finds, 2)
    admission = Admission(settings.model_copy(update={"submissions_per_tenant": 60}), SHIPPED)
    async with rows.transaction():
        await admission.charge(rows, Payer("acme"))  # a submission that is under way: the firing waits for its charge
        firing = asyncio.create_task(schedules.fire_due(scheduler, TEMPLATES, KEEP, admission=admission))
        await until_waiting(rows)
        observer = await connect(settings, "test")
        ((later,),) = await observer.fetch("SELECT id::text FROM schedule FOR UPDATE SKIP LOCKED")
        await observer.close()
        assert (await client.http.patch(f"/v1/schedules/{later}", json=change)).status_code == 200
    assert len((await firing)[0]) == 1
    assert sorted(await ticked(rows, *pair)) == [0, 1]
    row = await row_of(rows, later)
    assert (row["last_error"], row["failures"], row["buffered_at"]) == (None, 0, None)


async def test_a_tick_that_waits_goes_on_waiting_if_a_run_by_hand_is_faster_than_its_firing(
    client: Client, rows: Connection, scheduler: Connection, settings: Settings
) -> None:
    """And it is not judged before that run has ended, though its payload is refused meanwhile."""
    pair = await make_ready(client, rows, "buffered", 2)
    admission = Admission(settings.model_copy(update={"submissions_per_tenant": 60}), SHIPPED)
    async with rows.transaction():
        await admission.charge(rows, Payer("acme"))  # the firing of the first one waits for its charge
        firing = asyncio.create_task(schedules.fire_due(scheduler, TEMPLATES, KEEP, admission=admission))
        await until_waiting(rows)
        observer = await connect(settings, "test")
        ((later,),) = await observer.fetch("SELECT id::text FROM schedule FOR UPDATE SKIP LOCKED")
        await observer.close()
        assert (await client.post(f"/v1/schedules/{later}/run-now")).status_code == 202
        await rows.execute('UPDATE schedule SET payload_template = \'{"number": "x"}\' WHERE id = $1', UUID(later))
        before = await row_of(rows, later)
        assert before["buffered_at"] is not None
    assert len((await firing)[0]) == 1
    assert await row_of(rows, later) == before
    assert sorted(await ticked(rows, *pair)) == [0, 1]


async def test_a_firing_that_the_template_refuses_counts_once_however_many_ticks_it_had(
    client: Client, rows: Connection
) -> None:
    """And the schedule is paused at the number of refusals that pauses it."""
    minute = (datetime.now(UTC) + timedelta(minutes=30)).replace(second=0, microsecond=0)
    body = {"cron": f"{minute.minute} * * * *", "catch_up": "all", "catch_up_seconds": 86_400}
    schedule = (await make(client, **body))["id"]
    for failures in (1, 2):
        first = minute - timedelta(hours=4)
        await rows.execute("UPDATE schedule SET next_run_at = $2 WHERE id = $1", UUID(schedule), first)
        assert await schedules.fire_due(rows, STRICTER, KEEP, pause_after=2) == ([], False)
        row = await row_of(rows, schedule)
        assert (row["failures"], row["enabled"]) == (failures, failures < 2)
        last_tick = minute - timedelta(hours=1)
        assert (row["last_error"]["code"], datetime.fromisoformat(row["last_error"]["tick"])) == (
            "invalid_payload", last_tick,
        )  # fmt: skip
    assert row["paused_because"] == "2 firings in a row were refused"


async def test_a_firing_whose_runs_can_never_be_accepted_counts_once_however_many_ticks_it_had(
    client: Client, rows: Connection, settings: Settings
) -> None:
    minute = (datetime.now(UTC) + timedelta(minutes=30)).replace(second=0, microsecond=0)
    body = {"cron": f"{minute.minute} * * * *", "catch_up": "all", "catch_up_seconds": 86_400}
    schedule = (await make(client, **body))["id"]
    admission = Admission(settings.model_copy(update={"submissions_per_tenant": 0}), SHIPPED)
    for failures in (1, 2):
        first = minute - timedelta(hours=4)
        await rows.execute("UPDATE schedule SET next_run_at = $2 WHERE id = $1", UUID(schedule), first)
        assert await schedules.fire_due(rows, TEMPLATES, KEEP, pause_after=2, admission=admission) == ([], False)
        row = await row_of(rows, schedule)
        assert (row["last_error"]["code"], row["failures"]) == ("batch_too_large", failures)
        assert row["enabled"] == (failures < 2)


async def test_a_full_rate_never_pauses_a_schedule_whatever_failed_before(
    client: Client, rows: Connection, settings: Settings
) -> None:
    schedule = (await make(client))["id"]
    await due(rows, schedule)
    await schedules.fire_due(rows, STRICTER, KEEP)
    assert (await row_of(rows, schedule))["failures"] == 1
    admission = Admission(settings.model_copy(update={"submissions_per_tenant": 1}), SHIPPED)
    await admission.charge(rows, Payer("acme"))
    await due(rows, schedule)
    assert await schedules.fire_due(rows, TEMPLATES, KEEP, pause_after=1, admission=admission) == ([], False)
    row = await row_of(rows, schedule)
    assert (row["last_error"]["code"], row["failures"], row["enabled"]) == ("rate_limited", 1, True)


@pytest.mark.parametrize(("endings", "is_paused"), [
    (["failed", "failed"], True), (["failed", "expired"], True), (["succeeded", "failed", "failed"], True),
    (["failed", "failed", "pending"], True), (["failed", "succeeded"], False), (["succeeded", "failed"], False),
    (["failed", "cancelled"], False), (["failed", "pending"], False),
])  # fmt: skip
async def test_a_schedule_pauses_itself_if_the_last_of_its_ended_runs_have_all_failed(
    client: Client, rows: Connection, endings: Sequence[str], is_paused: bool
) -> None:
    """A run under way neither counts nor hides the others. Runs of before a resumption do not count."""
    schedule = (await make(client, pause_after_failures=2, overlap="allow_all"))["id"]
    path = f"/v1/schedules/{schedule}"
    for ending in endings:
        await client.post(f"{path}/run-now")
        if ending != "pending":
            await end_runs(rows, ending)
    await due(rows, schedule)
    made, _ = await schedules.fire_due(rows, TEMPLATES, KEEP)
    assert len(made) == (not is_paused)
    assert (await client.http.get(path)).json()["enabled"] is not is_paused
    if is_paused:
        await client.http.patch(path, json={"enabled": True})
        await due(rows, schedule)
        assert len((await schedules.fire_due(rows, TEMPLATES, KEEP))[0]) == 1


async def test_a_tick_that_has_its_run_costs_nothing_and_is_no_error(
    client: Client, rows: Connection, settings: Settings
) -> None:
    schedule = (await make(client, overlap="allow_all"))["id"]
    await due(rows, schedule)
    tick = (await row_of(rows, schedule))["next_run_at"]
    assert len((await schedules.fire_due(rows, TEMPLATES, KEEP))[0]) == 1
    await rows.execute("UPDATE schedule SET next_run_at = $1", tick)  # as if a backfill had been faster than the firing
    admission = Admission(settings.model_copy(update={"submissions_per_tenant": 1}), SHIPPED)
    assert await schedules.fire_due(rows, TEMPLATES, KEEP, admission=admission) == ([], False)
    await admission.charge(rows, Payer("acme"))  # there is room for the only one of the minute
    row = await row_of(rows, schedule)
    assert (row["last_error"], row["next_run_at"] > tick, len(await runs_of(rows, schedule))) == (None, True, 1)


async def test_a_run_that_cannot_be_written_is_not_taken_for_one_that_was_written_before(
    client: Client, rows: Connection
) -> None:
    schedule = (await make(client, overlap="allow_all"))["id"]
    await client.post(f"/v1/schedules/{schedule}/run-now")
    await rows.execute("CREATE UNIQUE INDEX one_run_of_each ON run (schedule_id)")
    await due(rows, schedule)
    tick = (await row_of(rows, schedule))["next_run_at"]
    assert await schedules.fire_due(rows, TEMPLATES, KEEP) == ([], False)
    row = await row_of(rows, schedule)
    assert (row["last_error"]["code"], row["next_run_at"]) == ("unforeseen", tick)


async def test_a_tick_that_finds_another_run_of_its_scope_says_so_and_is_no_failure(
    client: Client, rows: Connection
) -> None:
    steps = [{"id": "only", "queue": "q"}]
    answer = await client.post("/v1/templates", type="alone", steps=steps, concurrency_policy="reject_same_scope")
    assert answer.status_code == 201, answer.text
    run = await client.start("alone")
    schedule = (await make(client, template="alone", overlap="allow_all"))["id"]
    await due(rows, schedule)
    assert await schedules.fire_due(rows, TEMPLATES, KEEP, pause_after=1) == ([], False)
    shown = (await client.http.get(f"/v1/schedules/{schedule}")).json()
    assert (shown["last_error"]["code"], shown["failures"], shown["enabled"]) == ("same_scope_running", 0, True)
    assert run in shown["last_error"]["message"]


async def test_a_firing_cancels_even_a_run_that_its_clients_may_not_cancel(
    client: Client, rows: Connection, running: Running
) -> None:
    body = {"type": "stubborn", "steps": [{"id": "only", "queue": "q"}], "cancel_policy": {"supported": False}}
    assert (await client.post("/v1/templates", **body)).status_code == 201
    schedule = (await make(client, template="stubborn", overlap="cancel_other"))["id"]
    run = (await client.post(f"/v1/schedules/{schedule}/run-now")).json()["id"]
    assert (await client.post(f"/v1/runs/{run}/cancel")).status_code == 409
    await due(rows, schedule)
    assert len((await schedules.fire_due(rows, running.services.templates, KEEP))[0]) == 1
    assert (await client.look(run))["status"] == "cancelled"


CHECKED = {"type": "checked", "steps": [{"id": "only", "queue": "q"}]}
LETTERS = {"properties": {"a": {"pattern": "^[a-z]+$"}}}


async def test_a_tick_whose_payload_cannot_be_checked_now_stays_due(
    running: Running, client: Client, rows: Connection
) -> None:
    assert (await client.post("/v1/templates", **CHECKED, payload_schema=LETTERS)).status_code == 201
    schedule = (await make(client, template="checked", payload_template={"a": "b"}))["id"]
    await due(rows, schedule)
    tick = (await row_of(rows, schedule))["next_run_at"]
    templates = running.services.templates
    templates._evaluator._tenants["acme"].open_questions += running.services.settings.evaluations_waiting
    assert await schedules.fire_due(rows, templates, KEEP, pause_after=1) == ([], False)
    row = await row_of(rows, schedule)
    assert (row["last_error"]["code"], row["failures"], row["enabled"]) == ("evaluations_waiting", 0, True)
    templates._evaluator._tenants.clear()
    await rows.execute("UPDATE quarantine SET retry_at = clock_timestamp()")
    await schedules.fire_due(rows, templates, KEEP)
    assert [run["tick"] for run in await runs_of(rows, schedule)] == [tick]


@pytest.fixture
async def checking(
    running: Running, client: Client, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Templates, list[Callable[[], Awaitable[object]]]]:
    """A schedule whose payload the evaluator must check; the templates; and what happens during the checks, one thing
    during each.
    """
    templates = running.services.templates
    assert (await client.post("/v1/templates", **CHECKED, payload_schema=LETTERS)).status_code == 201
    meanwhile: list[Callable[[], Awaitable[object]]] = []
    check = templates._evaluator.check

    async def checking_slowly(*arguments: Any) -> None:
        if meanwhile:
            await meanwhile.pop(0)()
        await check(*arguments)

    schedule = (await make(client, template="checked", payload_template={"a": "b"}, overlap="buffer_one"))["id"]
    monkeypatch.setattr(templates._evaluator, "check", checking_slowly)
    return schedule, templates, meanwhile


async def payloads_of(rows: Connection) -> list[Any]:
    return [row["params"] for row in await rows.fetch("SELECT params FROM job ORDER BY id")]


@BOTH
@pytest.mark.parametrize("is_changed", [False, True])
async def test_a_schedule_can_be_changed_while_the_evaluator_checks_its_payload_and_fires_as_it_is_then(
    client: Client, rows: Connection, scheduler: Connection, checking: Any, finds: Finds, *, is_changed: bool
) -> None:
    schedule, templates, meanwhile = checking
    set_due = "next_run_at" if finds == "due" else "buffered_at"
    await rows.execute(f"UPDATE schedule SET {set_due} = clock_timestamp()")

    async def change() -> None:
        assert not scheduler.is_in_transaction()
        body = {"payload_template": {"a": "c"}} if is_changed else {}
        async with asyncio.timeout(5):
            if is_changed:
                assert (await client.http.patch(f"/v1/schedules/{schedule}", json=body)).status_code == 200
            await rows.execute("SELECT FROM schedule FOR UPDATE NOWAIT")

    meanwhile.append(change)
    created, has_more = await schedules.fire_due(scheduler, templates, KEEP)
    assert (len(created), has_more) == ((0, True) if is_changed else (1, False))
    created_then, _ = await schedules.fire_due(scheduler, templates, KEEP)
    assert len(created_then) == is_changed
    assert await payloads_of(rows) == [{"a": "c" if is_changed else "b"}]
    assert (await row_of(rows, schedule))["buffered_at"] is None


async def test_a_newer_version_that_comes_during_the_check_of_a_payload_is_what_the_tick_runs(
    client: Client, rows: Connection, scheduler: Connection, checking: Any
) -> None:
    schedule, templates, meanwhile = checking
    await due(rows, schedule)
    newer = {**CHECKED, "version": 2, "payload_schema": {"properties": {"a": {"pattern": "^[0-9]$"}}}}
    meanwhile.append(partial(client.post, "/v1/templates", **newer))
    assert await schedules.fire_due(scheduler, templates, KEEP) == ([], True)
    assert (await row_of(rows, schedule))["last_error"] is None
    assert await schedules.fire_due(scheduler, templates, KEEP) == ([], False)
    assert (await row_of(rows, schedule))["last_error"]["code"] == "invalid_payload"


async def test_a_check_that_fails_unforeseen_sets_its_schedule_aside(
    rows: Connection, scheduler: Connection, checking: Any
) -> None:
    schedule, templates, meanwhile = checking
    await due(rows, schedule)

    async def fail() -> None:
        raise ZeroDivisionError

    meanwhile.append(fail)
    assert await schedules.fire_due(scheduler, templates, KEEP) == ([], False)
    row = await row_of(rows, schedule)
    assert (row["last_error"]["code"], row["failures"]) == ("unforeseen", 1)
    assert await rows.fetchval("SELECT unit FROM quarantine") == schedule


async def test_a_run_by_hand_that_a_newer_template_refuses_is_not_started_and_the_schedule_says_why(
    client: Client,
) -> None:
    assert (await client.post("/v1/templates", **CHECKED)).status_code == 201
    path = f"/v1/schedules/{(await make(client, template='checked', payload_template={'a': '1'}))['id']}"
    assert (await client.post("/v1/templates", **CHECKED, version=2, payload_schema=LETTERS)).status_code == 201
    problem(await client.post(f"{path}/run-now"), 409, "not_started")
    shown = (await client.http.get(path)).json()
    assert (shown["last_error"]["code"], shown["failures"]) == ("invalid_payload", 1)
