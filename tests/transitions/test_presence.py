"""A worker whose session has ended loses its tasks within a second; one that has a session keeps them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from leasehold.db.database import connect, migrate
from leasehold.embedded.postgres import Postgres
from leasehold.runtime.transient import TRY_AGAIN, until_answered
from leasehold.settings import Settings
from leasehold.transitions import claims, jobs, sweeps, workers
from tests.factories import Rows, terms
from tests.support.databases import Databases
from tests.transitions.conftest import Open

MAX_LOSSES = 5


async def register(connection: Any, worker: UUID) -> int:
    return await workers.register(connection, worker, host="h", pid=1, version="v", queues=["default"])


async def _sweep(rows: Rows, task: UUID, dead: Sequence[UUID]) -> bool:
    ended, _, _ = await sweeps.expire_leases(rows.connection, dead, MAX_LOSSES)
    return ended == 1


async def _claim(rows: Rows, task: UUID, dead: Sequence[UUID]) -> bool:
    """A hint that somebody else gets."""
    return bool(await claims.claim(rows.connection, terms(), [task], dead))


async def _end_cancel(rows: Rows, task: UUID, dead: Sequence[UUID]) -> bool:
    job = (await rows.task(task))["job_id"]
    await jobs.request_cancel(rows.connection, [job], "t", reason="r", by="b")
    return len(await sweeps.end_cancels(rows.connection, dead, 5)) == 1


async def _return_workflow(rows: Rows, task: UUID, dead: Sequence[UUID]) -> bool:
    """A workflow that undoes its work, because its job is being cancelled."""
    await rows.connection.execute("UPDATE task SET journaled = true WHERE id = $1", task)
    await _end_cancel(rows, task, dead)
    return bool((await rows.task(task))["status"] == "pending")


#: Whether another worker takes the task. `dead`: who counted as dead a moment ago.
Take = Callable[[Rows, UUID, Sequence[UUID]], Awaitable[bool]]
TAKES: list[Take] = [_sweep, _claim, _end_cancel, _return_workflow]


@pytest.mark.parametrize("take", TAKES)
async def test_who_came_back_since_it_was_seen_to_be_gone_keeps_what_it_has(
    rows: Rows, another: Open, take: Take
) -> None:
    """The look that found it gone may be seconds old: its answer had to come over a slow link."""
    owner = rows.terms.owner
    key = await register(rows.connection, owner)
    task = (await rows.leased()).lease.task_id
    heartbeat, bystander = await another(), await another()
    there = bystander.terms.owner  # another worker is there all the time
    assert await workers.appear(bystander.connection, there, await register(rows.connection, there))
    assert await workers.appear(heartbeat.connection, owner, key)
    await rows.connection.execute("UPDATE task SET lease_until = lease_until + interval '1 hour'")
    assert not await take(await another(), task, [owner])
    await heartbeat.connection.close()
    elsewhere = await another()
    async with asyncio.timeout(60):
        while not await take(elsewhere, task, [owner]):
            await asyncio.sleep(0.05)


async def test_when_the_server_ends_all_sessions_because_one_of_them_crashed_nobody_is_gone(
    run_directory: Path,
) -> None:
    """An out-of-memory kill of one backend is enough: every worker would take every other's tasks."""
    server = Postgres(run_directory / "postgres-that-crashes", durable=False)
    await server.start()
    await migrate(server.url)
    settings = Settings(database_url=server.url, _env_file=None)
    looking, neighbour, heartbeat = [await connect(settings, "test") for _ in range(3)]
    worker = uuid4()
    assert await workers.appear(heartbeat, worker, await register(looking, worker))
    await heartbeat.close()
    async with asyncio.timeout(30):
        while await workers.dead(looking) != [worker]:
            await asyncio.sleep(0.1)
    await looking.execute("CHECKPOINT")  # this server forgets what it committed just before a crash
    os.kill(looking.get_server_pid(), signal.SIGKILL)
    for ended in (looking, neighbour):  # the server takes new sessions until it has ended the others
        with pytest.raises(TRY_AGAIN):
            await ended.fetchval("SELECT pg_sleep(10)")
    looking = await until_answered(lambda: connect(settings, "test"), within=30)
    assert await workers.dead(looking) == []
    await looking.execute("UPDATE worker SET incarnation = NULL")  # of an older release
    await looking.execute("SELECT pg_stat_reset_shared('bgwriter')")  # the incarnation begins now
    assert await workers.dead(looking) == []
    await looking.close()
    await server.kill()
    await server.forget()


