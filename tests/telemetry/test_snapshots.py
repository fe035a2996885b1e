"""Whatever keeps vacuum from its work is told: also what has no session, or the session of another role."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest

from leasehold.db.database import Connection
from leasehold.embedded import postgres
from leasehold.embedded.postgres import Postgres
from leasehold.exporter.exporter import Exporter, families, query_all
from leasehold.exporter.snapshots import SnapshotAges
from leasehold.selfcheck import check_database
from leasehold.settings import Settings
from tests.failover.cluster import Cluster, cluster_in
from tests.telemetry.page import Page

SECONDS = 60.0


@pytest.fixture(scope="module")
async def cluster(run_directory: Path) -> AsyncIterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(postgres.DURABLE, "max_prepared_transactions", "5")
        patch.setitem(postgres.DURABLE, "wal_receiver_status_interval", "1s")
        async with cluster_in(run_directory / "snapshots", "asynchronous") as cluster:
            async with session_of(cluster.primary) as primary:
                await primary.execute("CREATE TABLE written (n int); CREATE ROLE plain; GRANT ALL ON written TO plain")
                await primary.execute("CREATE ROLE other; GRANT ALL ON written TO other")
            async with session_of(cluster.standby) as standby:
                await standby.execute("ALTER SYSTEM SET hot_standby_feedback = on")
                await standby.execute("SELECT pg_reload_conf()")
            yield cluster


@asynccontextmanager
async def session_of(server: Postgres, role: str | None = None) -> AsyncIterator[Connection]:
    session = await asyncpg.connect(server.url)
    try:
        if role is not None:
            await session.execute(f"SET ROLE {role}")
        yield session
    finally:
        session.terminate()


@asynccontextmanager
async def read_of_another_role(cluster: Cluster) -> AsyncIterator[None]:
    async with session_of(cluster.primary, "other") as session:
        await session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM written")
        yield


@asynccontextmanager
async def write_between_two_statements(cluster: Cluster) -> AsyncIterator[None]:
    """It has its transaction's id, and no snapshot."""
    async with session_of(cluster.primary, "other") as session:
        await session.execute("BEGIN; INSERT INTO written VALUES (1)")
        yield


@asynccontextmanager
async def prepared_transaction(cluster: Cluster) -> AsyncIterator[None]:
    async with session_of(cluster.primary) as session:
        await session.execute("BEGIN; INSERT INTO written VALUES (1)")
        await session.execute("PREPARE TRANSACTION 'forgotten'")
        try:
            yield
        finally:
            await session.execute("ROLLBACK PREPARED 'forgotten'")


@asynccontextmanager
async def read_of_the_standby(cluster: Cluster) -> AsyncIterator[None]:
    async with session_of(cluster.standby) as session:
        await session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM written")
        yield


@asynccontextmanager
async def slot_of_the_standby(cluster: Cluster) -> AsyncIterator[None]:
    """What the standby needs stands in its slot, and in no session."""
    async with session_of(cluster.primary) as primary, session_of(cluster.standby) as standby:
        await primary.execute("SELECT pg_create_physical_replication_slot('standby')")
        await use_slot(standby, "standby")
        await until(primary, "SELECT xmin IS NOT NULL FROM pg_replication_slots")
        async with read_of_the_standby(cluster):
            yield
        await use_slot(standby, "")
        await until(primary, "SELECT NOT active FROM pg_replication_slots")
        await primary.execute("SELECT pg_drop_replication_slot('standby')")


async def use_slot(standby: Connection, name: str) -> None:
    await standby.execute(f"ALTER SYSTEM SET primary_slot_name = '{name}'")
    await standby.execute("SELECT pg_reload_conf()")


async def until(session: Connection, condition: str) -> None:
    async with asyncio.timeout(SECONDS):
        while not await session.fetchval(condition):
            await asyncio.sleep(0.05)


class Told:
    """The exporter's answers, by a clock of the test's own."""

    def __init__(self, session: Connection) -> None:
        self._session = session
        self._exporter = Exporter(Settings(_env_file=None), uuid4(), pool=None)  # type: ignore[arg-type]  # it is given its answers here
        self.now = 0.0
        self._exporter._snapshots = SnapshotAges(clock=lambda: self.now)

    async def round(self) -> tuple[float, float]:
        """The seconds and the transactions of the oldest snapshot."""
        rows = await query_all(self._session, 30.0, includes=lambda name: name == "snapshots")
        page = Page(families(self._exporter._with_ages(rows)))
        names = ("leasehold_database_snapshot_oldest_seconds", "leasehold_database_snapshot_age_transactions")
        seconds, transactions = (page[name] for name in names)
        assert seconds is not None
        assert transactions is not None
        return seconds, transactions

    async def reaches(self, reached: Callable[[float, float], bool]) -> None:
        """A standby tells its primary what it needs within a second."""
        async with asyncio.timeout(SECONDS):
            while not reached(*await self.round()):
                await asyncio.sleep(0.1)


Holder = Callable[[Cluster], AbstractAsyncContextManager[None]]
HOLDERS: list[Holder] = [
    read_of_another_role,
    write_between_two_statements,
    prepared_transaction,
    read_of_the_standby,
    slot_of_the_standby,
]


@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: holder.__name__)
async def test_whatever_keeps_vacuum_from_its_work_is_told_also_to_a_role_without_rights(
    cluster: Cluster, holder: Holder
) -> None:
    async with session_of(cluster.primary, "plain") as exporting, session_of(cluster.primary) as writing:
        told = Told(exporting)
        await told.round()
        async with holder(cluster):
            await cluster.replicated()
            for _ in range(100):
                await writing.execute("INSERT INTO written VALUES (1)")
            await told.reaches(lambda _seconds, transactions: transactions >= 100)
            told.now = 1000.0
            await told.reaches(lambda seconds, _transactions: seconds >= 1000)
        await told.reaches(lambda seconds, transactions: (seconds, transactions) < (1000, 100))


async def test_a_standby_that_is_up_to_date_keeps_nothing_however_long_nobody_writes(cluster: Cluster) -> None:
    async with session_of(cluster.primary, "plain") as exporting:
        await until(exporting, "SELECT bool_or(backend_xmin IS NOT NULL) FROM pg_stat_activity WHERE datname IS NULL")
        told = Told(exporting)
        await told.reaches(lambda _seconds, transactions: transactions == 0)
        told.now = 1000.0
        await told.reaches(lambda seconds, _transactions: seconds == 0)


async def test_the_doctor_says_whether_the_role_sees_what_others_do(cluster: Cluster) -> None:
    async def said(session: Connection) -> tuple[bool, str, str]:
        (finding,) = [
            finding
            for finding in await check_database(session, Settings(_env_file=None))
            if finding.part == "role" and "sessions" in finding.found
        ]
        return finding.ok, finding.found, finding.meaning

    async with session_of(cluster.primary) as admin, session_of(cluster.primary, "plain") as plain:
        await admin.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO plain")
        is_ok, found, meaning = await said(plain)
        assert (is_ok, found) == (True, "sees its own sessions only")
        assert "GRANT pg_read_all_stats TO plain" in meaning
        assert (await said(admin))[1] == "sees the sessions of all roles"
