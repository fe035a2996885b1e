"""Batches, backfills and bulk replays of one tenant leave connections, the event loop and hints to everybody else."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import FrameType
from typing import Any

import asyncpg
import httpx2
import pytest

from leasehold.api.process.tenant_pool import BulkWrites
from leasehold.api.process.turnstile import Turnstile
from leasehold.broker.announcer import WaitingAnnouncements
from leasehold.broker.base import Hint
from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection, connect, lock_name
from leasehold.db.pool_sizes import pool_of_api
from leasehold.domain.errors import Conflict
from leasehold.domain.ids import new_id
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.transitions import claims, jobs
from leasehold.transitions.jobs import NewJob
from tests.api.conftest import client_of
from tests.api.media_api import problem
from tests.factories import ONE, Rows
from tests.security.test_limits import SCOPES, TENANT, World, _past, world
from tests.support.lock_waits import until_waiting

#: Small enough to be counted exactly, under a lock of the tenant: whoever holds that lock stops the tenant's writing.
BOUND = 5000
PATIENCE = 60.0
#: As many as an API process has connections, and more.
FLOOD = 12


Ask = Callable[[], Coroutine[Any, Any, httpx2.Response]]


async def batch(acme: World) -> Ask:
    return lambda: acme.post("/v1/runs/batch", template="outside", runs=[{}] * 3)


async def replay(acme: World) -> Ask:
    await acme.failed(2)
    return lambda: acme.post("/v1/dead-letters/replay", template="outside")


async def run(acme: World) -> Ask:
    return lambda: acme.post("/v1/runs", template="outside")


async def run_now(acme: World) -> Ask:
    schedule = await acme.schedule()
    return lambda: acme.post(f"/v1/schedules/{schedule}/run-now")


async def backfill(acme: World) -> Ask:
    schedule = await acme.schedule()
    return lambda: acme.post(f"/v1/schedules/{schedule}/backfill", **_past(3))


async def backfills(acme: World) -> Ask:
    schedules = [await acme.schedule() for _ in range(FLOOD)]
    return lambda: acme.post(f"/v1/schedules/{schedules.pop()}/backfill", **_past(3))


WAYS = {one.__name__: one for one in (batch, replay, run, run_now, backfill, backfills)}


@asynccontextmanager
async def stopped(settings: Settings) -> AsyncIterator[None]:
    """What the tenant writes waits for the end of this, with its connection in hand."""
    connection = await connect(settings, "test")
    try:
        async with connection.transaction():
            await lock_name(connection, f"unfinished {TENANT}")
            yield
    finally:
        await connection.close()


@pytest.mark.parametrize("way", WAYS)
async def test_requests_of_a_tenant_that_hang_in_the_database_leave_connections_to_others(
    settings: Settings, rows: Connection, way: str
) -> None:
    patient = settings.model_copy(update={"database_timeout": 3 * PATIENCE})
    key = await create_key(rows, tenant_id="newcomer", client_id="t", scopes=SCOPES)
    async with world(patient, rows, unfinished_per_tenant=BOUND) as acme:
        ask = await WAYS[way](acme)
        async with client_of(str(acme.http.base_url), key.text) as http, stopped(settings):
            flood = [asyncio.create_task(ask()) for _ in range(FLOOD)]
            await until_waiting(rows, kind="advisory")
            async with asyncio.timeout(PATIENCE):
                assert (await http.get("/v1/runs")).status_code == 200
                mine = {"type": "mine", "steps": [{"id": "a", "queue": "q"}]}
                assert (await http.post("/v1/templates", json=mine)).status_code == 201
                assert (await http.post("/v1/runs", json={"template": "mine"})).status_code == 202
                assert (await http.post("/v1/runs/batch", json={"template": "mine", "runs": [{}]})).status_code == 202
        assert {answer.status_code for answer in await asyncio.gather(*flood)} <= {202, 409, 429, 503}


async def test_more_bulk_writes_of_a_tenant_than_may_wait_are_told_to_come_again(
    settings: Settings, rows: Connection
) -> None:
    patient = settings.model_copy(update={"database_timeout": PATIENCE})
    async with world(
        patient, rows, unfinished_per_tenant=BOUND, bulk_writes_waiting=1, bulk_writes_per_tenant=1
    ) as acme:
        ask = await batch(acme)
        async with stopped(settings):
            first = asyncio.create_task(ask())
            await until_waiting(rows, kind="advisory")
            others = [asyncio.create_task(ask()) for _ in range(3)]  # whichever comes first waits, the two others go
            async with asyncio.timeout(PATIENCE):
                while sum(one.done() for one in others) < 2:
                    await asyncio.sleep(0.02)
        answers = sorted(await asyncio.gather(*others), key=lambda answer: answer.status_code)
        assert [answer.status_code for answer in answers] == [202, 429, 429]
        for refused in answers[1:]:
            problem(refused, 429, "bulk_writes_waiting")
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["ratelimit-policy"] == '"bulk-writes";q=1'
        assert (await first).status_code == 202


async def test_a_bulk_write_that_gets_no_turn_in_the_time_that_the_installation_says_is_told_to_come_again(
    settings: Settings, rows: Connection
) -> None:
    patient = settings.model_copy(update={"database_timeout": PATIENCE})
    async with world(
        patient, rows, unfinished_per_tenant=BOUND, bulk_writes_per_tenant=1, bulk_writes_wait_seconds=0.05
    ) as acme:
        ask = await batch(acme)
        async with stopped(settings):
            first = asyncio.create_task(ask())
            await until_waiting(rows, kind="advisory")
            async with asyncio.timeout(PATIENCE / 2):
                problem(await ask(), 429, "bulk_writes_waiting")
        assert (await first).status_code == 202


# --- the event loop


async def longest_turn(work: Callable[[], Awaitable[object]]) -> int:
    """The most functions that anything called in the event loop without letting others in, while `work` was done.

    They are counted, for the time of a turn is that of the garbage collector too.
    """
    longest = calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    async def watch() -> None:
        nonlocal longest, calls
        while True:
            calls = 0
            await asyncio.sleep(0)
            longest = max(longest, calls)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    sys.setprofile(count)
    try:
        await work()
    finally:
        sys.setprofile(None)
        watching.cancel()
    return longest


@pytest.mark.parametrize("steps", [1, 20])
async def test_a_thousand_tasks_keep_the_event_loop_no_longer_than_a_hundred(
    settings: Settings, rows: Connection, steps: int
) -> None:
    async with world(settings, rows) as acme:
        await acme.post("/v1/templates", type="many", steps=[{"id": f"s{n}", "queue": "q"} for n in range(steps)])

        async def start(tasks: int) -> None:
            runs = [{"payload": {"n": 1}}] * (tasks // steps)
            answer = await acme.post("/v1/runs/batch", template="many", runs=runs)
            assert answer.status_code == 202, answer.text

        await start(100)
        few = await longest_turn(partial(start, 100))
        many = await longest_turn(partial(start, 1000))
    assert many < 4 * few


async def test_a_batch_of_several_statements_is_written_as_a_whole_or_not_at_all(rows: Connection) -> None:
    new = [NewJob(ONE, "acme") for _ in range(350)]
    with pytest.raises(asyncpg.UniqueViolationError):
        await jobs.submit(rows, [*new, new[0]])
    assert await rows.fetchval("SELECT count(*) FROM job") == 0
    announced = await jobs.submit(rows, new)
    assert len({one.hint.task_id for one in announced}) == await rows.fetchval("SELECT count(*) FROM task") == 350


# --- the turnstile


def turnstile(*, at_most: int = 2, each: int = 1, waiting: int = 100, patience: float = PATIENCE) -> Turnstile:
    return Turnstile(
        at_most=at_most, per_tenant=each, waiting=waiting, patience=patience, refusal=lambda: Conflict("no", "No.")
    )


async def test_a_tenant_has_its_share_of_the_turns_and_another_finds_one() -> None:
    turns = turnstile()
    async with AsyncExitStack() as inside:
        await inside.enter_async_context(turns.turn("flood"))
        second = asyncio.create_task(inside.enter_async_context(turns.turn("flood")))
        await inside.enter_async_context(turns.turn("newcomer"))
        await asyncio.sleep(0)
        assert not second.done()
        second.cancel()
    async with turns.turn("flood"), turns.turn("newcomer"):
        pass


async def test_tenants_that_wait_take_turns_whoever_came_first() -> None:
    turns, order = turnstile(at_most=1), []

    async def use(tenant: str) -> None:
        async with turns.turn(tenant):
            order.append(tenant)
            await asyncio.sleep(0)

    await asyncio.gather(*(use(tenant) for tenant in ("a", "a", "a", "a", "b", "b", "c")))
    assert order == ["a", "a", "b", "c", "a", "b", "a"]


async def test_who_waits_too_long_for_a_turn_is_refused_and_leaves_it_to_others() -> None:
    turns = turnstile(patience=0.05)
    async with turns.turn("flood"):
        with pytest.raises(Conflict):
            async with turns.turn("flood"):
                pass
    async with turns.turn("flood"):
        pass


async def test_where_nobody_may_wait_the_next_is_refused_at_once() -> None:
    turns = turnstile(waiting=0)
    async with turns.turn("flood"):
        with pytest.raises(Conflict):
            async with turns.turn("flood"):
                pass
        async with turns.turn("newcomer"):
            pass


async def test_a_request_whose_client_left_while_it_waited_gives_its_turn_back() -> None:
    turns = turnstile(at_most=1)
    async with AsyncExitStack() as inside:
        await inside.enter_async_context(turns.turn("flood"))
        left = [asyncio.create_task(turns.turn("flood").__aenter__()) for _ in range(3)]
        await asyncio.sleep(0)
        left[0].cancel()  # while it waits
        await asyncio.sleep(0)
        await inside.aclose()
        left[1].cancel()  # in the moment of its turn
        await asyncio.gather(*left[:2], return_exceptions=True)
        async with asyncio.timeout(PATIENCE):
            await left[2]


@pytest.mark.parametrize("asked", [1, 2, 100])
@pytest.mark.parametrize("broker", ["amqp", "postgres"])
async def test_bulk_writes_never_take_the_last_connection_of_a_process(asked: int, broker: str) -> None:
    known = Settings(_env_file=None, bulk_writes_at_once=asked, broker=broker)
    turns = BulkWrites(known)
    inside = 0
    async with AsyncExitStack() as stack:
        for number in range(asked):
            entering = asyncio.create_task(stack.enter_async_context(turns.turn(f"tenant-{number}")))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            inside += entering.done()
            if not entering.done():
                entering.cancel()
    assert inside == min(asked, pool_of_api(known) - 1)


# --- hints


def hints(tenant: str, count: int) -> list[Announcement]:
    return [Announcement(number, Hint(new_id(), "q", tenant=tenant)) for number in range(count)]


def test_a_hint_is_sent_before_those_of_a_flood_that_came_first() -> None:
    waiting = WaitingAnnouncements()
    waiting.add(hints("flood", 500))
    waiting.add(hints("newcomer", 2))
    assert [one.hint.tenant for one in waiting.take(4)] == ["flood", "newcomer", "flood", "newcomer"]
    assert len(waiting.take(1000)) == 498
    assert not waiting
    assert waiting.take(1) == []


@pytest.mark.parametrize("floods", [1, 3, 20])
def test_a_hint_finds_a_place_however_many_of_a_flood_wait(floods: int) -> None:
    waiting = WaitingAnnouncements()
    for flood in range(floods):
        waiting.add(hints(f"flood-{flood}", 12_000))
    waiting.add(hints("newcomer", 1))
    taken = waiting.take(1_000_000)
    assert taken[floods].hint.tenant == "newcomer"
    assert len(taken) == 10_000  # the relay has the others


def test_of_more_tenants_than_places_the_first_ones_hints_are_sent() -> None:
    """Each has its share, one hint: nobody's only hint is dropped for another one's."""
    waiting = WaitingAnnouncements()
    for number in range(10_001):
        waiting.add(hints(f"tenant-{number}", 1))
    taken = waiting.take(1_000_000)
    assert [one.hint.tenant for one in taken] == [f"tenant-{number}" for number in range(10_000)]
    assert not waiting


async def test_a_poll_finds_a_newcomer_s_task_whose_hint_stands_behind_a_flood_s(rows: Connection) -> None:
    """While it leaves the flood's tasks to their hints."""
    made = Rows(rows)
    await made.submit(tenant="flood", count=20)
    await made.submit(tenant="newcomer", count=1)
    shares = {"flood": (5, None)}
    looked = await claims.poll(rows, made.terms, ["default"], 10, overdue=60.0, shares=shares, other_overdue=0.0)
    assert [claimed.tenant_id for claimed in looked.claimed] == ["newcomer"]
    looked = await claims.poll(rows, made.terms, ["default"], 10, overdue=60.0, shares=shares)
    assert looked.claimed == []
