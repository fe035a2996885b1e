"""What `leasehold migrate --plan` says of each statement, compared with what PostgreSQL does when it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import asyncpg
import pytest

from leasehold.db.schemas import CORE, known_revisions
from leasehold.db.upgrading.locks import MODES, Lock, SchemaTables
from leasehold.db.upgrading.plan import PlannedRevision, PlannedStatement, plan_of, tables_of
from tests.support.databases import Databases

SECONDS = 60.0
#: The newest revision of the release that is out: tests/chaos/test_release.py.
RELEASED = "0018_uploads_of_attempts"
_TABLES = """
SELECT c.oid, c.relname FROM pg_class c WHERE c.relkind IN ('r', 'p') AND c.relnamespace = 'public'::regnamespace
"""
_LOCKS = "SELECT relation, mode FROM pg_locks WHERE pid = $1 AND relation = ANY($2) AND granted"
_WORK = """
SELECT oid, relfilenode AS file,
    coalesce(pg_stat_get_numscans(oid), 0) + coalesce(pg_stat_get_xact_numscans(oid), 0)
    + (SELECT coalesce(sum(pg_stat_get_xact_numscans(indexrelid)), 0) FROM pg_index WHERE indrelid = c.oid) AS scans
FROM pg_class c WHERE oid = ANY($1)
"""
#: Of a schema: columns, indexes, constraints, functions.
_DESCRIPTIONS = (
    """
    SELECT table_name, column_name, data_type, is_nullable, column_default FROM information_schema.columns
    WHERE table_schema = 'public' AND table_name <> 'alembic_version' ORDER BY 1, 2
    """,
    "SELECT indexdef FROM pg_indexes WHERE schemaname = 'public' AND tablename <> 'alembic_version' ORDER BY 1",
    """
    SELECT conrelid::regclass::text, pg_get_constraintdef(oid) FROM pg_constraint
    WHERE connamespace = 'public'::regnamespace AND contype <> 'n' AND conname <> 'alembic_version_pkc' ORDER BY 1, 2
    """,
    "SELECT proname, prosrc, proconfig FROM pg_proc WHERE pronamespace = 'public'::regnamespace ORDER BY 1",
)


@dataclass
class Measuring:
    """`connection` runs the statements; `other` looks on, and keeps what runs beside writers waiting."""

    connection: asyncpg.Connection[asyncpg.Record]
    other: asyncpg.Connection[asyncpg.Record]
    third: asyncpg.Connection[asyncpg.Record]

    async def tables(self) -> dict[int, str]:
        return {row["oid"]: row["relname"] for row in await self.connection.fetch(_TABLES)}

    async def locks_of(self, statement: str, tables: dict[int, str]) -> set[Lock]:
        """Run the statement. Returns the strongest lock on each of the tables, and what was done with the table."""
        concurrently = " CONCURRENTLY " in statement
        measure = self._beside_writers if concurrently else self._in_a_transaction
        return await measure(statement, tables)

    async def _in_a_transaction(self, statement: str, tables: dict[int, str]) -> set[Lock]:
        async with self.connection.transaction():
            before = await self.connection.fetch(_WORK, list(tables))
            await self.connection.execute(statement)
            locks = await self.connection.fetch(_LOCKS, self.connection.get_server_pid(), list(tables))
            after = await self.connection.fetch(_WORK, list(tables))
        return _compared(tables, locks, before, after)

    async def _beside_writers(self, statement: str, tables: dict[int, str]) -> set[Lock]:
        """It waits for writers that came before it, and holds its lock meanwhile."""
        before = await self.connection.fetch(_WORK, list(tables))
        async with asyncio.timeout(SECONDS), self.other.transaction():
            for name in tables.values():
                await self.other.execute(f'LOCK TABLE "{name}" IN ROW EXCLUSIVE MODE')
            running = asyncio.create_task(self.connection.execute(statement))
            waiting = "SELECT 1 FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'virtualxid'"
            while not await self.third.fetchval(waiting, self.connection.get_server_pid()):
                assert not running.done(), statement
            locks = await self.third.fetch(_LOCKS, self.connection.get_server_pid(), list(tables))
        await running
        await self.connection.execute("SELECT pg_stat_force_next_flush()")
        after = await self.connection.fetch(_WORK, list(tables))
        return _compared(tables, locks, before, after)


def _compared(
    tables: dict[int, str],
    locks: list[asyncpg.Record],
    before: list[asyncpg.Record],
    after: list[asyncpg.Record],
) -> set[Lock]:
    modes: dict[int, str] = {}
    for row in locks:
        mode = _sql_name(row["mode"])
        if MODES.index(mode) >= MODES.index(modes.get(row["relation"], mode)):
            modes[row["relation"]] = mode
    was = {row["oid"]: row for row in before}
    work = {}
    for row in after:
        scanned = row["scans"] > was[row["oid"]]["scans"]
        work[row["oid"]] = "rewrite" if row["file"] != was[row["oid"]]["file"] else "scan" if scanned else ""
    return {Lock(tables[oid], mode, work.get(oid, "")) for oid, mode in modes.items()}


def _sql_name(mode: str) -> str:
    """`AccessExclusiveLock` -> `ACCESS EXCLUSIVE`."""
    return next(name for name in MODES if name.replace(" ", "").lower() == mode.removesuffix("Lock").lower())


@pytest.fixture
async def measuring(postgres: Databases) -> AsyncIterator[Measuring]:
    url = await postgres.create_database()
    connections = [await asyncpg.connect(url) for _ in range(3)]
    yield Measuring(*connections)
    for connection in connections:
        await connection.close()
    await postgres.drop_database(url)


@pytest.fixture
async def planned(measuring: Measuring) -> tuple[PlannedRevision, ...]:
    """The plan of everything, from an empty database."""
    return (await plan_of(measuring.connection, [CORE])).revisions


async def test_every_statement_of_every_revision_takes_the_locks_that_the_plan_names(
    measuring: Measuring, planned: tuple[PlannedRevision, ...]
) -> None:
    wrong = []
    measured = 0
    for revision in planned:
        tables = await measuring.tables()
        for step in revision.statements:
            found = await measuring.locks_of(step.statement, tables)
            measured += len(found)
            if not step.effect.known or found != set(step.effect.locks):
                wrong.append((revision.revision, step.statement[:80], found, step.effect))
    assert wrong == []
    assert len(planned) == len(known_revisions(CORE.versions).all)
    assert measured > len(planned)


async def test_the_statements_of_the_plan_make_the_schema_that_migrate_makes(
    measuring: Measuring, planned: tuple[PlannedRevision, ...], migrated_template: str
) -> None:
    for revision in planned:
        for step in revision.statements:
            await measuring.connection.execute(step.statement)
    migrated = await asyncpg.connect(migrated_template)
    try:
        for query in _DESCRIPTIONS:
            assert await measuring.connection.fetch(query) == await migrated.fetch(query)
    finally:
        await migrated.close()


FORMS = {
    "ALTER TABLE work ADD COLUMN a int": {Lock("work", "ACCESS EXCLUSIVE")},
    "ALTER TABLE work ADD COLUMN a timestamptz DEFAULT now() NOT NULL": {Lock("work", "ACCESS EXCLUSIVE")},
    "ALTER TABLE work ADD COLUMN a timestamptz DEFAULT clock_timestamp()": {
        Lock("work", "ACCESS EXCLUSIVE", "rewrite")
    },
    "ALTER TABLE work ADD COLUMN a int GENERATED ALWAYS AS (id + 1) STORED": {
        Lock("work", "ACCESS EXCLUSIVE", "rewrite")
    },
    "ALTER TABLE work ADD CONSTRAINT positive CHECK (id > 0)": {Lock("work", "ACCESS EXCLUSIVE", "scan")},
    "ALTER TABLE IF EXISTS work ADD CHECK (id > 0)": {Lock("work", "ACCESS EXCLUSIVE", "scan")},
    "ALTER TABLE work ADD FOREIGN KEY (id) REFERENCES owner (id)": {
        Lock("work", "SHARE ROW EXCLUSIVE", "scan"),
        Lock("owner", "SHARE ROW EXCLUSIVE"),
    },
    "ALTER TABLE work ADD CONSTRAINT positive CHECK (id > 0) NOT VALID": {Lock("work", "ACCESS EXCLUSIVE")},
    "ALTER TABLE work ADD CONSTRAINT of_owner FOREIGN KEY (id) REFERENCES owner (id)": {
        Lock("work", "SHARE ROW EXCLUSIVE", "scan"),
        Lock("owner", "SHARE ROW EXCLUSIVE"),
    },
    "ALTER TABLE work ADD CONSTRAINT of_owner FOREIGN KEY (id) REFERENCES owner (id) NOT VALID": {
        Lock("work", "SHARE ROW EXCLUSIVE"),
        Lock("owner", "SHARE ROW EXCLUSIVE"),
    },
    "ALTER TABLE work ADD CONSTRAINT once UNIQUE (name)": {Lock("work", "ACCESS EXCLUSIVE", "scan")},
    "ALTER TABLE work DROP CONSTRAINT later, ADD CONSTRAINT later CHECK (id > 0) NOT VALID": {
        Lock("work", "ACCESS EXCLUSIVE")
    },
    "ALTER TABLE work ADD COLUMN a int, ADD CONSTRAINT positive CHECK (id > 0)": {
        Lock("work", "ACCESS EXCLUSIVE", "scan")
    },
    "ALTER TABLE work VALIDATE CONSTRAINT later": {Lock("work", "SHARE UPDATE EXCLUSIVE", "scan")},
    "ALTER TABLE work ALTER COLUMN name SET NOT NULL": {Lock("work", "ACCESS EXCLUSIVE", "scan")},
    "ALTER TABLE work ALTER COLUMN name TYPE int USING 1": {Lock("work", "ACCESS EXCLUSIVE", "rewrite")},
    "ALTER TABLE work ALTER COLUMN name SET DEFAULT 'x'": {Lock("work", "ACCESS EXCLUSIVE")},
    "ALTER TABLE work DROP COLUMN name": {Lock("work", "ACCESS EXCLUSIVE")},
    "ALTER TABLE work RENAME COLUMN name TO title": {Lock("work", "ACCESS EXCLUSIVE")},
    "CREATE INDEX work_name ON work (name)": {Lock("work", "SHARE", "scan")},
    "CREATE INDEX CONCURRENTLY work_name ON work (name)": {Lock("work", "SHARE UPDATE EXCLUSIVE", "scan")},
    "DROP INDEX work_id": {Lock("work", "ACCESS EXCLUSIVE")},
    "DROP INDEX CONCURRENTLY work_id": {Lock("work", "SHARE UPDATE EXCLUSIVE")},
    "DROP TABLE work": {Lock("work", "ACCESS EXCLUSIVE")},
    "UPDATE work SET name = o.name FROM owner o WHERE o.id = work.id": {
        Lock("work", "ROW EXCLUSIVE", "scan"),
        Lock("owner", "ACCESS SHARE"),
    },
    "CREATE TABLE more (id int REFERENCES owner (id))": {Lock("owner", "SHARE ROW EXCLUSIVE")},
    "CREATE TABLE day_2 PARTITION OF day FOR VALUES IN (2)": {Lock("day", "ACCESS EXCLUSIVE")},
    "ALTER TABLE day ADD COLUMN name text": {Lock("day", "ACCESS EXCLUSIVE"), Lock("day_1", "ACCESS EXCLUSIVE")},
    "ALTER TABLE work ADD COLUMN a BIGSERIAL NOT NULL": {Lock("work", "ACCESS EXCLUSIVE", "rewrite")},
    "ALTER TABLE work ADD COLUMN a text DEFAULT 'random()'": {Lock("work", "ACCESS EXCLUSIVE")},
    "ALTER TABLE work ADD COLUMN a int CHECK (a > 0)": {Lock("work", "ACCESS EXCLUSIVE", "scan")},
    "ALTER TABLE work ADD COLUMN a int UNIQUE": {Lock("work", "ACCESS EXCLUSIVE", "scan")},
    "ALTER TABLE work ADD COLUMN a int REFERENCES owner (id)": {
        Lock("work", "ACCESS EXCLUSIVE"),
        Lock("owner", "SHARE ROW EXCLUSIVE"),
    },
    "ALTER TABLE work ADD COLUMN a int DEFAULT 2 REFERENCES owner (id)": {
        Lock("work", "ACCESS EXCLUSIVE", "scan"),
        Lock("owner", "SHARE ROW EXCLUSIVE"),
    },
    "ALTER TABLE work ADD CONSTRAINT first PRIMARY KEY USING INDEX work_once": {
        Lock("work", "ACCESS EXCLUSIVE", "scan")
    },
    "ALTER TABLE work ADD CONSTRAINT once UNIQUE USING INDEX work_once": {Lock("work", "ACCESS EXCLUSIVE")},
    "ALTER TABLE child DROP CONSTRAINT of_owner": {
        Lock("child", "ACCESS EXCLUSIVE"),
        Lock("owner", "ACCESS EXCLUSIVE"),
    },
    "ALTER TABLE child DROP COLUMN owner_id": {Lock("child", "ACCESS EXCLUSIVE"), Lock("owner", "ACCESS EXCLUSIVE")},
    "ALTER TABLE child DROP COLUMN name": {Lock("child", "ACCESS EXCLUSIVE")},
    "DROP TABLE child": {Lock("child", "ACCESS EXCLUSIVE"), Lock("owner", "ACCESS EXCLUSIVE")},
    "DELETE FROM work USING owner o WHERE o.id = work.id": {
        Lock("work", "ROW EXCLUSIVE", "scan"),
        Lock("owner", "ACCESS SHARE"),
    },
    "CREATE OR REPLACE TRIGGER noted AFTER INSERT ON work FOR EACH ROW EXECUTE FUNCTION nothing()": {
        Lock("work", "SHARE ROW EXCLUSIVE")
    },
    "DROP TRIGGER noted ON work": {Lock("work", "ACCESS EXCLUSIVE")},
    "DROP TRIGGER IF EXISTS noted ON public.day": {
        Lock("day", "ACCESS EXCLUSIVE"),
        Lock("day_1", "ACCESS EXCLUSIVE"),
    },
    "DROP FUNCTION alone()": set(),
    "DROP VIEW seen": set(),
    "CREATE INDEX day_number ON day (number)": {Lock("day", "SHARE"), Lock("day_1", "SHARE", "scan")},
}


TABLES = """
DROP SCHEMA public CASCADE;
CREATE SCHEMA public;
CREATE TABLE owner (id int PRIMARY KEY, name text);
CREATE TABLE work (id int, name text);
CREATE INDEX work_id ON work (id);
ALTER TABLE work ADD CONSTRAINT later CHECK (id > 1) NOT VALID;
CREATE TABLE day (number int) PARTITION BY LIST (number);
CREATE TABLE day_1 PARTITION OF day FOR VALUES IN (1);
CREATE UNIQUE INDEX work_once ON work (id);
CREATE TABLE child (owner_id int CONSTRAINT of_owner REFERENCES owner (id), name text);
CREATE VIEW seen AS SELECT id FROM owner;
CREATE FUNCTION alone() RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
CREATE TRIGGER noted AFTER INSERT ON work FOR EACH ROW EXECUTE FUNCTION nothing();
CREATE TRIGGER noted AFTER INSERT ON day FOR EACH ROW EXECUTE FUNCTION nothing();
"""


async def test_every_form_that_a_rule_knows_takes_these_locks(measuring: Measuring) -> None:
    """Also the forms that no revision uses yet, which the next one may."""
    wrong = []
    for statement, locks in FORMS.items():
        await measuring.connection.execute(TABLES)
        effect = (await tables_of(measuring.connection)).apply(statement)
        measured = await measuring.locks_of(statement, await measuring.tables())
        if not effect.known or not set(effect.locks) == locks == measured:
            wrong.append((statement, locks, effect.locks, measured))
    assert wrong == []


def test_a_statement_that_no_rule_knows_is_not_taken_for_harmless() -> None:
    schema = SchemaTables()
    for statement in (
        "CLUSTER job USING job_pkey",
        "ALTER TABLE job SET LOGGED",
        "DO $do$ BEGIN PERFORM 1; END $do$",
        "ALTER TABLE ONLY job ADD COLUMN a int",
        "CREATE INDEX a ON ONLY job (id)",
        "UPDATE ONLY job SET id = id",
        "DROP TABLE job, task",
        "DROP TABLE job CASCADE",
        "DROP FUNCTION noted() CASCADE",
        "ALTER TABLE job DROP COLUMN id CASCADE, ADD COLUMN a int",
        "ALTER TABLE job DROP CONSTRAINT job_pkey CASCADE",
    ):
        assert not schema.apply(statement).known, statement


async def test_since_the_release_every_revision_only_adds_and_nobody_waits_for_long(
    planned: tuple[PlannedRevision, ...],
) -> None:
    names = [revision.revision for revision in planned]
    after = planned[names.index(RELEASED) + 1 :]
    assert [(revision.revision, revision.narrows) for revision in after if revision.phase != "expand"] == []
    assert [
        (revision.revision, step.statement) for revision in after for step in revision.statements if _stops(step)
    ] == []
    assert after
    # Under load a transaction that needs two tables seldom gets both: somebody holds one and waits for the other.
    crowded = [(one.revision, both) for one in after for part in one.transactions if len(both := _stopped(part)) > 1]
    assert crowded == []
    # The rule itself: the release's own revisions break it.
    assert any(_stops(step) for revision in planned for step in revision.statements)
    assert any(len(_stopped(part)) > 1 for revision in planned for part in revision.transactions)


def _stopped(transaction: Iterable[PlannedStatement]) -> set[str]:
    """The tables whose writers wait for the transaction."""
    return {lock.table for step in transaction for lock in step.effect.locks if lock.stops}


def _stops(step: PlannedStatement) -> bool:
    return bool(step.scanned_under_locks) and any(lock.stops for lock in step.effect.locks)