@pytest.mark.parametrize("take", TAKES)
async def test_a_lease_of_who_has_not_come_back_since_a_failover_lasts_ten_seconds_longer(
    rows: Rows, another: Open, take: Take
) -> None:
    """Its worker may live: it renews the lease or gives it back once it has found the new primary."""
    owner, connection = rows.terms.owner, rows.connection
    key = await register(connection, owner)
    await register(connection, uuid4())  # another worker, which holds nothing
    task = (await rows.leased()).lease.task_id
    heartbeat = (await another()).connection
    assert await workers.appear(heartbeat, owner, key)
    elsewhere = "UPDATE worker SET incarnation = incarnation - interval '1 hour'"
    await connection.execute(elsewhere)
    late = "UPDATE task SET lease_until = clock_timestamp() - $2::interval WHERE id = $1"
    await connection.execute(late, task, timedelta(seconds=2))
    assert not await take(rows, task, [])
    assert (await rows.task(task))["losses"] == 0
    await workers.record_alive(heartbeat, owner, {})  # on this server again
    assert await take(rows, task, [])

    task = (await rows.leased()).lease.task_id
    await connection.execute(elsewhere)
    await connection.execute(late, task, timedelta(seconds=11))
    assert await take(rows, task, [])


async def test_who_comes_back_after_a_failover_has_the_time_of_a_lease_for_what_it_has(
    rows: Rows, another: Open
) -> None:
    """It renews it or gives it back: but a sweep may come first."""
    owner, connection = rows.terms.owner, rows.connection
    key = await register(connection, owner)
    mine, other = (await rows.leased()).lease, (await rows.leased()).lease
    heartbeat = (await another()).connection
    assert await workers.appear(heartbeat, owner, key)
    late = "UPDATE task SET lease_until = clock_timestamp() - interval '5 seconds' WHERE id = ANY($1)"
    await connection.execute(late, [mine.task_id, other.task_id])
    await connection.execute("UPDATE task SET lease_owner = $2 WHERE id = $1", other.task_id, uuid4())
    await connection.execute("UPDATE worker SET incarnation = incarnation - interval '1 hour'")
    await workers.keep_leases(heartbeat, owner, 30.0)
    await workers.record_alive(heartbeat, owner, {})
    assert (await sweeps.expire_leases(connection, [], MAX_LOSSES))[0] == 1
    assert (await rows.task(mine.task_id))["status"] == "running"

    await connection.execute(late, [mine.task_id])
    await workers.keep_leases(heartbeat, owner, 30.0)  # a reconnect to the same server
    assert (await sweeps.expire_leases(connection, [], MAX_LOSSES))[0] == 1


async def test_who_comes_back_keeps_only_its_own_leases_none_for_a_shorter_time_and_waits_for_no_row(
    rows: Rows, another: Open
) -> None:
    connection, (owner, other) = rows.connection, [uuid4() for _ in range(2)]
    for worker in (owner, other):
        session = (await another()).connection
        assert await workers.appear(session, worker, await register(connection, worker))
    passed, settling, lasting, foreign = [(await rows.leased()).lease.task_id for _ in range(4)]
    change = "UPDATE task SET lease_owner = $2, lease_until = clock_timestamp() + $3::interval WHERE id = $1"
    for task, worker, left in (
        (passed, owner, -5),
        (settling, owner, -5),
        (lasting, owner, 3600),
        (foreign, other, -5),
    ):
        await connection.execute(change, task, worker, timedelta(seconds=left))
    await connection.execute("UPDATE worker SET incarnation = incarnation - interval '1 hour'")
    before = {task: (await rows.task(task))["lease_until"] for task in (passed, settling, lasting, foreign)}
    settlement = (await another()).connection
    await connection.execute("SET lock_timeout = '1s'")
    async with settlement.transaction():
        await settlement.execute("SELECT FROM task WHERE id = $1 FOR UPDATE", settling)
        await workers.keep_leases(connection, owner, 30.0)
    after = {task: (await rows.task(task))["lease_until"] for task in before}
    assert [task for task in before if after[task] != before[task]] == [passed]
    assert after[passed] > before[passed]


