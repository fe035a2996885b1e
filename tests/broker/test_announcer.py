"""Telling workers of jobs that were just committed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pydantic import SecretStr

from leasehold.broker import make_broker, outbox
from leasehold.broker.announcer import Announcer
from leasehold.db.database import Connection, make_pool
from leasehold.domain.ids import new_id
from leasehold.pipelines.demo.pipeline import noop
from leasehold.settings import Settings
from leasehold.transitions import claims, jobs
from leasehold.transitions.claims import LeaseTerms
from tests.broker.conftest import until
from tests.broker.inbox import Inbox

TERMS = LeaseTerms(new_id(), 30, 5, 5)


async def test_who_is_woken_without_a_broker_finds_the_job_at_once(database_url: str) -> None:
    """Not locked by the bookkeeping of the hint: a look passes over locked jobs, and the next may be seconds away."""
    settings = Settings(_env_file=None, broker="postgres", database_url=SecretStr(database_url))
    broker, inbox = make_broker(settings), Inbox()
    left: list[int] = []
    async with make_pool(settings, "test", 4) as pool:

        async def on_connection(work: Callable[[Connection], Awaitable[None]]) -> None:
            async with pool.acquire() as connection:
                await work(connection)
                left.append(len(await outbox.take(connection, 10)))

        await broker.open()
        await broker.consume({"default": 10}, inbox.put, inbox.wake)
        await until(lambda: broker.connected)
        assert await inbox.next_wake() == "default"  # the first, which comes for every queue
        async with pool.acquire() as connection:
            hints = await jobs.submit(connection, [jobs.NewJob(noop, "tenant")])
            assert await Announcer(broker, on_connection).publish(hints) == 1
            assert left == [0]
            assert inbox.is_empty  # the hint was forgotten before anybody was woken
            assert await inbox.next_wake() == "default"
            assert len(await claims.claim_due(connection, TERMS, ["default"], 10)) == 1
        await broker.close()
