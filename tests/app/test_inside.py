"""`submit_in`: the run commits and vanishes with the caller's own transaction, on every driver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row
from pydantic import BaseModel, SecretStr
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from leasehold import App, Run, Unique
from leasehold.app import connection as connection_of_app
from leasehold.app import link
from leasehold.db.database import Connection
from leasehold.domain.errors import Invalid, TransactionRefused
from leasehold.domain.ids import new_id
from tests.app.conftest import Serve
from tests.support.broker_room import BROKER_ROOM

Using = Callable[..., App]
SECONDS = 60.0
app = App("shop")


class Order(BaseModel):
    id: int
    note: str = ""


@app.task
def send_receipt(order: Order) -> str:
    return f"receipt {order.id}"


@app.task
def nothing() -> None: ...


@app.task(debounce=timedelta(hours=1), unique=Unique(by=("id",)))
def publish(order: Order) -> None: ...


@pytest.fixture(autouse=True)
def _use(using: Using) -> None:
    using(app)


@dataclass
class Open:
    """A connection of the user's in a transaction of theirs. `write` inserts the user's own row beside."""

    submit: Callable[..., Awaitable[Run[Any]]]
    write: Callable[[], Awaitable[None]]
    commit: Callable[[], Awaitable[None]]
    rollback: Callable[[], Awaitable[None]]
    fail: Callable[[], Awaitable[None]]


Opener = Callable[..., AbstractAsyncContextManager[Open]]
INSERT = "INSERT INTO mine VALUES (1)"
FAIL = "SELECT 1 / 0"


def alchemy(url: str, driver: str) -> str:
    return url.replace("postgresql://", f"postgresql+{driver}://", 1)


def _async(function: Callable[[], Any]) -> Callable[[], Awaitable[None]]:
    async def call() -> None:
        await asyncio.to_thread(function)

    return call


def _submits_in(connection: Any) -> Callable[..., Awaitable[Run[Any]]]:
    async def submit(task: Any, *args: Any, **kwargs: Any) -> Run[Any]:
        run: Run[Any] = await asyncio.to_thread(task.submit_in, connection, *args, **kwargs)
        return run

    return submit


def _asubmits_in(connection: Any) -> Callable[..., Awaitable[Run[Any]]]:
    async def submit(task: Any, *args: Any, **kwargs: Any) -> Run[Any]:
        run: Run[Any] = await task.asubmit_in(connection, *args, **kwargs)
        return run

    return submit


def _suppressed(function: Callable[[], Any]) -> None:
    with pytest.raises(Exception, match="division by zero"):
        function()


@asynccontextmanager
async def of_asyncpg(url: str, *, autocommit: bool = False) -> AsyncIterator[Open]:
    async with asyncpg.create_pool(url, min_size=0, max_size=1) as pool, pool.acquire() as connection:
        transaction = connection.transaction()

        async def fail() -> None:
            with pytest.raises(asyncpg.DivisionByZeroError):
                await connection.execute(FAIL)

        async def write() -> None:
            await connection.execute(INSERT)

        if not autocommit:
            await transaction.start()
        yield Open(_asubmits_in(connection), write, transaction.commit, transaction.rollback, fail)


@asynccontextmanager
async def of_psycopg(url: str, *, autocommit: bool = False) -> AsyncIterator[Open]:
    with psycopg.connect(url, autocommit=autocommit) as connection:
        yield Open(
            _submits_in(connection),
            _async(lambda: connection.execute(INSERT)),
            _async(connection.commit),
            _async(connection.rollback),
            _async(lambda: _suppressed(lambda: connection.execute(FAIL))),
        )


@asynccontextmanager
async def of_async_psycopg(url: str, *, autocommit: bool = False) -> AsyncIterator[Open]:
    async with await psycopg.AsyncConnection.connect(url, autocommit=autocommit, row_factory=dict_row) as connection:

        async def write() -> None:
            await connection.execute(INSERT)

        async def fail() -> None:
            with pytest.raises(psycopg.errors.DivisionByZero):
                await connection.execute(FAIL)

        yield Open(_asubmits_in(connection), write, connection.commit, connection.rollback, fail)


def _level(autocommit: bool) -> dict[str, str]:
    return {"isolation_level": "AUTOCOMMIT"} if autocommit else {}


def _of_sqlalchemy(make: Callable[[Any], Any]) -> Opener:
    @asynccontextmanager
    async def opened(url: str, *, autocommit: bool = False) -> AsyncIterator[Open]:
        engine = sqlalchemy.create_engine(alchemy(url, "psycopg"), **_level(autocommit))
        with make(engine) as connection:
            yield Open(
                _submits_in(connection),
                _async(lambda: connection.execute(sqlalchemy.text(INSERT))),
                _async(connection.commit),
                _async(connection.rollback),
                _async(lambda: _suppressed(lambda: connection.execute(sqlalchemy.text(FAIL)))),
            )
            connection.rollback()
        engine.dispose()

    return opened


def _of_async_sqlalchemy(make: Callable[[Any], Any], driver: str) -> Opener:
    @asynccontextmanager
    async def opened(url: str, *, autocommit: bool = False) -> AsyncIterator[Open]:
        engine = create_async_engine(alchemy(url, driver), **_level(autocommit))
        async with make(engine) as connection:

            async def write() -> None:
                await connection.execute(sqlalchemy.text(INSERT))

            async def fail() -> None:
                with pytest.raises(Exception, match="division by zero"):
                    await connection.execute(sqlalchemy.text(FAIL))

            yield Open(_asubmits_in(connection), write, connection.commit, connection.rollback, fail)
            await connection.rollback()
        await engine.dispose()

    return opened


OPENERS: dict[str, Opener] = {
    "asyncpg": of_asyncpg,
    "psycopg": of_psycopg,
    "async psycopg": of_async_psycopg,
    "Session": _of_sqlalchemy(Session),
    "Connection": _of_sqlalchemy(lambda engine: engine.connect()),
    "AsyncSession": _of_async_sqlalchemy(AsyncSession, "asyncpg"),
    "AsyncConnection": _of_async_sqlalchemy(lambda engine: engine.connect(), "asyncpg"),
    "AsyncSession on psycopg": _of_async_sqlalchemy(AsyncSession, "psycopg"),
}
every_driver = pytest.mark.parametrize("name", OPENERS)


@pytest.fixture
async def mine(connection: Connection) -> None:
    await connection.execute("CREATE TABLE mine (id int)")


@pytest.fixture
def patient(using: Using, monkeypatch: pytest.MonkeyPatch) -> None:
    """The app leaves no hint to a relay because RabbitMQ is slow, as on a busy machine. No worker is there to relay."""
    monkeypatch.setattr(connection_of_app, "_ANNOUNCE_SECONDS", SECONDS)
    monkeypatch.setattr(link, "_BROKER_SECONDS", SECONDS)
    using(app, **BROKER_ROOM)


async def counts(connection: Connection) -> tuple[int, ...]:
    tables = ("mine", "job", "task", "run", "history", "outbox", "idempotency")
    return tuple([await connection.fetchval(f"SELECT count(*) FROM {table}") for table in tables])


@every_driver
async def test_the_run_commits_with_the_callers_row_and_a_worker_runs_it(
    name: str, mine: None, connection: Connection, database_url: str, serve: Serve, patient: None
) -> None:
    async with OPENERS[name](database_url) as own:
        await own.write()
        run = await own.submit(send_receipt, Order(id=7, note="100% :of \\ it"), key="order-7", tags={"a": "b"})
        bare = await own.submit(nothing)
        assert await counts(connection) == (0,) * 7
        await own.commit()
    before = await counts(connection)
    assert (before[:5], before[6]) == ((1, 2, 2, 2, 2), 1)
    if "Session" in name:  # it tells of its commit: the app announces it, and no worker is there that could
        async with asyncio.timeout(SECONDS):
            while await connection.fetchval("SELECT count(*) FROM outbox"):
                await asyncio.sleep(0.02)
    else:
        assert before[5] == 2
    params = await connection.fetchval("SELECT params FROM job WHERE id = $1", run.id)
    assert params == {"id": 7, "note": "100% :of \\ it"}
    assert (await send_receipt.asubmit(Order(id=7, note="100% :of \\ it"), key="order-7")).id == run.id
    if name == "asyncpg":  # one is enough: the rows are the same
        async with serve(app, poll_seconds=600.0), asyncio.timeout(SECONDS):  # the relay's hint, and no poll
            assert await run == "receipt 7"
            assert await bare is None


@every_driver
async def test_the_run_vanishes_with_a_rollback(
    name: str, mine: None, connection: Connection, database_url: str
) -> None:
    async with OPENERS[name](database_url) as own:
        await own.write()
        await own.submit(send_receipt, Order(id=7), key="order-7")
        await own.rollback()
    assert await counts(connection) == (0,) * 7
    assert await (await send_receipt.asubmit(Order(id=8), key="order-7")).astatus() in ("pending", "queued")


@every_driver
async def test_autocommit_is_refused_before_anything_is_written(
    name: str, mine: None, connection: Connection, database_url: str
) -> None:
    async with OPENERS[name](database_url, autocommit=True) as own:
        with pytest.raises(TransactionRefused, match=r"autocommit|commits each statement"):
            await own.submit(send_receipt, Order(id=7), key="k")
    assert await counts(connection) == (0,) * 7


@every_driver
async def test_a_failed_transaction_is_refused(
    name: str, mine: None, connection: Connection, database_url: str
) -> None:
    async with OPENERS[name](database_url) as own:
        await own.fail()
        with pytest.raises(TransactionRefused, match="has failed"):
            await own.submit(send_receipt, Order(id=7))
        await own.rollback()
    assert await counts(connection) == (0,) * 7


@pytest.mark.parametrize("name", ["asyncpg", "async psycopg", "Session", "AsyncSession"])  # of each form of parameters
async def test_declared_limits_hold_the_run_and_a_reused_key_is_refused(
    name: str, mine: None, connection: Connection, database_url: str
) -> None:
    await connection.execute(
        "INSERT INTO gate (tenant_id, key, at_most, per_minute, declared) VALUES ('*', 'tenant', 1, NULL, true),"
        " ('me', 'queue:default', 3, 7, true)"
    )
    async with OPENERS[name](database_url) as own:
        run = await own.submit(send_receipt, Order(id=7), key="k", delay=None)
        with pytest.raises(Invalid, match=r"The key '.+' of .+ was used with other arguments"):
            await own.submit(send_receipt, Order(id=8), key="k")
        await own.commit()
    waits = await connection.fetch("SELECT key, admitted_at FROM gate_job WHERE job_id = $1 ORDER BY key", run.id)
    assert [tuple(row) for row in waits] == [("queue:default", None), ("tenant", None)]


@every_driver
async def test_a_debounced_run_takes_the_last_arguments(
    name: str, mine: None, connection: Connection, database_url: str
) -> None:
    run = await publish.asubmit(Order(id=7, note="first"))
    async with OPENERS[name](database_url) as own:
        assert await own.submit(publish, Order(id=7, note="100% of 'second'")) == run
        assert await own.submit(publish, Order(id=8)) != run
        await own.commit()
    assert await connection.fetchval("SELECT params ->> 'note' FROM job WHERE id = $1", run.id) == "100% of 'second'"
    assert await connection.fetchval("SELECT count(*) FROM job") == 2


async def test_psycopgs_transaction_block_on_an_autocommit_connection_is_a_transaction(
    mine: None, connection: Connection, database_url: str
) -> None:
    with psycopg.connect(database_url, autocommit=True) as own, own.transaction():
        send_receipt.submit_in(own, Order(id=7))
    assert (await counts(connection))[1] == 1


async def test_a_savepoint_and_a_rollback_announce_nothing_and_what_commits_later_is_announced(
    mine: None, connection: Connection, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[int] = []
    monkeypatch.setattr(app.connections, "announce_soon", lambda written: announced.append(len(written.hints)))
    engine = sqlalchemy.create_engine(alchemy(database_url, "psycopg"))
    with Session(engine) as session:
        nothing.submit_in(session)
        session.rollback()
        session.commit()
        nothing.submit_in(session)
        with session.begin_nested():
            nothing.submit_in(session)
        assert announced == []
        session.commit()
        assert announced == [1, 1]
        session.commit()
        nothing.submit_in(session)
        session.commit()
    assert announced == [1, 1, 1]
    engine.dispose()


async def test_a_program_that_ends_after_its_commit_has_announced_it(
    mine: None, connection: Connection, database_url: str, patient: None
) -> None:
    """The app has no connection of its own yet. Closing it waits for the announcement."""
    engine = sqlalchemy.create_engine(alchemy(database_url, "psycopg"))
    with Session(engine) as session, session.begin():
        nothing.submit_in(session)
    await asyncio.to_thread(app.close)
    engine.dispose()
    assert await connection.fetchval("SELECT count(*) FROM outbox") == 0


async def test_a_commit_succeeds_while_the_installations_servers_are_away(
    mine: None, connection: Connection, database_url: str, using: Callable[..., App]
) -> None:
    using(app, database_url=SecretStr("postgresql://nobody@127.0.0.1:1/nothing"))
    engine = sqlalchemy.create_engine(alchemy(database_url, "psycopg"))
    with Session(engine) as session, session.begin():
        nothing.submit_in(session)
    await asyncio.to_thread(app.close)
    engine.dispose()
    assert await connection.fetchval("SELECT count(*) FROM outbox") == 1  # the relay's


async def test_a_scoped_session_is_its_session_and_flushes_nothing(
    mine: None, connection: Connection, database_url: str
) -> None:
    engine = sqlalchemy.create_engine(alchemy(database_url, "psycopg"))
    session = scoped_session(sessionmaker(engine))
    send_receipt.options(id=(mine_id := new_id())).submit_in(session, Order(id=7))
    session.commit()
    session.remove()
    engine.dispose()
    assert await connection.fetchval("SELECT id FROM job") == mine_id


class OfDjango:
    """As Django's wrapper of a connection: it connects when it must, and commits nothing by itself."""

    __module__ = "django.db.backends.postgresql.base"

    def __init__(self, url: str) -> None:
        self._url = url
        self.connection: psycopg.Connection[Any] | None = None

    def ensure_connection(self) -> None:
        self.connection = self.connection or psycopg.connect(self._url)


