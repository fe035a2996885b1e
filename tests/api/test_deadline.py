"""A request waits for PostgreSQL only so long in all, however many waits it has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
from starlette.types import Message, Receive, Scope, Send

from leasehold.api.http.edge import Edge
from leasehold.api.process import deadline
from leasehold.db.database import Pool, make_pool
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.settings import Settings


@pytest.fixture
async def pool(settings: Settings) -> AsyncIterator[Pool]:
    async with make_pool(settings.model_copy(update={"database_timeout": 20.0}), "tests", 1) as pool:
        yield pool


async def test_a_statement_and_the_rollback_after_it_end_at_the_deadline(pool: Pool) -> None:
    deadline.begin(0.3)
    with pytest.raises(TRY_AGAIN):
        async with deadline.acquired_in_time(pool.acquire()) as connection, connection.transaction():
            await connection.execute("SELECT pg_sleep(15)")
    with pytest.raises(TimeoutError):  # nothing is left for a second try
        async with deadline.acquired_in_time(pool.acquire()):
            raise AssertionError("lent after the deadline")
    deadline.begin(60.0)
    async with deadline.acquired_in_time(pool.acquire()) as connection:  # the pool has dropped the broken connection
        assert await connection.fetchval("SELECT 1") == 1


async def test_a_connection_that_the_deadline_breaks_inside_the_driver_is_an_absent_database(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncpg prepares a statement, and then binds it. Without its protocol a connection raises AttributeError."""
    async with pool.acquire():
        pass  # open: the break would come while it opens
    limit = deadline.begin(60.0)
    prepare = vars(asyncpg.Connection)["_get_statement"]

    async def prepare_and_break(self: Any, *args: Any, **options: Any) -> Any:
        statement = await prepare(self, *args, **options)
        limit._break(self)
        return statement

    monkeypatch.setattr(asyncpg.Connection, "_get_statement", prepare_and_break)
    with pytest.raises(TRY_AGAIN):
        async with deadline.acquired_in_time(pool.acquire()) as connection:
            await connection.fetchval("SELECT 1")
    monkeypatch.undo()
    deadline.begin(60.0)
    with pytest.raises(AttributeError):  # of code that is wrong, in time
        async with deadline.acquired_in_time(pool.acquire()) as connection:
            connection.no_such_method()  # type: ignore[union-attr]  # as it says


async def test_each_wait_takes_from_what_is_left(pool: Pool) -> None:
    async def wait(seconds: float) -> None:
        async with deadline.acquired_in_time(pool.acquire()) as connection:
            await connection.execute("SELECT pg_sleep($1)", seconds)

    for seconds in (0.5, 4.0, 16.0):  # on a busy machine the first wait alone may be longer than the first ones
        deadline.begin(seconds)
        try:
            await wait(0.6 * seconds)
        except TRY_AGAIN:
            continue
        with pytest.raises(TRY_AGAIN):
            await wait(0.6 * seconds)
        return
    raise AssertionError("the first wait never ended in time")


async def test_waiting_for_a_connection_counts_and_other_waits_do_not(pool: Pool) -> None:
    limit = deadline.begin(0.3)
    await asyncio.sleep(0.4)  # a body, a long poll, the store
    async with pool.acquire():
        with pytest.raises(TimeoutError):
            async with deadline.acquired_in_time(pool.acquire()):
                raise AssertionError("the only connection is lent")
    limit.lift()
    async with deadline.acquired_in_time(pool.acquire()) as connection:
        await connection.execute("SELECT pg_sleep(0.4)")


async def test_a_lifted_deadline_breaks_no_connection_that_is_in_use(pool: Pool) -> None:
    for seconds in (0.3, 3.0, 15.0):  # a busy machine may not open a connection within the first ones
        limit, is_lifted = deadline.begin(seconds), False
        try:
            async with deadline.acquired_in_time(pool.acquire()) as connection:
                limit.lift()
                is_lifted = True
                assert await connection.fetchval("SELECT 1 FROM pg_sleep($1)", seconds + 0.2) == 1
        except TRY_AGAIN:
            if is_lifted:
                raise
        else:
            return
    raise AssertionError("no connection was lent in time")


async def test_every_request_has_the_deadline_until_its_answer_begins() -> None:
    answers: list[Message] = []
    limited: list[bool] = []

    async def waits() -> bool:
        try:
            async with deadline.current().waiting():
                await asyncio.sleep(0.2)
        except TimeoutError:
            return True
        return False

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        limited.append(await waits())

    async def late(_scope: Scope, _receive: Receive, _send: Send) -> None:
        async with deadline.current().waiting():
            await asyncio.sleep(0.2)

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        answers.append(message)

    scope: Scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}
    await Edge(app, 0.1)(scope, receive, send)
    assert limited == [False]
    await Edge(late, 0.1)(dict(scope), receive, send)
    assert [answer["status"] for answer in answers if answer["type"] == "http.response.start"] == [200, 503]
