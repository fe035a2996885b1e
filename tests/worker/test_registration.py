"""A worker's row: it says what the worker serves, from the start of the worker to its end, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any
from uuid import UUID, uuid4

import pytest

from leasehold.db.database import Pool, make_pool
from leasehold.settings import Settings
from leasehold.transitions import workers
from leasehold.worker.leases import registration as leases_registration
from leasehold.worker.leases.registration import Registration, registered
from tests.factories import Rows
from tests.worker.conftest import SECONDS


@pytest.fixture
async def pool(settings: Settings) -> AsyncIterator[Pool]:
    async with make_pool(settings, "test", 2) as pool:
        yield pool


@pytest.fixture
async def bystander(rows: Rows) -> UUID:
    """A worker of another process, which leads the exporter."""
    worker = uuid4()
    await Registration(worker, ["default"], slots={"default": 7}, handlers=["other.step"]).write(rows.connection)
    assert await workers.lead(rows.connection, "exporter", worker, 600)
    return worker


async def row(rows: Rows, worker: UUID) -> dict[str, Any]:
    return dict(await rows.connection.fetchrow("SELECT * FROM worker WHERE id = $1", worker) or {})


async def test_a_worker_is_listed_with_what_it_serves_until_its_end(
    rows: Rows, pool: Pool, bystander: UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_registration, "_DRAIN_SECONDS", SECONDS)  # a busy machine may stand still for two
    untouched, worker = await row(rows, bystander), uuid4()
    registration = Registration(
        worker,
        {"mail", "default"},
        slots={"default": 3, "later": 1, "mail": 2},
        pool="big",
        handlers=["two.b", "one.a"],
    )
    async with registered(pool, registration) as made:
        listed = await row(rows, worker)
        assert (listed["queues"], listed["slots"]) == (["default", "mail"], [3, 2])
        assert (listed["pool"], listed["handlers"]) == ("big", ["one.a", "two.b"])
        await made.change(pool, {"mail", "later"}, ["two.c", "one.a"])
        listed = await row(rows, worker)
        assert (listed["queues"], listed["slots"]) == (["later", "mail"], [1, 2])
        assert (listed["handlers"], made.handlers) == (["one.a", "two.c"],) * 2
        await made.record_drain(pool)
        assert (await row(rows, worker))["draining"]
    assert await row(rows, worker) == {}
    assert await row(rows, bystander) == untouched
    known = await rows.connection.fetch("SELECT name FROM known_handler ORDER BY name")
    assert [one["name"] for one in known] == ["one.a", "two.c"]  # when their code was last there can still be said


async def test_a_worker_ends_although_all_connections_of_its_pool_are_taken(
    rows: Rows, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row stays, and the sweeper deletes it."""
    monkeypatch.setattr(leases_registration, "_CONNECTION_SECONDS", 0.05)
    worker = uuid4()
    async with AsyncExitStack() as stack, asyncio.timeout(SECONDS), registered(pool, Registration(worker, ["default"])):
        for _ in range(2):
            await stack.enter_async_context(pool.acquire())
    assert await row(rows, worker)


async def test_a_worker_that_drains_drains_in_the_row_that_it_writes_anew(rows: Rows, pool: Pool) -> None:
    """A failover may lose its row. As a worker that serves, it would hide that nobody else serves its queues."""
    registration = Registration(uuid4(), ["default"])
    await registration.write(rows.connection)
    assert not (await row(rows, registration.worker))["draining"]
    await registration.record_drain(pool)
    await rows.connection.execute("DELETE FROM worker")
    await registration.write(rows.connection)
    assert (await row(rows, registration.worker))["draining"]


async def test_a_drain_that_could_not_be_recorded_is_recorded_when_the_worker_connects_again(
    rows: Rows, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_registration, "_DRAIN_SECONDS", 0.05)
    registration = Registration(uuid4(), ["default"])
    await registration.write(rows.connection)
    async with rows.connection.transaction():
        await rows.connection.execute("SELECT FROM worker FOR UPDATE")
        await registration.record_drain(pool)
    await registration.write(rows.connection)
    assert (await row(rows, registration.worker))["draining"]


async def test_a_worker_that_an_operator_drains_stays_so_when_it_connects_again(rows: Rows) -> None:
    """It may not have read yet that it should drain."""
    registration = Registration(uuid4(), ["default"])
    await registration.write(rows.connection)
    assert await workers.ask_to_drain(rows.connection, registration.worker)
    await registration.write(rows.connection)
    assert (await row(rows, registration.worker))["draining"]


async def test_a_worker_that_is_told_neither_its_slots_nor_its_handlers_says_nothing_about_them(
    rows: Rows, pool: Pool
) -> None:
    """Nothing is not the same as none: a row with no handlers would say that the worker has code for no step."""
    registration = Registration(uuid4(), ["default"])
    async with registered(pool, registration):
        listed = await row(rows, registration.worker)
    assert (listed["slots"], listed["handlers"]) == (None, None)
    assert list(registration.handlers) == []


async def test_a_worker_that_starts_before_the_migration_waits_for_it(rows: Rows, pool: Pool) -> None:
    """A rollout starts both at once. The worker would end otherwise, and be started again and again."""
    registration, begun, may_end = Registration(uuid4(), ["default"]), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        async with registered(pool, registration):
            begun.set()
            await may_end.wait()

    await rows.connection.execute("ALTER TABLE worker RENAME TO worker_of_tomorrow")
    working = asyncio.create_task(work())
    done, _ = await asyncio.wait([working], timeout=0.5)
    assert (done, begun.is_set()) == (set(), False)
    await rows.connection.execute("ALTER TABLE worker_of_tomorrow RENAME TO worker")
    await asyncio.wait_for(begun.wait(), SECONDS)
    assert (await row(rows, registration.worker))["queues"] == ["default"]
    may_end.set()
    await asyncio.wait_for(working, SECONDS)


async def test_a_leader_that_ends_makes_room_for_the_next_at_once(rows: Rows, pool: Pool, bystander: UUID) -> None:
    """Else nobody would sweep until its time has passed."""
    leader, next_one = uuid4(), uuid4()
    async with registered(pool, Registration(leader, ["default"])):
        assert await workers.lead(rows.connection, "sweeper", leader, 600)
        assert not await workers.lead(rows.connection, "sweeper", next_one, 600)
    assert await workers.lead(rows.connection, "sweeper", next_one, 600)
    assert not await workers.lead(rows.connection, "exporter", next_one, 600), "the bystander leads it"
    assert (await row(rows, bystander))["queues"] == ["default"]
