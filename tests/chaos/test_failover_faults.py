"""The standby of a run is promoted by each fault: what was committed is there, and the next standby follows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from itertools import count

import asyncpg
import pytest

from chaos.catalogue import ALONE, APIS, STANDBY, WORKERS
from chaos.faults import failover
from chaos.faults.failover import FailoverFaults
from chaos.plan import Fault, Plan
from chaos.proxy import Link
from chaos.servers import Servers
from chaos.stack import CLIENT, Installation
from leasehold.runtime.gather import cancel_and_wait
from leasehold.runtime.transient import TRY_AGAIN
from tests.worker.children.waiting import until

NAME = "chaos_failover"
FAULTS = [kind.name for kind in ALONE if kind.needs == STANDBY]


@pytest.fixture
async def installation(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Installation]:
    """Without processes of the platform: the tests are its clients."""
    monkeypatch.setattr(failover, "_SILENT_SECONDS", 0.3)
    await servers.add_database(NAME)
    await servers.add_standby("remote_apply")
    installation = Installation(servers, Plan(0, 1.0))
    installation.name = NAME
    assert servers.standby is not None
    for slot in (*WORKERS, *APIS, CLIENT):
        installation.slots[slot] = None  # type: ignore[assignment]  # only its name is looked at
        for server, port in (("postgres", servers.postgres.port), ("standby", servers.standby.port)):
            installation.links[slot, server] = link = Link(("127.0.0.1", port))
            await link.open()
    yield installation
    for link in installation.links.values():
        await link.close()
    await servers.mend()
    await servers.remove_standby()
    await servers.drop_database(NAME)


async def write(
    installation: Installation, choose: Callable[[], Link], numbers: Iterator[int], acknowledged: list[int]
) -> None:
    """For ever: insert a number after another, each by a connection of its own."""
    login = installation.database_url.partition("@")[0]
    for n in numbers:
        with suppress(*TRY_AGAIN):
            async with asyncio.timeout(0.5):
                connection = await asyncpg.connect(f"{login}@127.0.0.1:{choose().port}/{NAME}")
                try:
                    await connection.execute("INSERT INTO acknowledged VALUES ($1)", n)
                finally:
                    connection.terminate()
            acknowledged.append(n)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("name", FAULTS)
async def test_what_was_acknowledged_is_there_after_two_failovers_and_the_old_primary_follows(
    installation: Installation, name: str
) -> None:
    """One client goes to the primary of the moment, the other one to the first primary whenever that takes writes. As
    in a run, the second fault begins while the first one lasts: it must hit the primary of its own time.
    """
    first, second = installation.servers.postgres, installation.servers.standby
    old_link = installation.links["api-1", "postgres"]
    async with installation.connection() as connection:
        await connection.execute("CREATE TABLE acknowledged (n int)")
    numbers, faults = count(), FailoverFaults(installation, asyncio.Lock())
    acknowledged: list[int] = []
    by_old: list[int] = []
    writing = [
        asyncio.create_task(
            write(installation, lambda: installation.links["api-0", "postgres"], numbers, acknowledged)
        ),
        asyncio.create_task(write(installation, lambda: old_link, numbers, by_old)),
    ]
    async with asyncio.timeout(60):  # a connection of a pool, which the fault ends
        kept = await asyncpg.connect(f"{installation.database_url.partition('@')[0]}@127.0.0.1:{old_link.port}/{NAME}")
    await until(lambda: bool(acknowledged and by_old), "both writers have written")
    make = faults.makers[name.partition(" ")[0]]
    effects = await asyncio.gather(make(Fault(name, seconds=1.0)), make(Fault(name, seconds=1.0)))
    before = next(numbers)
    await until(lambda: acknowledged[-1] > before, "the new primary has taken one")
    await asyncio.sleep(0.3)
    kept.terminate()
    await cancel_and_wait(*writing)
    assert all(task.cancelled() for task in writing)
    async with installation.connection() as connection:
        there = {row["n"] for row in await connection.fetch("SELECT n FROM acknowledged")}
        following = await connection.fetchval("SELECT sync_state FROM pg_stat_replication")
    assert effects[0]  # connections that it ended; at the second failover perhaps no client has come back yet
    assert len(faults.failovers) == len(effects)
    assert all((one.silent_since or 0.0) < one.promoted_at < one.ended_at < time.time() for one in faults.failovers)
    assert {*acknowledged, *by_old} <= there
    assert min(*acknowledged, *by_old) < before < max(acknowledged)
    assert by_old
    assert (installation.servers.postgres, installation.servers.standby) == (first, second)
    assert following == "sync"
