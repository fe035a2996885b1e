"""A session does not wait for a primary that has been replaced: it ends, and the next one leads to the new primary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from chaos.proxy import Link
from chaos.replicas import promote
from leasehold.db import failover
from leasehold.db.database import connect, make_pool
from leasehold.embedded.postgres import Postgres
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.settings import Settings
from tests.api.proxy import proxy_to
from tests.failover.pair import NOTE, Pair, pair_in

#: So long that a test which waits for it fails.
DATABASE_SECONDS = 600.0
SECONDS = 60.0


@pytest.fixture
async def pair(run_directory: Path) -> AsyncIterator[Pair]:
    async with pair_in(run_directory / "silent") as pair:
        yield pair


@asynccontextmanager
async def link_to(server: Postgres) -> AsyncIterator[Link]:
    link = Link(("127.0.0.1", server.port))
    await link.open()
    yield link
    await link.close()


async def is_new(settings: Settings, pair: Pair) -> bool:
    """Whether a new session leads to the promoted standby, and writes there."""
    session = await connect(settings, "tests")
    await session.execute(NOTE)
    port = await session.fetchval("SELECT inet_server_port()")
    await session.close()
    return bool(port == pair.standby.port)


async def test_what_waits_for_a_frozen_primary_goes_to_the_one_that_was_promoted(pair: Pair) -> None:
    """A statement of a session, one of a pool, a session that says nothing, and a connection that is being opened."""
    async with asyncio.timeout(SECONDS), link_to(pair.primary) as link:
        settings = pair.settings(
            link.port, pair.standby.port, database_timeout=DATABASE_SECONDS, database_host_timeout=DATABASE_SECONDS
        )
        async with make_pool(settings, "tests", 2) as pool:
            session, silent = await connect(settings, "tests"), await connect(settings, "tests")
            await pool.execute(NOTE)
            ended = asyncio.Event()
            silent.add_termination_listener(lambda _: ended.set())
            link.hold()
            waiting = [asyncio.ensure_future(one) for one in (session.execute(NOTE), pool.execute(NOTE))]
            opening = asyncio.create_task(connect(settings, "tests"))
            await asyncio.sleep(2 * failover._PATIENCE_SECONDS)
            assert not any(one.done() for one in (*waiting, opening))  # nobody was promoted
            await promote(pair.standby)
            for one in waiting:
                with pytest.raises(TRY_AGAIN):
                    await one
            await ended.wait()
            opened = await opening
            await opened.execute(NOTE)
            await opened.close()
            assert await is_new(settings, pair)
            await pool.execute(NOTE)


async def test_a_primary_that_serves_on_is_left_when_a_statement_waits_there(pair: Pair) -> None:
    """Its commits wait for a standby that follows another primary now. It is not chosen again, although it answers."""
    settings = pair.settings(pair.primary.port, pair.standby.port, database_timeout=DATABASE_SECONDS)
    async with asyncio.timeout(SECONDS):
        session, holder = await connect(settings, "tests"), await asyncpg.connect(pair.primary.url)
        async with holder.transaction():
            await holder.execute("LOCK TABLE written")
            waiting = asyncio.create_task(session.execute(NOTE))
            await promote(pair.standby)
            with pytest.raises(TRY_AGAIN):
                await waiting
        await holder.close()
        assert await is_new(settings, pair)


async def test_one_address_that_leads_to_another_server_now_is_followed(pair: Pair) -> None:
    """A virtual IP address, or a service of Kubernetes. Sessions that are open stay with the old server."""
    async with asyncio.timeout(SECONDS), link_to(pair.primary) as link, proxy_to("127.0.0.1", link.port) as address:
        settings = pair.settings(address.port, database_timeout=DATABASE_SECONDS)
        session = await connect(settings, "tests")
        link.hold()
        waiting = asyncio.create_task(session.execute(NOTE))
        await promote(pair.standby)
        address.lead_to("127.0.0.1", pair.standby.port)
        with pytest.raises(TRY_AGAIN):
            await waiting
        assert await is_new(settings, pair)


async def test_a_slow_statement_is_not_ended_while_its_server_is_the_newest(pair: Pair) -> None:
    """The old primary still takes writes. Another address leads to the same server, as a second pooler does."""
    await promote(pair.standby)
    async with asyncio.timeout(SECONDS), link_to(pair.primary) as old, link_to(pair.standby) as pooler:
        settings = pair.settings(pair.standby.port, pooler.port, old.port, database_timeout=DATABASE_SECONDS)
        session, holder = await connect(settings, "tests"), await asyncpg.connect(pair.standby.url)
        async with holder.transaction():
            await holder.execute("LOCK TABLE written")
            waiting = asyncio.create_task(session.execute(NOTE))
            for link in (old, pooler):
                await until_asked_twice(link)
        await waiting
        await holder.close()
        await session.close()


async def until_asked_twice(link: Link) -> None:
    """When the watch asks for the second time, it has acted on the first answer."""
    while not link.carried.passed_back:
        await asyncio.sleep(0.02)
    while link.open_connections:
        await asyncio.sleep(0.02)
    sent = link.carried.sent
    while link.carried.sent == sent:
        await asyncio.sleep(0.02)
