"""A connection leads to a server that takes writes, whatever the URL's hosts or its one address led to before."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pydantic import SecretStr

from leasehold.broker import make_broker
from leasehold.db import servers
from leasehold.db.database import Pool, connect, make_pool, migrate
from leasehold.embedded.postgres import DATABASE
from leasehold.settings import Settings
from tests.api.proxy import proxy_to
from tests.failover.pair import NOTE, Pair, pair_in

SECONDS = 60.0
#: Limits of a host, one after another: a busy machine may keep the primary from its processor for longer than one.
HOST_SECONDS = (0.5, 2.0, 8.0)


@pytest.fixture(scope="module")
async def pair(run_directory: Path) -> AsyncIterator[Pair]:
    async with pair_in(run_directory / "pair") as pair:
        yield pair


async def test_of_several_hosts_a_standby_is_passed_over(pair: Pair) -> None:
    settings = pair.settings(pair.standby.port, pair.primary.port)
    async with make_pool(settings, "tests", 2) as pool:
        await pool.execute(NOTE)
    connection = await connect(settings, "tests")
    await connection.execute(NOTE)
    await connection.close()


@pytest.mark.parametrize("form", ["@{0},{1}/{2}", "@/{2}?host={0},{1}", "@/{2}?host=127.0.0.1,127.0.0.1&port={3},{4}"])
async def test_every_form_of_several_hosts_leads_everything_to_the_primary(pair: Pair, form: str) -> None:
    ports = pair.standby.port, pair.primary.port
    where = form.format(*(f"127.0.0.1:{port}" for port in ports), DATABASE, *ports)
    login = pair.settings(0).database_url.get_secret_value().partition("@")[0]
    room: dict[str, Any] = {"database_timeout": 60.0, "database_host_timeout": 30.0}  # both hosts live
    settings = Settings(_env_file=None, broker="postgres", database_url=SecretStr(login + where), **room)
    await migrate(settings.database_url.get_secret_value(), "0001")
    connection = await connect(settings, "tests")
    await connection.execute(NOTE)
    await connection.close()
    async with make_pool(settings, "tests", 1) as pool:
        await pool.execute(NOTE)
    broker = make_broker(settings)
    await broker.open()
    while not broker.connected:
        await asyncio.sleep(0.01)
    await broker.close()


async def test_several_hosts_of_the_environment_lead_to_the_primary(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncpg reads PGHOST by itself: it would wait for a silent host, and use the standby."""
    login = pair.settings(0).database_url.get_secret_value().partition("@")[0]
    settings = Settings(
        _env_file=None, database_url=SecretStr(f"{login}@/{DATABASE}"), database_timeout=60.0, database_host_timeout=0.5
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ports = silent.getsockname()[1], pair.standby.port, pair.primary.port
        monkeypatch.setenv("PGHOST", "127.0.0.1,127.0.0.1,127.0.0.1")
        monkeypatch.setenv("PGPORT", ",".join(map(str, ports)))
        for _ in HOST_SECONDS:  # each attempt gives a host twice the time
            with suppress(TimeoutError):
                connection = await connect(settings, "tests")
                break
        await connection.execute(NOTE)
        await connection.close()
        settings = settings.model_copy(update={"database_host_timeout": 30.0})  # the silent host is not asked again
        async with make_pool(settings, "tests", 1) as pool:
            await pool.execute(NOTE)


async def test_where_no_host_takes_writes_one_that_reads_is_used(pair: Pair) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        connection = await connect(pair.settings(nobody.getsockname()[1], pair.standby.port), "tests")
        assert await connection.fetchval("SELECT count(*) FROM written") >= 0
        await connection.close()


async def test_a_silent_host_costs_its_own_limit_once_and_the_next_is_used(pair: Pair) -> None:
    async def times_asked(host_seconds: float) -> int:
        """How often the silent host is asked for two connections."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port, limits = silent.getsockname()[1], {"database_host_timeout": host_seconds}
            settings = pair.settings(port, pair.primary.port, database_timeout=3 * host_seconds, **limits)
            async with make_pool(settings, "tests", 1) as pool:
                await pool.execute(NOTE)
                await pool.expire_connections()
                await pool.execute(NOTE)  # goes to the host that took writes before
            silent.setblocking(False)
            asked = 0
            with suppress(BlockingIOError):
                while True:
                    silent.accept()[0].close()
                    asked += 1
        return asked

    for host_seconds in HOST_SECONDS:
        with suppress(TimeoutError):
            if await times_asked(host_seconds) == 1:
                return
    pytest.fail("the silent host was asked for both connections, or used up the time of all")


@pytest.mark.parametrize("other", ["silent", "refuses", "only reads"])
async def test_a_busy_host_gets_more_time_in_later_attempts(pair: Pair, other: str) -> None:
    """After a failover all processes connect at once. If each gave up as soon as before, none might ever connect."""

    async def answer_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.5)
        with suppress(OSError):
            from_server, to_server = await asyncio.open_connection("127.0.0.1", pair.primary.port)
            await asyncio.gather(_copy(reader, to_server), _copy(from_server, writer))

    async def connects_to_primary(settings: Settings) -> bool:
        try:
            connection = await connect(settings, "tests")
        except TimeoutError:
            return False
        reads_only = await connection.fetchval("SELECT pg_is_in_recovery()")
        connection.terminate()
        return not reads_only

    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as refuses:
        refuses.bind(("127.0.0.1", 0))
        ports = {"silent": silent.getsockname()[1], "refuses": refuses.getsockname()[1]}
        async with await asyncio.start_server(answer_late, "127.0.0.1", 0) as busy:
            hosts = busy.sockets[0].getsockname()[1], ports.get(other, pair.standby.port)
            settings = pair.settings(*hosts, database_timeout=8.0, database_host_timeout=0.2)
            assert not await connects_to_primary(settings)
            async with asyncio.timeout(SECONDS):
                while not await connects_to_primary(settings):
                    await asyncio.sleep(0.01)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()


async def test_hosts_that_are_all_silent_are_a_timeout(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = one.getsockname()[1], other.getsockname()[1]
        settings = pair.settings(*ports, database_timeout=0.3, database_host_timeout=0.2)
        with pytest.raises(TimeoutError):
            await connect(settings, "tests")


async def test_the_only_host_has_no_more_time_than_all_hosts_together(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts the connection, and is silent when it is asked for its timeline."""

    async def never(_connection: Any, _timeout: float) -> int | None:
        return await asyncio.Future()

    monkeypatch.setattr(servers, "_read_timeline", never)
    async with asyncio.timeout(SECONDS) as whole:
        with pytest.raises(TimeoutError):
            await connect(pair.settings(pair.primary.port, database_timeout=0.5), "tests")
    assert not whole.expired()


async def test_a_host_that_answers_and_then_fails_is_passed_over(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pooler may accept a connection while its server is down, and reports no state of it."""
    async with proxy_to("127.0.0.1", pair.primary.port) as pooler:
        monkeypatch.setattr(servers, "_REPORTED", ("reported by no server", servers._REPORTED[1]))
        connect_to = servers._connect

        async def connect_and_cut(url: Any, host: Any, port: Any, *more: Any) -> Any:
            connection = await connect_to(url, host, port, *more)
            if port == pooler.port:
                await pooler.cut()
            return connection

        monkeypatch.setattr(servers, "_connect", connect_and_cut)
        connection = await connect(pair.settings(pooler.port, pair.primary.port), "tests")
        await connection.execute(NOTE)
        await connection.close()


async def test_a_pool_leaves_a_server_that_only_reads_once_the_address_leads_elsewhere(pair: Pair) -> None:
    async with (
        proxy_to("127.0.0.1", pair.standby.port) as address,
        make_pool(pair.settings(address.port), "tests", 3) as pool,
    ):
        with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
            await pool.execute(NOTE)
        assert await pool.fetchval("SELECT count(*) FROM written") >= 0
        address.lead_to("127.0.0.1", pair.primary.port)
        await asyncio.wait_for(_until_it_writes(pool), 60)


async def _until_it_writes(pool: Pool) -> None:
    while True:
        try:
            await pool.execute(NOTE)
        except asyncpg.ReadOnlySQLTransactionError:
            await asyncio.sleep(0.05)
        else:
            return


async def test_migrations_go_to_the_host_that_takes_writes(pair: Pair) -> None:
    settings = pair.settings(pair.standby.port, pair.primary.port)
    await migrate(settings.database_url.get_secret_value())
    connection = await connect(settings, "tests")
    assert await connection.fetchval("SELECT count(*) FROM job") == 0
    await connection.close()


async def test_a_connection_that_is_terminated_inside_the_driver_is_a_lost_connection(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncpg prepares a statement, and then binds it. Without its protocol a connection raises AttributeError."""
    connection = await connect(pair.settings(pair.primary.port), "tests")
    prepare = vars(asyncpg.Connection)["_get_statement"]

    async def has_a_bug(self: Any, *args: Any, **options: Any) -> Any:
        return self.no_such_method()

    monkeypatch.setattr(asyncpg.Connection, "_get_statement", has_a_bug)
    with pytest.raises(AttributeError, match="no_such_method"):
        await connection.fetchval("SELECT 1")

    async def prepare_and_terminate(self: Any, *args: Any, **options: Any) -> Any:
        statement = await prepare(self, *args, **options)
        self.terminate()
        return statement

    monkeypatch.setattr(asyncpg.Connection, "_get_statement", prepare_and_terminate)
    with pytest.raises(asyncpg.InterfaceError):
        await connection.fetchval("SELECT 1")
