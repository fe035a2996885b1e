"""`leasehold migrate` beside a running installation: it lets others through, and goes on where a try died."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import NoReturn

import asyncpg
import pytest
from sqlalchemy.exc import DBAPIError
from typer.testing import CliRunner

from leasehold.cli.main import app
from leasehold.cli.running import FAILED
from leasehold.db.database import migrate
from leasehold.db.schemas import CORE, state_of
from leasehold.db.upgrading.patience import Patience, Progress, run_patiently
from leasehold.db.upgrading.plan import plan_of
from leasehold.domain.errors import SchemaLocked
from tests.support.databases import Databases

SECONDS = 60.0
#: Revisions before those that are tried: one adds a column to `worker`, the next builds an index on `job` and on `run`.
BEFORE_COLUMN, COLUMN, INDEXES = "0028_callbacks", "0029_incarnation_of_workers", "0030_indexes_of_searches"
REVISIONS = 5
_BUILDS = "SELECT relid::regclass::text FROM pg_stat_progress_create_index"
_VALID = """
SELECT indexrelid::regclass::text AS name, indexrelid AS oid, indisvalid AS valid FROM pg_index
WHERE indexrelid::regclass::text = ANY($1)
"""


@pytest.fixture(scope="module")
async def old_template(postgres: Databases) -> str:
    """A database before the revisions that are tried."""
    url = await postgres.create_database()
    await migrate(url, BEFORE_COLUMN)
    return url


@pytest.fixture
async def old(postgres: Databases, old_template: str) -> AsyncIterator[str]:
    url = await postgres.create_database(old_template)
    yield url
    await postgres.drop_database(url)


@asynccontextmanager
async def connection_to(url: str, name: str = "tests") -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    connection = await asyncpg.connect(url, server_settings={"application_name": name})
    try:
        yield connection
    finally:
        await connection.close()


async def revision(url: str) -> str | None:
    async with connection_to(url) as connection:
        return (await state_of(connection, CORE)).revision


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not true():
            await asyncio.sleep(0.01)


async def test_a_lock_that_is_not_free_is_given_up_and_tried_again_and_readers_go_on(old: str) -> None:
    """A report reads `worker` in a long transaction. The migration waits for it, and others do not wait for both."""
    sentences: list[str] = []
    async with connection_to(old) as report, connection_to(old) as reader:
        transaction = report.transaction()
        await transaction.start()
        await report.execute("SELECT count(*) FROM worker")
        migrating = asyncio.create_task(migrate(old, COLUMN, patience=Patience(0.2, SECONDS, sentences.append)))
        await until(lambda: len(sentences) > 1)
        # Without the limit the reader would wait for the migration, and so for the report, which ends after it.
        await asyncio.wait_for(reader.execute("SELECT count(*) FROM worker"), SECONDS)
        assert not migrating.done()
        await transaction.rollback()
        await migrating
    assert await revision(old) == COLUMN


async def test_each_revision_has_the_whole_time_for_itself(old: str) -> None:
    """Under load each of many revisions may have to wait a little."""
    progress, patience = Progress(), Patience(0.05, 0.6)
    tries = 0

    async def run() -> None:
        nonlocal tries
        tries += 1
        if tries < REVISIONS:
            await asyncio.sleep(0.3)
            progress.applied += 1
            raise DBAPIError("ALTER TABLE", None, asyncpg.LockNotAvailableError("canceling statement"))

    async def roll_back() -> None:
        """Nothing was changed."""

    await run_patiently(run, progress, roll_back, 0, partial(asyncpg.connect, old), patience)
    assert tries == REVISIONS


async def test_a_migration_needs_no_connection_beside_its_own() -> None:
    """Beside a running installation PostgreSQL may have none left for the look at who is in the way."""
    has_looked = False

    async def run() -> None:
        if not has_looked:
            raise DBAPIError("ALTER TABLE", None, asyncpg.LockNotAvailableError("canceling statement"))

    async def roll_back() -> None:
        """Nothing was changed."""

    async def connect() -> NoReturn:
        nonlocal has_looked
        has_looked = True
        raise asyncpg.TooManyConnectionsError("sorry, too many clients already")

    await run_patiently(run, Progress(), roll_back, 0, connect, Patience(0.05, SECONDS))
    assert has_looked


@pytest.mark.parametrize(("seconds", "timeout"), [(1.0, "1000ms"), (0.0001, "1ms")])
def test_a_statement_never_waits_for_a_lock_without_end(seconds: float, timeout: str) -> None:
    """PostgreSQL takes `0ms` for no limit."""
    assert Patience(lock_seconds=seconds).session["lock_timeout"] == timeout


async def test_a_migration_that_gets_no_lock_names_who_is_in_its_way_and_keeps_what_was_done(old: str) -> None:
    async with connection_to(old, "nightly report") as report:
        async with report.transaction():
            await report.execute("SELECT count(*) FROM worker")
            for seconds in (1.0, 4.0, 16.0):  # a busy machine may need the first for a single try, without a look
                with pytest.raises(SchemaLocked, match="LEASEHOLD_MIGRATE_SECONDS") as refused:
                    await migrate(old, COLUMN, patience=Patience(0.1, seconds))
                named = re.search(r"nightly report \(process \d+, idle in", str(refused.value))
                if named:
                    break
            assert named, refused.value
        assert await report.fetch("SELECT 1 FROM pg_locks WHERE locktype = 'advisory'") == []
    assert await revision(old) == BEFORE_COLUMN
    await migrate(old, COLUMN)
    assert await revision(old) == COLUMN


@asynccontextmanager
async def _program(url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`leasehold migrate`, until it is killed."""
    environment = {**os.environ, "LEASEHOLD_DATABASE_URL": url, "LEASEHOLD_OBJECT_STORE": "none"}
    program = "from leasehold.cli.main import app; app()"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, "migrate", INDEXES, env=environment)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@asynccontextmanager
