"""A schedule fires when its cron says, in its zone, once a tick, whatever runs beside it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import takewhile
from typing import Any
from uuid import UUID

import httpx2
import pytest
import time_machine

from leasehold.db.database import Connection, connect
from leasehold.domain import cron
from leasehold.domain.errors import Invalid
from leasehold.evaluation.templates import Templates
from leasehold.limits.admission import Admission, Payer
from leasehold.pipelines import SHIPPED
from leasehold.schedules import firing as schedules
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.transitions import concurrency, sweeps
from leasehold.transitions.concurrency.room import rooms_of
from leasehold.transitions.quarantine import run_unit
from leasehold.transitions.time_travel import let_pass
from tests.api.conftest import Running, client_of, serving
from tests.api.media_api import problem
from tests.runs.conftest import SCOPES, Client
from tests.runs.work import pipelines
from tests.support.lock_waits import until_waiting

KEEP = 86_400
TEMPLATES = Templates(pipelines())


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("zone", "expression", "after", "wanted"),
    [
        # the clock skips 02:00 to 03:00: what would have been then fires once, after the gap
        ("Europe/Berlin", "30 2 * * *", "2026-03-28 12:00", ["2026-03-29 01:00", "2026-03-30 00:30"]),
        ("America/New_York", "30 2 * * *", "2026-03-07 12:00", ["2026-03-08 07:00", "2026-03-09 06:30"]),
        ("Australia/Sydney", "30 2 * * *", "2026-10-03 00:00", ["2026-10-03 16:00", "2026-10-04 15:30"]),
        # the clock repeats 02:00 to 03:00 (01:00 to 02:00 in New York): the first time counts
        ("Europe/Berlin", "30 2 * * *", "2026-10-24 12:00", ["2026-10-25 00:30", "2026-10-26 01:30"]),
        ("America/New_York", "30 1 * * *", "2026-10-31 12:00", ["2026-11-01 05:30", "2026-11-02 06:30"]),
        ("Australia/Sydney", "30 2 * * *", "2026-04-04 00:00", ["2026-04-04 15:30", "2026-04-05 16:30"]),
        # counted from the second of the two hours: the tick of the first has passed
        ("Europe/Berlin", "50 2 * * *", "2026-10-25 01:10", ["2026-10-26 01:50", "2026-10-27 01:50"]),
        # the clock skips midnight: the day begins after the gap
        ("Asia/Beirut", "*/40 1 * * 0", "2026-03-27 12:00", ["2026-03-28 22:00", "2026-03-28 22:40"]),
        ("America/Asuncion", "*/40 1 1 10 *", "2023-09-20 12:00", ["2023-10-01 04:00", "2023-10-01 04:40"]),
        # every hour is every real hour
        ("Europe/Berlin", "0 * * * *", "2026-10-24 23:30", ["2026-10-25 00:00", "2026-10-25 01:00"]),
        ("Europe/Berlin", "30 * * * *", "2026-03-29 00:00", ["2026-03-29 00:30", "2026-03-29 01:30"]),
        ("Europe/Berlin", "*/30 2 * * *", "2026-10-25 00:10", ["2026-10-25 00:30", "2026-10-25 01:00"]),
        ("Asia/Taipei", "@daily", "2026-11-20 12:00", ["2026-11-20 16:00", "2026-11-21 16:00"]),
        # where nothing else fires for an hour after the gap, one tick does
        ("Europe/Berlin", "0 */2 * * *", "2026-03-28 23:00", ["2026-03-29 01:00", "2026-03-29 02:00"]),
        ("Europe/Berlin", "*/20 2 * * *", "2026-03-28 12:00", ["2026-03-29 01:00", "2026-03-30 00:00"]),
        # several times that the clock skips, and one that is right after the gap, are one tick
        ("Europe/Berlin", "0,30 2 * * *", "2026-03-28 12:00", ["2026-03-29 01:00", "2026-03-30 00:00"]),
        ("Europe/Berlin", "0 2,3 * * *", "2026-03-28 12:00", ["2026-03-29 01:00", "2026-03-30 00:00"]),
        ("Europe/Berlin", "30 2 29 3 *", "2025-01-01 00:00", ["2025-03-29 01:30", "2026-03-29 01:00"]),
        # the clock skips 02:00 to 02:30, or repeats 01:30 to 02:00
        ("Australia/Lord_Howe", "15 2 * * *", "2026-10-03 00:00", ["2026-10-03 15:30", "2026-10-04 15:15"]),
        ("Australia/Lord_Howe", "0 */6 * * *", "2026-10-03 14:00", ["2026-10-03 19:00", "2026-10-04 01:00"]),
        ("Australia/Lord_Howe", "0 */6 * * *", "2026-04-04 14:00", ["2026-04-04 19:30", "2026-04-05 01:30"]),
        ("Australia/Lord_Howe", "0 * * * *", "2026-10-03 14:30", ["2026-10-03 15:30", "2026-10-03 16:00"]),
        ("Australia/Lord_Howe", "45 * * * *", "2026-10-03 15:15", ["2026-10-03 15:45", "2026-10-03 16:45"]),
        ("Australia/Lord_Howe", "45 * * * *", "2026-04-04 14:00", ["2026-04-04 14:45", "2026-04-04 15:15"]),
        # the clock skips two hours, or a whole day
        ("Antarctica/Troll", "30 2 * * *", "2026-03-28 12:00", ["2026-03-29 01:00", "2026-03-30 00:30"]),
        ("Pacific/Apia", "30 2 * * *", "2011-12-29 13:00", ["2011-12-30 10:00", "2011-12-30 12:30"]),
        # a month without the day, and a century without the leap year, have no tick
        ("UTC", "0 0 31 * *", "2026-01-31 00:00", ["2026-03-31 00:00", "2026-05-31 00:00"]),
        ("Europe/Berlin", "0 12 30 * *", "2026-01-30 12:00", ["2026-03-30 10:00", "2026-04-30 10:00"]),
        ("UTC", "0 0 L * *", "2026-02-01 00:00", ["2026-02-28 00:00", "2026-03-31 00:00"]),
        ("UTC", "0 0 29 2 *", "2096-03-01 00:00", ["2104-02-29 00:00", "2108-02-29 00:00"]),
    ],
)
def test_daylight_saving_neither_loses_nor_doubles_a_tick(
    zone: str, expression: str, after: str, wanted: list[str]
) -> None:
    found = cron.ticks(expression, zone, utc(after))
    assert [next(found), next(found)] == [utc(text) for text in wanted]


@pytest.mark.parametrize(
    ("zone", "day", "gap"),
    [
        ("Europe/Berlin", "2026-03-28", "2026-03-29 01:00"),
        ("Europe/Berlin", "2026-10-24", None),
        ("Australia/Lord_Howe", "2026-10-03", "2026-10-03 15:30"),
        ("Australia/Lord_Howe", "2026-04-04", None),
        ("Antarctica/Troll", "2026-03-28", "2026-03-29 01:00"),
        ("Antarctica/Troll", "2026-10-24", None),
        ("America/Caracas", "2016-04-30", "2016-05-01 07:00"),
        ("Asia/Pyongyang", "2015-08-14", None),
        ("Pacific/Apia", "2011-12-29", "2011-12-30 10:00"),
        ("Africa/Monrovia", "1972-01-06", "1972-01-07 00:44:30"),
        ("Asia/Kathmandu", "2026-10-03", None),
    ],
)
@pytest.mark.parametrize("expression", ["*/7 * * * *", "0 * * * *", "45 * * * *", "20 */3 * * *", "*/25 1-5 * * *"])
def test_each_time_that_the_clock_shows_fires_each_time(zone: str, day: str, gap: str | None, expression: str) -> None:
    """Of schedules that go by elapsed time. Right after a gap one more tick may come."""
    start = utc(day)
    local_zone = cron.zone(zone)
    half_minutes = (start + timedelta(seconds=30 * number) for number in range(1, 3 * 2880))
    shown = [instant for instant in half_minutes if instant.astimezone(local_zone).second == 0]
    minutes, hours = expression.split()[:2]

    def is_named(instant: datetime) -> bool:
        local_time = instant.astimezone(local_zone)
        return local_time.minute in _field(minutes, 60) and local_time.hour in _field(hours, 24)

    named = [instant for instant in shown if is_named(instant)]
    found = list(takewhile(lambda tick: tick < start + timedelta(days=3), cron.ticks(expression, zone, start)))
    assert found == sorted(set(found))
    assert set(named) <= set(found)
    assert set(found) - set(named) <= ({utc(gap)} if gap is not None else set())


def _field(text: str, size: int) -> range:
    """The values that a field names: `*`, `*/N`, `N-M` or `N`."""
    span, _, step = text.partition("/")
    first, _, last = span.partition("-")
    if span == "*":
        return range(0, size, int(step or 1))
    return range(int(first), int(last or first) + 1)


@pytest.mark.parametrize("wrong", ["", "* * * *", "* * * * * *", "61 * * * *", "0 0 31 2 *", "@reboot", "a b c d e"])
def test_a_cron_that_means_nothing_is_refused(wrong: str) -> None:
    with pytest.raises(Invalid) as refused:
        cron.check(wrong, "UTC")
    assert refused.value.code == "invalid_cron"


async def make(client: Client, **body: Any) -> dict[str, Any]:
    answer = await client.post("/v1/schedules", **({"template": "scripted", "cron": "0 0 1 1 *"} | body))
    assert answer.status_code == 201, answer.text
    said: dict[str, Any] = answer.json()
    return said


async def due(rows: Connection, schedule: str, ago: timedelta = timedelta(seconds=1)) -> None:
    """As if its next tick had come `ago`."""
    await rows.execute(
        "UPDATE schedule SET next_run_at = clock_timestamp() - $2::interval WHERE id = $1", UUID(schedule), ago
    )


async def runs_of(rows: Connection, schedule: str) -> list[Any]:
    return await rows.fetch(
        "SELECT r.job_id, r.tick, j.status FROM run r JOIN job j ON j.id = r.job_id WHERE r.schedule_id = $1"
        " ORDER BY tick",
        UUID(schedule),
    )


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"cron": "not a cron"}, 422, "invalid_cron"),
        ({"timezone": "Mars/Olympus"}, 422, "invalid_timezone"),
        ({"timezone": "../etc/passwd"}, 422, "invalid_timezone"),
        ({"template": "nothing"}, 404, "template_not_found"),
        ({"payload_template": {"number": "x"}}, 422, "invalid_payload"),
        ({"overlap": "perhaps"}, 422, "invalid_request"),
    ],
)
async def test_a_schedule_that_could_not_run_is_refused(
    client: Client, body: dict[str, Any], status: int, code: str
) -> None:
    answer = await client.post("/v1/schedules", **({"template": "scripted", "cron": "0 9 * * *"} | body))
    problem(answer, status, code)


async def test_fifty_schedules_and_three_schedulers_make_fifty_runs(
    client: Client, rows: Connection, settings: Settings
) -> None:
    made = [await make(client) for _ in range(50)]
    at = datetime.now(UTC) - timedelta(seconds=1)
    await rows.execute("UPDATE schedule SET next_run_at = $1", at)
    connections = [await connect(settings, "scheduler") for _ in range(3)]
    for _ in range(3):
        await asyncio.gather(*(schedules.fire_due(c, TEMPLATES, KEEP) for c in connections))
    for connection in connections:
        await connection.close()
    counted = await rows.fetch("SELECT schedule_id, count(*) AS n FROM run WHERE tick = $1 GROUP BY 1", at)
    assert {str(row["schedule_id"]): row["n"] for row in counted} == {one["id"]: 1 for one in made}


async def test_a_tick_that_has_its_run_makes_no_second_one(client: Client, rows: Connection) -> None:
    schedule = (await make(client, overlap="allow_all"))["id"]
    await due(rows, schedule)
    again = await rows.fetchval("SELECT next_run_at FROM schedule WHERE id = $1", UUID(schedule))
    for _ in range(2):  # as if a scheduler had died before it wrote down what comes next
        await rows.execute("UPDATE schedule SET next_run_at = $2 WHERE id = $1", UUID(schedule), again)
        await schedules.fire_due(rows, TEMPLATES, KEEP)
    assert len(await runs_of(rows, schedule)) == 1


@pytest.mark.parametrize(("overlap", "statuses"), [
    ("skip", ["pending"]), ("allow_all", ["pending", "pending"]), ("cancel_other", ["cancelled", "pending"]),
    ("buffer_one", ["pending"]),
])  # fmt: skip
async def test_an_overlap_is_what_the_policy_says(
    client: Client, rows: Connection, overlap: str, statuses: list[str]
) -> None:
    schedule = (await make(client, overlap=overlap))["id"]
    for ago in (20, 1):
        await due(rows, schedule, timedelta(seconds=ago))
        await schedules.fire_due(rows, TEMPLATES, KEEP)
    made = await runs_of(rows, schedule)
    assert [row["status"].replace("queued", "pending") for row in made] == statuses
    if overlap == "buffer_one":
        await client.post(f"/v1/runs/{made[0]['job_id']}/cancel")
        await schedules.fire_due(rows, TEMPLATES, KEEP)
        assert len(await runs_of(rows, schedule)) == 2


@pytest.mark.parametrize("change", [{"enabled": False}, {"overlap": "skip"}])
async def test_a_tick_that_waits_for_the_run_before_it_is_dropped_with_the_schedule_or_its_policy(
    client: Client, rows: Connection, change: dict[str, Any]
) -> None:
    schedule = (await make(client, overlap="buffer_one"))["id"]
    for ago in (20, 1):
        await due(rows, schedule, timedelta(seconds=ago))
        await schedules.fire_due(rows, TEMPLATES, KEEP)
    (run,) = await runs_of(rows, schedule)
    for kept in ({"cron": "0 9 * * *"}, change):
        assert await rows.fetchval("SELECT buffered_at IS NOT NULL FROM schedule")
        assert (await client.http.patch(f"/v1/schedules/{schedule}", json=kept)).status_code == 200
    await client.post(f"/v1/runs/{run['job_id']}/cancel")
    await schedules.fire_due(rows, TEMPLATES, KEEP)
    assert len(await runs_of(rows, schedule)) == 1


@pytest.mark.parametrize(("change", "is_kept"), [
    ({"enabled": True, "cron": "0 0 1 1 *", "timezone": "UTC", "overlap": "skip"}, True), ({"tags": {"a": "b"}}, True),
    ({"cron": "0 0 2 1 *"}, False), ({"timezone": "Asia/Taipei"}, False),
])  # fmt: skip
async def test_a_change_that_changes_no_time_keeps_a_tick_that_is_due(
    client: Client, rows: Connection, change: dict[str, Any], is_kept: bool
) -> None:
    """As a client that sends the whole schedule each time."""
    schedule = (await make(client))["id"]
    await due(rows, schedule)
    assert (await client.http.patch(f"/v1/schedules/{schedule}", json=change)).status_code == 200
    await schedules.fire_due(rows, TEMPLATES, KEEP)
    assert len(await runs_of(rows, schedule)) == is_kept
    assert await rows.fetchval("SELECT next_run_at > clock_timestamp() FROM schedule")


async def test_a_schedule_that_is_paused_and_resumed_skips_the_tick_that_was_due(
    client: Client, rows: Connection
) -> None:
    schedule = (await make(client))["id"]
    await due(rows, schedule)
    for enabled in (False, True):
        changed = await client.http.patch(f"/v1/schedules/{schedule}", json={"enabled": enabled})
        assert len(changed.json()["next_runs"]) == (5 if enabled else 0)
        await schedules.fire_due(rows, TEMPLATES, KEEP)
    assert await runs_of(rows, schedule) == []


NOW = utc("2026-06-01 12:00:00")


def ticks_of(
    catch_up: str, window: float, *, first: float, cron: str = "* * * * *", now: datetime = NOW
) -> list[float]:
    """The ticks that become runs at `now`, the first one due so many seconds ago. In seconds ago."""
    row = {"now": now, "catch_up": catch_up, "catch_up_seconds": window, "cron": cron, "timezone": "UTC",
           "next_run_at": now - timedelta(seconds=first)}  # fmt: skip
    found, has_more = schedules._ticks_to_run(row)
    assert not has_more
    return [(now - tick).total_seconds() for tick in found]


ON_TIME_OF_MINUTE: list[float] = [60, 0]


@pytest.mark.parametrize(("catch_up", "wanted"), [
    ("skip", ON_TIME_OF_MINUTE), ("one", ON_TIME_OF_MINUTE), ("all", [180, 120, *ON_TIME_OF_MINUTE]),
])  # fmt: skip
@pytest.mark.parametrize("first", [181, 240, 600, 366 * 86_400])
def test_ticks_on_time_all_run_and_of_the_missed_ones_what_the_policy_says(
    catch_up: str, wanted: list[float], first: float
) -> None:
    """A tick of a minute ago is on time; one older than the window is not caught up, however many of them there are."""
    assert ticks_of(catch_up, 180, first=first) == wanted


@pytest.mark.parametrize(("catch_up", "window"), [("skip", 180), ("all", 0), ("all", 60)])
def test_a_tick_is_on_time_for_sixty_seconds_and_not_for_a_microsecond_longer(catch_up: str, window: float) -> None:
    assert ticks_of(catch_up, window, first=600) == [60, 0]
    assert ticks_of(catch_up, window, first=600, now=NOW + timedelta(microseconds=1)) == [0.000001]


def test_a_first_tick_that_is_due_and_that_the_expression_no_longer_names_runs_by_the_same_rules() -> None:
    for catch_up, first, wanted in (("skip", 60, [60, 0]), ("skip", 61, [60, 0]), ("all", 61, [61, 60, 0])):
        assert ticks_of(catch_up, 3600, first=first) == wanted
    for first, wanted in ((61, [61]), (600, [600]), (601, [])):
        assert ticks_of("one", 600, first=first, cron="30 0 * * *") == wanted


@pytest.mark.parametrize("first", [7200, 7260, 366 * 86_400])
def test_of_more_ticks_than_one_firing_takes_none_is_left_out_also_where_older_ones_are_not_caught_up(
    first: float,
) -> None:
    row = {"now": NOW, "catch_up": "all", "catch_up_seconds": 7200, "cron": "* * * * *", "timezone": "UTC",
           "next_run_at": NOW - timedelta(seconds=first)}  # fmt: skip
    made, firings, has_more = [], 0, True
    while has_more:
        ticks, has_more = schedules._ticks_to_run(row)
        made += [(NOW - tick).total_seconds() for tick in ticks]
        row["next_run_at"] = cron.next_after("* * * * *", "UTC", ticks[-1])
        firings += 1
    assert made == [60.0 * minutes for minutes in range(120, -1, -1)]
    assert firings == 2


@pytest.mark.parametrize(("window", "wanted"), [(1799, []), (1800, [1800]), (86_400, [1800])])
@pytest.mark.parametrize("first", [1800, 5400, 365 * 86_400 + 1800])
def test_of_ticks_that_are_all_missed_one_catches_up_the_latest_if_it_is_in_the_window(
    first: float, window: float, wanted: list[float]
) -> None:
    assert ticks_of("one", window, first=first, cron="30 * * * *") == wanted
    assert ticks_of("skip", window, first=first, cron="30 * * * *") == []


def test_a_window_of_nothing_catches_nothing_up() -> None:
    assert ticks_of("all", 0, first=120) == [60, 0]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Australia/Lord_Howe"])
@pytest.mark.parametrize("expression", ["* * * * *", "*/7 1-3 * * *", "30 2 * * *", "15 2 29 2 *", "0 0 1 1 *"])
def test_the_latest_tick_of_a_time_is_the_last_one_of_all_its_ticks(expression: str, zone: str) -> None:
    """Also where the clock is put forward or back, and at both ends of the time."""
    for middle in ("2026-03-29 01:00:00", "2026-10-25 01:00:00", "2026-04-04 15:00:00", "2026-10-03 15:30:00"):
        for seconds in (-5400, -61, -60, -1, 0, 1, 1800, 3600, 5400):
            until = utc(middle) + timedelta(seconds=seconds)
            for length in (timedelta(0), timedelta(seconds=60), timedelta(hours=5)):
                all_ticks = cron.between(expression, zone, until - length, until, 1000)
                assert cron.latest(expression, zone, until - length, until) == (all_ticks[-1] if all_ticks else None)


def test_the_latest_tick_is_found_without_going_through_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0

    def counting(*arguments: Any) -> Any:
        nonlocal read
        for instant in instants_of(*arguments):
            read += 1
            yield instant

    instants_of = cron._instants
    monkeypatch.setattr(cron, "_instants", counting)
    found = cron.latest("* * * 1 *", "UTC", NOW - timedelta(days=3650), NOW)
    assert found == utc("2026-01-31 23:59:00")
    assert read < 200


@pytest.mark.parametrize("catch_up", ["skip", "one", "all"])
async def test_after_a_year_of_downtime_the_first_firing_starts_the_ticks_on_time(
    client: Client, rows: Connection, catch_up: str
) -> None:
    """Half a million missed ticks, of which the policy allows none, or those of a minute more."""
    body = {"cron": "* * * * *", "catch_up": catch_up, "catch_up_seconds": 120, "overlap": "allow_all"}
    schedule = (await make(client, **body))["id"]
    now: datetime = await rows.fetchval("SELECT clock_timestamp()")
    first = now.replace(second=0, microsecond=0) - timedelta(days=365)
    await rows.execute("UPDATE schedule SET next_run_at = $2 WHERE id = $1", UUID(schedule), first)
    await schedules.fire_due(rows, TEMPLATES, KEEP)
    ticks = [row["tick"] for row in await runs_of(rows, schedule)]
    next_tick = await rows.fetchval("SELECT next_run_at FROM schedule WHERE id = $1", UUID(schedule))
    assert next_tick - ticks[-1] == timedelta(minutes=1)
    assert next_tick > now
    assert len(ticks) in ((2, 3) if catch_up == "all" else (1, 2))


@pytest.mark.parametrize(("catch_up", "made"), [("skip", []), ("one", [0.5]), ("all", [3.5, 2.5, 1.5, 0.5])])
async def test_missed_ticks_are_caught_up_as_the_policy_says(
    client: Client, rows: Connection, catch_up: str, made: list[float]
) -> None:
    """Ticks half an hour from now on both sides: none is on time, whenever this runs. In hours ago."""
    now = datetime.now(UTC)
    minute = (now + timedelta(minutes=30)).replace(second=0, microsecond=0)
    body = {"cron": f"{minute.minute} * * * *", "catch_up": catch_up, "catch_up_seconds": 4 * 3600}
    schedule = (await make(client, **body, overlap="allow_all"))["id"]
    first = minute - timedelta(hours=10)
    await rows.execute("UPDATE schedule SET next_run_at = $2 WHERE id = $1", UUID(schedule), first)
    await schedules.fire_due(rows, TEMPLATES, KEEP)
    ticks = [row["tick"] for row in await runs_of(rows, schedule)]
    assert [(minute - tick) / timedelta(hours=1) - 0.5 for tick in ticks] == made
    assert await rows.fetchval("SELECT next_run_at FROM schedule WHERE id = $1", UUID(schedule)) == minute


async def test_more_missed_ticks_than_one_firing_takes_are_made_by_the_next_ones_and_none_twice(
    client: Client, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "MAX_TICKS", 3)
    now = datetime.now(UTC)
    minute = (now + timedelta(minutes=30)).replace(second=0, microsecond=0)
    body = {"cron": f"{minute.minute} * * * *", "catch_up": "all", "catch_up_seconds": 86_400}
    schedule = (await make(client, **body, overlap="allow_all"))["id"]
    missed = [minute - timedelta(hours=n) for n in range(10, 0, -1)]
    await rows.execute("UPDATE schedule SET next_run_at = $2 WHERE id = $1", UUID(schedule), missed[0])
    counts = []
    for _ in range(4):
        await schedules.fire_due(rows, TEMPLATES, KEEP)
        counts.append(len(await runs_of(rows, schedule)))
    assert counts == [4, 8, 10, 10]
    assert [row["tick"] for row in await runs_of(rows, schedule)] == missed


async def test_a_schedule_whose_runs_keep_failing_pauses_itself(client: Client, rows: Connection) -> None:
    schedule = (await make(client, pause_after_failures=2, overlap="allow_all"))["id"]
    for ago in (40, 20, 1):
        await due(rows, schedule, timedelta(seconds=ago))
        await schedules.fire_due(rows, TEMPLATES, KEEP)
        await rows.execute(
            "UPDATE job SET status = 'failed', error = '{}', finished_at = clock_timestamp() WHERE finished_at IS NULL"
        )
    said = (await client.http.get(f"/v1/schedules/{schedule}")).json()
    assert (said["enabled"], said["next_run_at"]) == (False, None)
    assert "2 runs failed" in said["paused_because"]
    assert len(await runs_of(rows, schedule)) == 2
    resumed = (await client.http.patch(f"/v1/schedules/{schedule}", json={"enabled": True})).json()
    assert (resumed["paused_because"], len(resumed["next_runs"])) == (None, 5)


async def test_a_schedule_that_fires_seldom_pauses_itself_too_although_retention_is_shorter_than_its_pauses(
    client: Client, rows: Connection
) -> None:
    schedule = (await make(client, cron="0 0 1 * *", pause_after_failures=2))["id"]
    for made in (1, 2, 2):
        await due(rows, schedule)
        await schedules.fire_due(rows, TEMPLATES, KEEP)
        assert len(await runs_of(rows, schedule)) == made
        await rows.execute(
            "UPDATE job SET status = 'failed', error = '{}', finished_at = clock_timestamp(),"
            " expires_at = clock_timestamp() + make_interval(secs => keep_seconds) WHERE finished_at IS NULL"
        )
        await let_pass(rows, timedelta(days=29))
        await sweeps.forget_jobs(rows, [job.job_id for job in await sweeps.forgettable_jobs(rows)])
    assert "2 runs failed" in (await client.http.get(f"/v1/schedules/{schedule}")).json()["paused_because"]


@pytest.mark.parametrize(("expression", "failures", "days"), [
    ("0 * * * *", 3, 1), ("0 0 * * *", 3, 4), ("0 0 1 1 *", 2, 3 * 365.25), ("0 0 29 2 *", 100, 3650),
    ("0 0 29 2 *", 2, 3650),  # ten years have only two of its ticks
    ("0 0 * * *", None, 1), ("no longer valid", 3, 1),
])  # fmt: skip
async def test_a_run_is_kept_until_its_schedule_has_counted_it_and_one_tick_longer_but_not_for_ever(
    client: Client, rows: Connection, expression: str, failures: int | None, days: float
) -> None:
    """Without retention, which is a day here."""
    schedule = (await make(client, pause_after_failures=failures))["id"]
    await rows.execute("UPDATE schedule SET cron = $1", expression)
    row = await rows.fetchrow("SELECT *, timestamptz '2026-01-01 00:00Z' AS now FROM schedule")
    prepared = await schedules._prepare(rows, TEMPLATES, row, None)
    assert not isinstance(prepared, schedules._ToCheck)
    assert await schedules.submit_now(rows, prepared, row, None, KEEP) is not None, schedule
    kept = timedelta(seconds=await rows.fetchval("SELECT keep_seconds FROM job"))
    assert abs(kept - timedelta(days=days)) <= timedelta(days=1) * (expression == "0 0 1 1 *")


@pytest.mark.parametrize("hours", [-2, 2])
async def test_the_next_tick_is_the_next_by_the_clock_of_the_database(
    client: Client, rows: Connection, hours: int
) -> None:
    async def seconds_to_tick(schedule: str) -> float:
        seconds: float = await rows.fetchval(
            "SELECT extract(epoch FROM next_run_at - clock_timestamp())::float8 FROM schedule WHERE id = $1",
            UUID(schedule),
        )
        return seconds

    with time_machine.travel(datetime.now(UTC) + timedelta(hours=hours), tick=True):  # an API whose clock is wrong
        schedule = (await make(client, cron="0 * * * *"))["id"]
        assert 0 < await seconds_to_tick(schedule) <= 3600
        changed = await client.http.patch(f"/v1/schedules/{schedule}", json={"cron": "30 * * * *"})
        assert changed.status_code == 200
        assert 0 < await seconds_to_tick(schedule) <= 3600


async def test_a_past_range_is_filled_in_once(client: Client, rows: Connection) -> None:
    schedule = (await make(client, cron="0 * * * *"))["id"]
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    asked = {"start": (hour - timedelta(hours=5)).isoformat(), "end": hour.isoformat()}
    preview = await client.post(f"/v1/schedules/{schedule}/backfill", **asked, dry_run=True)
    assert (preview.status_code, preview.json()["ticks"]) == (200, len(preview.json()["without_run"]))
    wrong = {"Idempotency-Key": "x" * 256}
    refused = await client.http.post(
        f"/v1/schedules/{schedule}/backfill", json=asked | {"dry_run": True}, headers=wrong
    )
    problem(refused, 422, "idempotency_key_malformed")
    first = await client.post(f"/v1/schedules/{schedule}/backfill", **asked)
    assert len(first.json()["runs"]) == preview.json()["ticks"]
    preview = await client.post(f"/v1/schedules/{schedule}/backfill", **asked, dry_run=True)
    assert preview.json() == {"ticks": first.json()["ticks"], "without_run": []}
    assert (first.json()["ticks"], len(first.json()["runs"])) == (5, 5)
    assert (await client.post(f"/v1/schedules/{schedule}/backfill", **asked)).json()["runs"] == []
    far = {"start": (hour - timedelta(days=30)).isoformat(), "end": hour.isoformat()}
    problem(await client.post(f"/v1/schedules/{schedule}/backfill", **far), 422, "range_too_long")
    ahead = {"start": hour.isoformat(), "end": (hour + timedelta(days=1)).isoformat()}
    problem(await client.post(f"/v1/schedules/{schedule}/backfill", **ahead), 422, "range_not_past")


async def test_a_range_that_ends_before_it_starts_is_refused_and_an_empty_one_is_not(client: Client) -> None:
    schedule = (await make(client, cron="0 * * * *"))["id"]
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=3)
    span = {"start": hour.isoformat(), "end": (hour - timedelta(microseconds=1)).isoformat()}
    for more in ({}, {"dry_run": True}):
        problem(await client.post(f"/v1/schedules/{schedule}/backfill", **span, **more), 422, "range_reversed")
    empty = await client.post(f"/v1/schedules/{schedule}/backfill", start=hour.isoformat(), end=hour.isoformat())
    assert (empty.status_code, empty.json()) == (202, {"ticks": 0, "runs": []})


async def test_a_repeated_act_on_a_schedule_gets_the_first_answer_whatever_has_changed(
    client: Client, rows: Connection
) -> None:
    """The schedule may be gone. Without a stored answer the request is judged as it is now."""
    schedule = (await make(client, cron="0 * * * *", enabled=False))["id"]
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    span = {"start": (hour - timedelta(hours=2)).isoformat(), "end": hour.isoformat()}
    acts = {"run-now": None, "backfill": span}

    async def act(name: str) -> httpx2.Response:
        headers = {"Idempotency-Key": name}
        return await client.http.post(f"/v1/schedules/{schedule}/{name}", json=acts[name], headers=headers)

    first = {name: await act(name) for name in acts}
    assert {name: answer.status_code for name, answer in first.items()} == dict.fromkeys(acts, 202)
    assert (await client.http.delete(f"/v1/schedules/{schedule}")).status_code == 204
    count = await rows.fetchval("SELECT count(*) FROM job")
    for name, answer in first.items():
        again = await act(name)
        assert (again.status_code, again.json()) == (202, answer.json()), name
    assert await rows.fetchval("SELECT count(*) FROM job") == count
    await rows.execute("DELETE FROM idempotency")
    for name in acts:
        problem(await act(name), 404, "schedule_not_found")


async def test_a_schedule_says_when_it_last_ran_however_that_came_about(client: Client, rows: Connection) -> None:
    """By its tick, by hand, or late because the run before it was under way; and then it has no error."""
    schedule = (await make(client, overlap="buffer_one"))["id"]
    path = f"/v1/schedules/{schedule}"
    assert (await client.http.get(path)).json()["last_run_at"] is None
    await rows.execute("""UPDATE schedule SET last_error = '{"code": "of old"}', failures = 2""")
    run = (await client.post(f"{path}/run-now")).json()["id"]
    by_hand = (await client.http.get(path)).json()
    assert by_hand["last_run_at"] is not None
    assert (by_hand["last_error"], by_hand["failures"]) == (None, 0)
    await due(rows, schedule)
    await schedules.fire_due(rows, TEMPLATES, KEEP)
    assert (await client.http.get(path)).json()["last_run_at"] == by_hand["last_run_at"]  # it waits
    await client.post(f"/v1/runs/{run}/cancel")
    await rows.execute("UPDATE schedule SET last_run_at = '2026-01-01 00:00+00'")
    await schedules.fire_due(rows, TEMPLATES, KEEP)
    (tick,) = [row["tick"] for row in await runs_of(rows, schedule) if row["tick"] is not None]
    assert datetime.fromisoformat((await client.http.get(path)).json()["last_run_at"]) == tick


async def test_a_schedule_can_be_run_by_hand_changed_and_deleted_by_its_tenant_only(
    client: Client, stranger: Client
) -> None:
    schedule = (await make(client, cron="0 9 * * *", enabled=False))["id"]
    run = (await client.post(f"/v1/schedules/{schedule}/run-now")).json()["id"]
    assert (await client.look(run))["schedule_id"] == schedule
    problem(await stranger.http.get(f"/v1/schedules/{schedule}"), 404, "schedule_not_found")
    problem(await stranger.http.delete(f"/v1/schedules/{schedule}"), 404, "schedule_not_found")
    wrong = await client.http.patch(f"/v1/schedules/{schedule}", json={"cron": "nonsense"})
    problem(wrong, 422, "invalid_cron")
    assert (await client.http.delete(f"/v1/schedules/{schedule}")).status_code == 204
    problem(await client.http.get(f"/v1/schedules/{schedule}"), 404, "schedule_not_found")


async def test_what_a_client_does_to_a_schedule_it_does_to_no_other(
    client: Client, stranger: Client, rows: Connection
) -> None:
    tenants = (client, client, client, stranger)
    schedule = [(await make(whose, cron="0 * * * *", enabled=False))["id"] for whose in tenants][1]
    others = "SELECT to_jsonb(s)::text FROM schedule s WHERE id <> $1 ORDER BY id"
    before = await rows.fetch(others, UUID(schedule))
    path = f"/v1/schedules/{schedule}"
    changed = await client.http.patch(path, json={"cron": "30 * * * *", "enabled": True, "tags": {"a": "b"}})
    assert (changed.json()["id"], changed.json()["cron"]) == (schedule, "30 * * * *")
    assert (await client.http.get(path)).json() == changed.json()
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    span = {"start": (hour - timedelta(hours=2)).isoformat(), "end": hour.isoformat()}
    for act, body, started in (("run-now", {}, 1), ("backfill", span, 3)):
        assert (await client.post(f"{path}/{act}", **body)).status_code == 202
        assert len(await runs_of(rows, schedule)) == await rows.fetchval("SELECT count(*) FROM run") == started
    assert (await client.http.delete(path)).status_code == 204
    assert len(before) == 3
    assert await rows.fetch(others, UUID(schedule)) == before


async def test_the_list_has_each_schedule_of_the_tenant_once_by_pages(client: Client, stranger: Client) -> None:
    made = [(await make(client))["id"] for _ in range(5)]
    await make(stranger)
    pages = []
    cursor: dict[str, Any] = {}
    while True:
        page = (await client.http.get("/v1/schedules", params={"limit": 2} | cursor)).json()
        pages.append([schedule["id"] for schedule in page["schedules"]])
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert pages == [made[:2:-1], made[2:0:-1], made[:1]]


async def test_of_two_changes_at_once_each_is_kept(client: Client, rows: Connection) -> None:
    path = f"/v1/schedules/{(await make(client))['id']}"
    async with rows.transaction():
        await rows.execute("SELECT FROM schedule FOR UPDATE")
        changes = [
            asyncio.create_task(client.http.patch(path, json=body))
            for body in ({"cron": "1 2 3 4 *"}, {"tags": {"a": "b"}})
        ]
        await until_waiting(rows, 2)
    assert [(await change).status_code for change in changes] == [200, 200]
    schedule = (await client.http.get(path)).json()
    assert (schedule["cron"], schedule["tags"]) == ("1 2 3 4 *", {"a": "b"})


async def test_of_two_deletions_at_once_one_deletes_and_the_other_finds_nothing(
    client: Client, rows: Connection
) -> None:
    path = f"/v1/schedules/{(await make(client))['id']}"
    async with rows.transaction():
        await rows.execute("SELECT FROM schedule FOR UPDATE")
        deletions = [asyncio.create_task(client.http.delete(path)) for _ in range(2)]
        await until_waiting(rows, 2)
    assert sorted([(await deletion).status_code for deletion in deletions]) == [204, 404]
    assert await rows.fetchval("SELECT count(*) FROM audit WHERE action = 'schedule.deleted'") == 1


@pytest.mark.parametrize("act", ["run-now", "backfill"])
async def test_an_act_on_a_schedule_locks_it_before_the_rates(
    runs_settings: Settings, rows: Connection, act: str
) -> None:
    """As a firing does. If the act locked the rates first, the two could wait for each other."""
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=SCOPES)
    limited = runs_settings.model_copy(update={"submissions_per_tenant": 60})
    async with serving(limited) as running, client_of(running.url, key.text) as http:
        path = f"/v1/schedules/{(await make(Client(http), cron='0 9 * * *'))['id']}"
        now = datetime.now(UTC)
        span = {"start": (now - timedelta(days=2)).isoformat(), "end": now.isoformat()}
        assert (await http.post(f"{path}/run-now")).status_code == 202  # from now on the rate has a row
        async with rows.transaction():
            await rows.execute("SELECT FROM schedule FOR UPDATE")
            acting = asyncio.create_task(http.post(f"{path}/{act}", json=span if act == "backfill" else None))
            await until_waiting(rows)
            assert len(await rows.fetch("SELECT FROM rate_bucket FOR UPDATE NOWAIT")) == 1
        assert (await acting).status_code == 202


async def test_a_run_by_hand_whose_payload_cannot_be_checked_now_is_no_fault_of_the_schedule(
    running: Running, client: Client
) -> None:
    schema = {"properties": {"a": {"pattern": "^[a-z]+$"}}}
    body = {"type": "checked", "steps": [{"id": "only", "queue": "q"}], "payload_schema": schema}
    assert (await client.post("/v1/templates", **body)).status_code == 201
    schedule = (await make(client, template="checked", payload_template={"a": "b"}))["id"]
    past = {"start": "2026-01-01T00:00:00Z", "end": "2026-01-02T00:00:00Z"}
    evaluator = running.services.templates._evaluator
    evaluator._tenants["acme"].open_questions += running.services.settings.evaluations_waiting
    for verb, said in (("run-now", {}), ("backfill", past)):
        answer = await client.post(f"/v1/schedules/{schedule}/{verb}", **said)
        problem(answer, 429, "evaluations_waiting")
        assert {"retry-after", "ratelimit", "ratelimit-policy"} <= answer.headers.keys()
    shown = (await client.http.get(f"/v1/schedules/{schedule}")).json()
    assert (shown["last_error"], shown["failures"]) == (None, 0)
    evaluator._tenants.clear()
    assert (await client.post(f"/v1/schedules/{schedule}/run-now")).status_code == 202


async def test_of_a_backfill_whose_template_lets_one_run_at_a_time_one_tick_runs_and_the_schedule_says_why(
    client: Client, rows: Connection
) -> None:
    steps = [{"id": "only", "queue": "q"}]
    answer = await client.post("/v1/templates", type="alone", steps=steps, concurrency_policy="reject_same_scope")
    assert answer.status_code == 201, answer.text
    path = f"/v1/schedules/{(await make(client, template='alone', cron='0 * * * *'))['id']}"
    end = datetime.now(UTC) - timedelta(days=1)
    answer = await client.post(f"{path}/backfill", start=(end - timedelta(hours=5)).isoformat(), end=end.isoformat())
    assert (answer.status_code, len(answer.json()["runs"])) == (202, 1), answer.text
    assert answer.json()["ticks"] >= 5
    assert (await client.http.get(path)).json()["last_error"]["code"] == "same_scope_running"


async def test_a_firing_that_cancels_locks_the_rates_first_as_every_submission_does(
    client: Client, rows: Connection, settings: Settings
) -> None:
    made = await make(client, overlap="cancel_other")
    run = UUID((await client.post(f"/v1/schedules/{made['id']}/run-now")).json()["id"])
    await due(rows, made["id"])
    # There is room for the submission and for one run of the firing, which is charged once.
    admission = Admission(settings.model_copy(update={"submissions_per_tenant": 2}), SHIPPED)
    scheduler = await connect(settings, "scheduler")
    async with rows.transaction():
        await admission.charge(rows, Payer("acme"))  # as the submission of a run that replaces others begins
        firing = asyncio.create_task(schedules.fire_due(scheduler, TEMPLATES, KEEP, admission=admission))
        await until_waiting(rows)
        # The submission goes on with the run that it replaces. If the firing held it, each would wait for the other.
        await rows.execute("SELECT FROM job WHERE id = $1 FOR UPDATE NOWAIT", run)
    assert len((await firing)[0]) == 1
    await scheduler.close()
    states = {row["job_id"]: row["status"] for row in await runs_of(rows, made["id"])}
    assert (states.pop(run), len(states)) == ("cancelled", 1)


async def test_a_schedule_that_is_deleted_after_its_firing_failed_stops_no_other(
    client: Client, rows: Connection, settings: Settings
) -> None:
    schedule = UUID((await make(client))["id"])

    async def fail() -> None:
        await rows.execute("DELETE FROM schedule")
        raise Invalid("broken", "It cannot be fired.")

    worker = await connect(settings, "worker")
    on_failure = partial(schedules._record_failure, worker, schedule, 1)
    await run_unit(worker, schedules.DUTY, schedule, fail, on_failure)
    await worker.close()


async def test_a_change_locks_the_quarantine_first_as_a_firing_that_fails_does(
    client: Client, rows: Connection, settings: Settings
) -> None:
    """Otherwise each would wait for the other: the change would hold the schedule, and the firing its quarantine."""
    schedule = (await make(client))["id"]
    worker = await connect(settings, "worker")

    async def fail() -> None:
        raise Invalid("broken", "It cannot be fired.")

    async def change_meanwhile(error: Exception, failures: int) -> None:
        changing.append(asyncio.create_task(client.http.patch(f"/v1/schedules/{schedule}", json={"catch_up": "one"})))
        await until_waiting(rows)
        await worker.execute("SELECT FROM schedule WHERE id = $1 FOR UPDATE NOWAIT", UUID(schedule))
        await schedules._record_failure(worker, UUID(schedule), 5, error, failures)

    changing: list[asyncio.Task[httpx2.Response]] = []
    await run_unit(worker, schedules.DUTY, UUID(schedule), fail)
    await run_unit(worker, schedules.DUTY, UUID(schedule), fail, change_meanwhile)
    await worker.close()
    assert (await changing[0]).json()["failures"] == 0
    assert await rows.fetchval("SELECT count(*) FROM quarantine") == 0


async def test_a_firing_that_cancels_locks_the_limits_first_as_every_admission_does(
    client: Client, rows: Connection, settings: Settings
) -> None:
    await client.http.put("/v1/limits", json={"tenant_id": "acme", "key": "template:scripted", "at_most": 1})
    made = await make(client, overlap="cancel_other")
    run = UUID((await client.post(f"/v1/schedules/{made['id']}/run-now")).json()["id"])
    await due(rows, made["id"])
    scheduler = await connect(settings, "scheduler")
    async with rows.transaction():
        await rooms_of(rows, await concurrency.limits_of(rows, [run]), None)  # as an admission of the run begins
        firing = asyncio.create_task(schedules.fire_due(scheduler, TEMPLATES, KEEP))
        await until_waiting(rows)
        # The admission goes on with the run. If the firing held it, each would wait for the other.
        await rows.execute("SELECT FROM job WHERE id = $1 FOR UPDATE NOWAIT", run)
    assert len((await firing)[0]) == 1
    await scheduler.close()
    states = {row["job_id"]: row["status"] for row in await runs_of(rows, made["id"])}
    assert (states.pop(run), len(states)) == ("cancelled", 1)


async def test_a_tick_that_a_backfill_has_made_cancels_nothing_when_it_is_due(client: Client, rows: Connection) -> None:
    made = await make(client, overlap="cancel_other")
    await due(rows, made["id"])
    run = (await client.post(f"/v1/schedules/{made['id']}/run-now")).json()["id"]
    await rows.execute(
        "UPDATE run SET tick = next_run_at FROM schedule WHERE job_id = $1 AND schedule.id = schedule_id", UUID(run)
    )
    assert await schedules.fire_due(rows, TEMPLATES, KEEP) == ([], False)
    assert (await client.look(run))["status"] in ("pending", "queued")


async def test_runs_carry_the_tags_of_their_schedule_and_reruns_those_of_their_run(
    client: Client, rows: Connection
) -> None:
    made = await make(client, tags={"customer": "7"})
    assert made["tags"] == {"customer": "7"}
    await due(rows, made["id"])
    await schedules.fire_due(rows, TEMPLATES, KEEP)
    ((ticked, *_),) = await runs_of(rows, made["id"])
    path = f"/v1/schedules/{made['id']}"
    changed = await client.http.patch(path, json={"tags": {"customer": "8", "plan": "gold"}})
    assert changed.json()["tags"] == (await client.http.get(path)).json()["tags"] == {"customer": "8", "plan": "gold"}
    await client.http.patch(path, json={"enabled": False})
    by_hand = (await client.post(f"{path}/run-now")).json()["id"]
    again = (await client.post(f"/v1/runs/{by_hand}/rerun")).json()["id"]
    tags = {
        str(row["job_id"]): row["tags"]
        for row in await rows.fetch("SELECT job_id, jsonb_object_agg(name, value) AS tags FROM job_tag GROUP BY job_id")
    }
    gold = {"customer": "8", "plan": "gold"}
    assert tags == {str(ticked): {"customer": "7"}, by_hand: gold, again: gold}
    for name in ("A", "celery_task_id"):
        problem(await client.http.patch(path, json={"tags": {name: "x"}}), 422, "invalid_request")
    problem(await client.http.patch(path, json={"tags": None}), 422, "invalid_request")
