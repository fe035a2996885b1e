"""The samples of transactions show each of them until it ends, and go on after a failover."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

import asyncpg

from chaos.transactions import TransactionWatch
from leasehold.embedded.ports import free_port
from leasehold.runtime.gather import cancel_and_wait
from tests.support.databases import Databases

SECONDS = 60.0
NUMBER = "SELECT pg_current_xact_id()::text"
OTHERS = (
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND pid <> $1"
)


async def seen_until_it_ended(watch: TransactionWatch, url: str, *, beside_a_later_one: bool) -> None:
    """`beside_a_later_one`: a transaction that began later ends earlier."""
    connection, beside = [await asyncpg.connect(url) for _ in range(2)]
    try:
        async with asyncio.timeout(SECONDS):
            async with connection.transaction():
                began = time.time()
                number = int(await connection.fetchval(NUMBER))
                if beside_a_later_one:
                    await beside.fetchval(NUMBER)
                while watch.last_seen(number) < began + 0.2:
                    await asyncio.sleep(0.02)
            ended = time.time()
            async with connection.transaction():
                later = int(await connection.fetchval(NUMBER))
                while watch.last_seen(later) < ended + 0.2:
                    await asyncio.sleep(0.02)
        assert began <= watch.last_seen(number) <= ended
        if beside_a_later_one:  # so a snapshot named it
            assert ended <= watch.may_last_until(number) <= watch.last_seen(later)
            assert began <= watch.begun_by(number) < watch.last_seen(later) < watch.begun_by(2**62)
    finally:
        connection.terminate()
        beside.terminate()


async def test_a_transaction_is_seen_until_it_ends_whatever_happens_to_the_server(postgres: Databases) -> None:
    here = await postgres.create_database()
    place = urlsplit(here)
    nowhere = place._replace(netloc=f"{place.username}:{place.password}@127.0.0.1:{free_port()}").geturl()
    urls = [nowhere]
    watch = TransactionWatch(lambda: urls[-1])
    watching = asyncio.create_task(watch.watch())
    try:
        await asyncio.sleep(0.2)
        assert watch.last_seen(2**62) == 0
        urls.append(here)
        await seen_until_it_ended(watch, here, beside_a_later_one=True)
        connection = await asyncpg.connect(here)
        async with asyncio.timeout(SECONDS):
            while not await connection.fetchval(OTHERS, connection.get_server_pid()):  # the watch may just reconnect
                await asyncio.sleep(0.02)
        await connection.close()
        await seen_until_it_ended(watch, here, beside_a_later_one=False)
        urls.append(nowhere)
        await asyncio.sleep(0.5)
        left = time.time()
        await asyncio.sleep(0.3)
        assert 0 < watch.last_seen(2**62) < left
    finally:
        await cancel_and_wait(watching)