async def test_only_its_own_lock_shows_that_a_worker_is_there(rows: Rows, another: Open, postgres: Databases) -> None:
    """Not another worker's, nor a lock of the same number of somebody else, of another kind, or in another database."""
    gone, there = uuid4(), uuid4()
    session, heartbeat = (await another()).connection, (await another()).connection
    key = await register(rows.connection, gone)
    assert await workers.appear(session, gone, key)
    assert await workers.appear(heartbeat, there, await register(rows.connection, there))
    claimed = await Rows(rows.connection, terms(gone)).leased()
    held = await Rows(rows.connection, terms(there)).leased()
    task, other_task = claimed.lease.task_id, held.lease.task_id
    assert [await workers.dead_owner(rows.connection, one) for one in (task, other_task)] == [None, None]
    await session.fetchval("SELECT pg_advisory_unlock($1, $2)", workers.PRESENCE, key)
    await heartbeat.fetchval("SELECT pg_advisory_lock($1, $2)", workers.PRESENCE + 1, key)
    await heartbeat.fetchval("SELECT pg_advisory_lock($1::bigint << 32 | $2::bigint)", workers.PRESENCE, key)
    elsewhere = await asyncpg.connect(postgres.url)
    try:
        await elsewhere.fetchval("SELECT pg_advisory_lock($1, $2)", workers.PRESENCE, key)
        assert await workers.dead(rows.connection) == [gone]
        assert [await workers.dead_owner(rows.connection, one) for one in (task, other_task)] == [gone, None]
    finally:
        await elsewhere.close()


async def test_who_wants_to_lead_while_another_leads_waits_for_nothing(rows: Rows, another: Open) -> None:
    leader, heir = uuid4(), uuid4()
    assert await workers.lead(rows.connection, "sweeper", leader, 600)
    renewing = (await another()).connection
    await rows.connection.execute("SET lock_timeout = '1s'")
    async with renewing.transaction():
        assert await workers.lead(renewing, "sweeper", leader, 600)
        assert not await workers.lead(rows.connection, "sweeper", heir, 600)


async def leaders(rows: Rows) -> dict[str, tuple[Any, ...]]:
    found = await rows.connection.fetch("SELECT role, owner, until FROM leadership")
    return {row["role"]: (row["owner"], row["until"]) for row in found}


async def test_who_takes_a_lead_keeps_it_until_another_takes_it(rows: Rows) -> None:
    """Each role has a leader of its own."""
    first, second = uuid4(), uuid4()
    for worker in (first, second):
        await workers.take_lead(rows.connection, "writer", worker, 30)
        assert (await leaders(rows))["writer"][0] == worker
    await workers.take_lead(rows.connection, "sweeper", first, 30)
    before = await leaders(rows)
    assert not await workers.keep_lead(rows.connection, "writer", first, 600)
    assert await leaders(rows) == before
    assert await workers.keep_lead(rows.connection, "writer", second, 600)
    after = await leaders(rows)
    assert after == before | {"writer": (second, after["writer"][1])}
    assert after["writer"][1] > before["writer"][1] + timedelta(minutes=9)


