"""A tenant's flood delays its own tenant alone: real workers, RabbitMQ and PostgreSQL, steps that hold their slots for
longer than any of these tests waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from uuid import UUID

import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from leasehold.api.auth.security import GENERATION_WRITE
from leasehold.broker import make_broker
from leasehold.broker.base import Broker
from leasehold.db.database import Connection, connect
from leasehold.domain.concurrency_limit import EVERYBODY, ConcurrencyLimit
from leasehold.domain.pipeline import Pipeline
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.transitions import concurrency, jobs
from leasehold.transitions.jobs import NewJob
from leasehold.worker.worker import Worker
from tests.api.conftest import client_of, serving
from tests.factories import ONE, Rows
from tests.security.neighbour_work import chain, heavy, heavy_chain, inline

#: Of a step that ends with the test.
FOR_EVER = 3600.0
SLOTS = 16
#: Generous: a newcomer starts within two seconds; one that waits for a flood never does.
PATIENCE = 60.0


@pytest.fixture(params=["amqp", "postgres"])
def hints(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def neighbours(settings: Settings, hints: str, tmp_path: Path) -> Settings:
    return settings.model_copy(
        update={
            "broker": hints,
            "amqp_publish_timeout": PATIENCE,
            "amqp_silence_seconds": PATIENCE,
            "pipelines": "tests.security.neighbour_work:pipelines",
            "work_dir": str(tmp_path),
            "worker_concurrency": SLOTS,
            "worker_children": 2,
            "worker_queues": "default",
        }
    )


@pytest.fixture
async def rows(settings: Settings) -> AsyncIterator[Rows]:
    connection = await connect(settings, "test")
    yield Rows(connection)
    await connection.close()


@pytest.fixture
async def broker(neighbours: Settings) -> AsyncIterator[Broker]:
    broker = make_broker(neighbours)
    await broker.open()
    async with asyncio.timeout(PATIENCE):
        while not broker.connected:
            await asyncio.sleep(0.02)
    yield broker
    await broker.close()


class Town:
    """Where tenants send their jobs."""

    def __init__(self, rows: Rows, broker: Broker) -> None:
        self.rows = rows
        self._broker = broker

    async def send(
        self, tenant: str, count: int = 1, *, seconds: float = 0.0, pipeline: Pipeline = inline, priority: int = 1
    ) -> list[UUID]:
        new = [NewJob(pipeline, tenant, {"seconds": seconds}, priority=priority) for _ in range(count)]
        async with self.rows.connection.transaction():  # no relay sees the announcements
            announced = await jobs.submit(self.rows.connection, new)
            await self.rows.forget(announced)
        assert all(await self._broker.publish([one.hint for one in announced]))
        return [one.id for one in new]

    async def running(self, tenant: str | None = None) -> int:
        return int(
            await self.rows.connection.fetchval(
                "SELECT count(*) FROM task WHERE status = 'running' AND tenant_id = coalesce($1, tenant_id)", tenant
            )
        )

    async def waiting(self, tenant: str) -> int:
        return int(
            await self.rows.connection.fetchval(
                "SELECT count(*) FROM job WHERE tenant_id = $1 AND started_at IS NULL", tenant
            )
        )

    async def until(self, holds: Callable[[int], bool], tenant: str | None = None) -> None:
        """Wait until so much runs."""
        async with asyncio.timeout(PATIENCE):
            while not holds(await self.running(tenant)):
                await asyncio.sleep(0.05)

    async def at_rest(self, tenant: str | None = None) -> int:
        """How much runs once nothing more begins."""
        before, now = -1, await self.running(tenant)
        while before != now or not now:
            await asyncio.sleep(1.0)
            before, now = now, await self.running(tenant)
        return now

    async def succeeded(self, job_ids: list[UUID]) -> None:
        """Wait until all of them have."""
        async with asyncio.timeout(PATIENCE):
            while await self.rows.connection.fetchval(
                "SELECT count(*) FROM job WHERE id = ANY($1::uuid[]) AND status <> 'succeeded'", job_ids
            ):
                await asyncio.sleep(0.02)


@pytest.fixture
def town(rows: Rows, broker: Broker) -> Town:
    return Town(rows, broker)


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_newcomer_starts_although_one_tenant_s_long_runs_came_first(
    neighbours: Settings, town: Town, workers: int
) -> None:
    async with AsyncExitStack() as opened:
        for _ in range(workers):
            await opened.enter_async_context(Worker(neighbours))
        await town.send("flood", 40 * SLOTS, seconds=FOR_EVER)
        await town.until(lambda running: running >= workers * SLOTS, "flood")
        held = await town.at_rest("flood")
        assert held == workers * SLOTS
        await town.succeeded(await town.send("newcomer"))
        await town.succeeded(await town.send("newcomer", 5))


async def test_a_newcomer_starts_although_as_many_tenants_as_there_are_slots_flood(
    neighbours: Settings, town: Town
) -> None:
    async with Worker(neighbours):
        for flood in range(SLOTS):
            await town.send(f"flood-{flood}", 10, seconds=FOR_EVER)
        await town.until(lambda running: running >= SLOTS)
        await town.at_rest()
        await town.succeeded(await town.send("newcomer"))
        assert await town.running("flood-0")


async def test_a_newcomer_starts_although_a_flood_fills_the_window_of_its_priority(
    neighbours: Settings, town: Town
) -> None:
    """The broker hands out no more of a band while so many of its hints are unacknowledged."""
    async with Worker(neighbours):
        await town.send("flood", 40 * SLOTS, seconds=FOR_EVER, priority=2)
        await town.at_rest()
        await town.succeeded(await town.send("newcomer", priority=2))


async def test_a_flood_s_hints_that_wait_in_hand_run_once_there_is_room(neighbours: Settings, town: Town) -> None:
    async with Worker(neighbours):
        await town.send("stays", SLOTS, seconds=FOR_EVER)
        await town.at_rest()
        await town.succeeded(await town.send("flood", 6 * SLOTS, seconds=0.05))


async def test_a_tenant_whose_steps_follow_one_another_gives_slots_up_between_two(
    neighbours: Settings, town: Town
) -> None:
    async with Worker(neighbours):
        await town.send("flood", SLOTS, pipeline=chain, seconds=1.5)  # a chain takes longer than `until` waits
        for other in range(SLOTS):
            await town.send(f"other-{other}", 3, seconds=FOR_EVER)
        await town.until(lambda running: running <= SLOTS // 2, "flood")


@pytest.mark.parametrize("pipeline", [heavy, heavy_chain], ids=["one step", "many steps"])
async def test_where_no_child_process_can_be_kept_a_newcomer_has_the_next_that_becomes_free(
    neighbours: Settings, town: Town, pipeline: Pipeline
) -> None:
    async with Worker(neighbours.model_copy(update={"worker_queues": "heavy"})):
        for _ in range(3):  # where its hint or a child stands still, more of the flood begins
            await town.send("flood", 30 - await town.waiting("flood"), pipeline=pipeline, seconds=1.0)
            await town.until(lambda running: running == 2)
            (newcomer,) = await town.send("newcomer", pipeline=heavy)
            await town.succeeded([newcomer])
            begun_before = await town.rows.connection.fetchval(
                "SELECT count(*) FROM history f, history mine WHERE f.tenant_id = 'flood' AND mine.job_id = $1"
                " AND f.kind = 'claimed' AND mine.kind = 'claimed'"
                " AND f.at BETWEEN mine.at - interval '30 seconds' AND mine.at"
                " AND f.at > (SELECT created_at FROM job WHERE id = $1)",
                newcomer,
            )
            if begun_before <= 3:
                break
        assert begun_before <= 3  # the hint may be on its way while a step ends


async def held_at(connection: Connection, limit: ConcurrencyLimit, **tenants: int) -> None:
    for tenant, count in tenants.items():
        async with connection.transaction():
            await jobs.submit(connection, [NewJob(ONE, tenant, limits=[limit]) for _ in range(count)])


async def let_in(connection: Connection, limit: ConcurrencyLimit) -> dict[str, int]:
    """Whose jobs are inside, once all were let in that may."""
    await concurrency.admit(connection, [(limit.tenant_id, limit.key)])
    rows = await connection.fetch("SELECT tenant_id, count(*) AS n FROM job WHERE NOT held GROUP BY tenant_id")
    return {row["tenant_id"]: row["n"] for row in rows}


async def end_one(connection: Connection, tenant: str) -> None:
    job_id = await connection.fetchval(
        "SELECT id FROM job WHERE NOT held AND finished_at IS NULL AND tenant_id = $1 ORDER BY id LIMIT 1", tenant
    )
    await jobs.request_cancel(connection, [job_id], tenant, reason="", by="")


@pytest.mark.parametrize(("at_most", "alone"), [(1, 1), (3, 3), (4, 3), (7, 6), (8, 7), (15, 14), (40, 35)])
async def test_a_tenant_alone_leaves_a_place_at_a_limit_that_tenants_share(
    rows: Rows, at_most: int, alone: int
) -> None:
    limit = ConcurrencyLimit(EVERYBODY, "provider:p", at_most)
    await held_at(rows.connection, limit, flood=600)
    assert await let_in(rows.connection, limit) == {"flood": alone}
    await held_at(rows.connection, limit, newcomer=1)
    assert ("newcomer" in await let_in(rows.connection, limit)) == (alone < at_most)


async def test_tenants_take_turns_at_a_limit_that_they_share(rows: Rows) -> None:
    limit = ConcurrencyLimit(EVERYBODY, "server:south", 3)
    await held_at(rows.connection, limit, flood=600)
    assert await let_in(rows.connection, limit) == {"flood": 3}
    await held_at(rows.connection, limit, second=5, third=1)
    for inside in ({"flood": 3, "second": 1}, {"flood": 3, "second": 1, "third": 1}):
        await end_one(rows.connection, "flood")
        assert await let_in(rows.connection, limit) == inside
    await end_one(rows.connection, "flood")
    assert (await let_in(rows.connection, limit))["flood"] == 4


async def test_a_tenant_s_own_limit_is_all_its_own(rows: Rows) -> None:
    limit = ConcurrencyLimit("flood", "tenant", 8)
    await held_at(rows.connection, limit, flood=600)
    assert await let_in(rows.connection, limit) == {"flood": 8}


async def test_a_generation_without_a_server_waits_for_its_own_tenant_s_alone(settings: Settings, rows: Rows) -> None:
    known = settings.model_copy(
        update={
            "generation_credentials": {"jimeng": SecretStr("id:secret")},
            "sealing_keys": SecretStr(Fernet.generate_key().decode()),
        }
    )
    body = {"prompt": "a cat", "provider": "jimeng", "model": "m"}
    async with serving(known) as running:
        for tenant, count in (("flood", 5), ("newcomer", 1)):
            key = await create_key(rows.connection, tenant_id=tenant, client_id="t", scopes=[GENERATION_WRITE])
            async with client_of(running.url, key.text) as http:
                for _ in range(count):
                    assert (await http.post("/v1/images/generations", json=body)).status_code == 202
    held = await rows.connection.fetch(
        "SELECT tenant_id, count(*) AS n FROM job WHERE pipeline = 'generation' AND NOT held GROUP BY 1 ORDER BY 1"
    )
    assert [tuple(row) for row in held] == [("flood", 3), ("newcomer", 1)]