async def _session(url: str, looking: asyncpg.Connection[asyncpg.Record]) -> AsyncIterator[None]:
    """A migration whose session PostgreSQL ends."""
    migrating = asyncio.create_task(migrate(url, INDEXES))
    yield
    await looking.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_progress_create_index")
    with pytest.raises((asyncpg.AdminShutdownError, asyncpg.PostgresConnectionError)):
        await migrating


@pytest.mark.parametrize("dies", ["the program", "its session"])
async def test_an_index_build_that_died_is_dropped_and_built_again_and_those_that_are_done_are_kept(
    old: str, dies: str
) -> None:
    """It dies in the second of two builds, which a writer keeps waiting."""
    names = ["job_with_key", "run_with_scope"]
    await migrate(old, COLUMN)
    async with connection_to(old) as writer, connection_to(old) as looking:
        async with asyncio.timeout(SECONDS), writer.transaction():
            await writer.execute("LOCK TABLE run IN ROW EXCLUSIVE MODE")
            async with _program(old) if dies == "the program" else _session(old, looking):
                while await looking.fetchval(_BUILDS) != "run":
                    await asyncio.sleep(0.02)
            # PostgreSQL ends the session of a program that died by itself, while the writer still holds it up.
            while await looking.fetchval(_BUILDS) is not None:
                await asyncio.sleep(0.02)
        left = {row["name"]: row for row in await looking.fetch(_VALID, names)}
        assert {name: row["valid"] for name, row in left.items()} == {"job_with_key": True, "run_with_scope": False}
        assert await revision(old) == COLUMN

        (plan,) = (await plan_of(looking, [CORE], INDEXES)).revisions
        assert [step.statement.partition(" ON ")[0] for step in plan.statements if "INDEX" in step.statement] == [
            'DROP INDEX CONCURRENTLY "run_with_scope"',
            "CREATE INDEX CONCURRENTLY run_with_scope",
        ]

        await migrate(old, INDEXES)
        built = {row["name"]: row for row in await looking.fetch(_VALID, names)}
    assert {name: row["valid"] for name, row in built.items()} == dict.fromkeys(names, True)
    assert built["job_with_key"]["oid"] == left["job_with_key"]["oid"]
    assert await revision(old) == INDEXES


def test_the_plan_changes_nothing_and_names_statements_locks_and_who_waits(old: str) -> None:
    environment = {"LEASEHOLD_DATABASE_URL": old, "LEASEHOLD_OBJECT_STORE": "none"}
    first, second = (CliRunner().invoke(app, ["migrate", "--plan"], env=environment) for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.stdout == second.stdout
    for line in (
        "0029_incarnation_of_workers: add the incarnation of workers",
        "  expand: it only adds",
        "worker: ACCESS EXCLUSIVE, reads and writes wait, for a moment",
        "job: SHARE UPDATE EXCLUSIVE, nobody waits, reads the table (about 0 rows,",
    ):
        assert line in first.stdout
    as_json = json.loads(CliRunner().invoke(app, ["migrate", "--plan", "--json", COLUMN], env=environment).stdout)
    assert [(one["revision"], one["phase"]) for one in as_json["revisions"]] == [(COLUMN, "expand")]
    ((statement,),) = as_json["revisions"][0]["transactions"]
    assert [(lock["table"], lock["mode"], lock["stops"]) for lock in statement["locks"]] == [
        ("worker", "ACCESS EXCLUSIVE", "reads and writes")
    ]


@pytest.mark.parametrize("more", [[], ["--plan"]])
def test_an_unknown_revision_is_an_error_with_a_sentence(old: str, more: list[str]) -> None:
    environment = {"LEASEHOLD_DATABASE_URL": old, "LEASEHOLD_OBJECT_STORE": "none"}
    result = CliRunner().invoke(app, ["migrate", "9999_nothing", *more], env=environment)
    assert result.exit_code == FAILED
    assert "9999_nothing" in result.stderr
    assert "Traceback" not in result.stderr