async def test_a_role_has_a_leader_until_its_time_is_over_or_it_drains(rows: Rows) -> None:
    """One whose session has ended counts until then. It does not matter whether another worker drains."""
    works, drains, unheard_of = [uuid4() for _ in range(3)]
    for worker in (works, drains):
        await register(rows.connection, worker)
    assert await workers.ask_to_drain(rows.connection, drains)
    await workers.take_lead(rows.connection, "sweeper", works, 30)
    assert not await workers.has_leader(rows.connection, "writer")
    for worker, seconds, has_leader in (
        (works, 30, True),
        (works, -1, False),
        (drains, 30, False),
        (unheard_of, 30, True),
    ):
        await workers.take_lead(rows.connection, "writer", worker, seconds)
        assert await workers.has_leader(rows.connection, "writer") == has_leader


async def test_a_worker_names_up_to_a_thousand_handlers(rows: Rows) -> None:
    for count, is_recorded in ((1000, True), (1001, False)):
        worker = uuid4()
        names = [f"one.s{number}" for number in range(count)]
        await workers.register(
            rows.connection, worker, host="h", pid=1, version="v", queues=["default"], handlers=names
        )
        recorded = await rows.connection.fetchval("SELECT handlers FROM worker WHERE id = $1", worker)
        assert recorded == (names if is_recorded else None)


async def test_a_worker_of_an_older_release_is_found_dead_ten_seconds_after_the_start(
    rows: Rows, another: Open
) -> None:
    key = await register(rows.connection, rows.terms.owner)
    heartbeat = (await another()).connection
    assert await workers.appear(heartbeat, rows.terms.owner, key)
    await heartbeat.close()
    await rows.connection.execute("UPDATE worker SET incarnation = NULL")
    async with asyncio.timeout(30):
        while await workers.dead(rows.connection) != [rows.terms.owner]:
            await asyncio.sleep(0.1)
    elsewhere = f"UPDATE worker SET incarnation = {workers.INCARNATION} - interval '1 hour'"
    await rows.connection.execute(elsewhere)  # it has not come back since a failover: nothing is known
    assert await workers.dead(rows.connection) == []


async def test_what_is_written_of_a_worker_changes_no_other_worker(rows: Rows, another: Open) -> None:
    worker, other, connection = uuid4(), uuid4(), rows.connection
    await register(connection, other)
    assert await workers.lead(connection, "exporter", other, 30)
    key = await register(connection, worker)
    queues, before = "SELECT queues FROM worker WHERE id = $1", "SELECT to_jsonb(w) FROM worker w WHERE id = $1"
    untouched = await connection.fetchval(before, other)
    await register(connection, worker)
    heartbeat = (await another()).connection
    assert await workers.appear(heartbeat, worker, key)
    assert await workers.record_alive(heartbeat, worker, {"default": 1}) is False
    await workers.record_served(connection, worker, ["elsewhere"])
    assert await connection.fetchval(queues, worker) == ["elsewhere"]
    assert await workers.ask_to_drain(connection, worker)
    assert await workers.record_alive(heartbeat, worker, {}) is True
    assert await workers.lead(connection, "sweeper", worker, 30)
    await workers.resign(connection, worker)
    assert await workers.lead(connection, "sweeper", uuid4(), 30)
    await workers.unregister(connection, worker)
    assert await connection.fetchval(before, worker) is None
    assert await connection.fetchval(before, other) == untouched
    assert not await workers.lead(connection, "exporter", worker, 30)


async def test_a_silent_worker_is_forgotten_unless_it_holds_a_lease_and_its_handlers_are_not(rows: Rows) -> None:
    holder, silent, recent = rows.terms.owner, uuid4(), uuid4()
    for worker, handler in ((holder, "one.holder"), (silent, "one.silent"), (recent, "one.recent")):
        await workers.register(
            rows.connection, worker, host="h", pid=1, version="v", queues=["default"], handlers=[handler]
        )
    await rows.leased()
    await rows.connection.execute("UPDATE worker SET seen_at = seen_at - interval '2 minutes' WHERE id <> $1", recent)
    await workers.forget_workers(rows.connection, 60.0)
    left = {row["id"] for row in await rows.connection.fetch("SELECT id FROM worker")}
    assert left == {holder, recent}
    assert [row["name"] for row in await rows.connection.fetch("SELECT name FROM known_handler")] == ["one.silent"]