class OfAThirdParty(OfDjango):
    """Backends for Django that pool or trace connections have modules of their own."""


@pytest.mark.parametrize("kind", [OfDjango, OfAThirdParty])
async def test_a_backend_for_django_is_a_connection_of_django(
    database_url: str, connection: Connection, kind: type[OfDjango]
) -> None:
    wrapper = kind(database_url)
    run = send_receipt.submit_in(wrapper, Order(id=7))
    assert wrapper.connection is not None
    wrapper.connection.commit()
    wrapper.connection.close()
    assert await connection.fetchval("SELECT id FROM job") == run.id


async def test_a_driver_below_django_that_is_not_supported_is_named(database_url: str) -> None:
    wrapper = OfAThirdParty(database_url)
    wrapper.connection = Odd()  # type: ignore[assignment]  # that is the test
    with pytest.raises(TypeError, match=r"OfAThirdParty over .*Odd is not a connection"):
        send_receipt.submit_in(wrapper, Order(id=7))


class Odd:
    """The connection of a driver that nobody knows."""


async def test_what_is_no_connection_and_a_driver_of_the_other_kind_are_refused(database_url: str) -> None:
    with pytest.raises(TypeError, match=r"^str is not a connection to submit in"):
        send_receipt.submit_in("postgresql://", Order(id=7))
    with psycopg.connect(database_url) as own, pytest.raises(TypeError, match=r"call task\.submit_in"):
        await send_receipt.asubmit_in(own, Order(id=7))
    async with asyncpg.create_pool(database_url, min_size=0, max_size=1) as pool, pool.acquire() as connection:
        with pytest.raises(TypeError, match=r"await task\.asubmit_in"):
            send_receipt.submit_in(connection, Order(id=7))
