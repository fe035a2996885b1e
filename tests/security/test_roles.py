"""The role that the API and the workers connect as reads and writes rows; the schema is another's.

On a server of its own, whose roles `deploy/postgres/roles.sh` has made: what `compose.yaml` ships.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from urllib.parse import quote
from uuid import UUID

import asyncpg
import pytest
from pydantic import SecretStr

from leasehold.cli.migrate import upgrade
from leasehold.db import audit, history, statistics
from leasehold.db.database import connect
from leasehold.db.tables import metadata
from leasehold.domain.errors import Invalid
from leasehold.embedded.postgres import Postgres
from leasehold.embedded.postgres_programs import find_postgres
from leasehold.embedded.process import unprivileged
from leasehold.pipelines import SHIPPED
from leasehold.selfcheck import check_database
from leasehold.settings import Settings
from tests.pictures import encoded, noisy
from tests.scenarios.fleet import Fleet, open_fleet

SCRIPT = Path(__file__).parents[2] / "deploy/postgres/roles.sh"
DOCUMENT = Path(__file__).parents[2] / "docs/operations/index.md"
#: By PostgreSQL's clock, in the statement that asks: midnight lies before it or behind it.
TODAY = "(now() AT TIME ZONE 'UTC')::date"
OWNER, APP = "owner's secret", 'app"$secret'  # nothing that a shell or SQL would take for its own


@pytest.fixture(scope="module")
async def server(run_directory: Path) -> AsyncIterator[Postgres]:
    server = Postgres(run_directory / "postgres-roles", durable=False)
    await server.start()
    admin = await asyncpg.connect(server.url_of("postgres"))
    await admin.execute("DROP DATABASE leasehold")  # the script makes it
    await run_script(server, SCRIPT.read_text())
    await upgrade(settings_of(server, "leasehold_owner", OWNER, Settings(_env_file=None)), "head")
    yield server
    await admin.close()
    await server.stop("immediate")


async def run_script(server: Postgres, script: str) -> None:
    shell = await asyncio.create_subprocess_exec(
        "sh", "-c", script,
        stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=await variables(server),
    )  # fmt: skip
    said = await shell.communicate()
    assert shell.returncode == 0, said


async def variables(server: Postgres) -> dict[str, str]:
    """What the image gives its scripts, and where the server is."""
    programs = await find_postgres(unprivileged())
    password = server.url.partition("://")[2].partition(":")[2].partition("@")[0]
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return kept | {
        "PATH": f"{programs}:/usr/bin:/bin",
        "PGHOST": "127.0.0.1",
        "PGPORT": str(server.port),
        "PGPASSWORD": password,
        "POSTGRES_USER": "leasehold",
        "DATABASE_OWNER_PASSWORD": OWNER,
        "DATABASE_APP_PASSWORD": APP,
    }


def settings_of(
    server: Postgres, role: str, password: str, settings: Settings, database: str = "leasehold"
) -> Settings:
    url = f"postgresql://{role}:{quote(password, safe='')}@127.0.0.1:{server.port}/{database}"
    return settings.model_copy(update={"database_url": SecretStr(url), "database_app_role": "leasehold_app"})


@pytest.fixture
def running(server: Postgres, settings: Settings) -> Settings:
    """The settings of the API and the workers."""
    return settings_of(server, "leasehold_app", APP, settings)


@pytest.fixture
async def app(running: Settings) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    connection = await connect(running, "test")
    yield connection
    await connection.close()


@pytest.fixture
async def owner(server: Postgres, settings: Settings) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    connection = await connect(settings_of(server, "leasehold_owner", OWNER, settings), "test")
    yield connection
    await connection.close()


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE mine (id int)",
        "CREATE TEMP TABLE event (id int)",
        "CREATE SCHEMA mine",
        "CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "CREATE ROLE friend",
        "ALTER TABLE task DROP CONSTRAINT task_pkey",
        "ALTER TABLE job DISABLE TRIGGER ALL",
        "CREATE INDEX mine ON task (id)",
        "CREATE TRIGGER t BEFORE INSERT ON task FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()",
        "DROP TABLE event",
        "DROP TABLE event_default",
        "TRUNCATE event",
        "DROP FUNCTION add_event_day(date)",
        "CREATE OR REPLACE FUNCTION add_event_day(day date) RETURNS void LANGUAGE sql AS 'SELECT'",
        "UPDATE alembic_version SET version_num = '0001'",
        "DELETE FROM alembic_version",
        "SET ROLE leasehold_owner",
        "ALTER ROLE leasehold_app SUPERUSER",
        "ALTER ROLE leasehold_owner PASSWORD 'x'",
        "COPY api_key TO PROGRAM 'cat'",
        "COPY api_key FROM '/etc/passwd'",
        "SELECT pg_read_file('/etc/passwd')",
        "SELECT * FROM pg_authid",
        "ALTER SYSTEM SET log_statement = 'all'",
        "ALTER DATABASE leasehold SET default_transaction_read_only = on",
    ],
)
async def test_the_running_role_cannot_change_the_schema_or_reach_the_host(
    app: asyncpg.Connection[asyncpg.Record], statement: str
) -> None:
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await app.execute(statement)


async def test_the_running_role_reads_and_writes_every_table_of_ours(app: asyncpg.Connection[asyncpg.Record]) -> None:
    of_kinds = (f"pipelines.{kind.name}.tables" for kind in SHIPPED)
    own = ("run", "upload", "workflow", "log", "audit", "people")
    for room in (*(f"db.{name}_tables" for name in own), *of_kinds):
        import_module(f"leasehold.{room}")
    assert len(metadata.tables) > 30
    for table in metadata.tables.keys() - {"audit", "audit_chain"}:
        rights = await app.fetchrow(
            "SELECT has_table_privilege($1, 'SELECT') AND has_table_privilege($1, 'INSERT')"
            " AND has_table_privilege($1, 'UPDATE') AND has_table_privilege($1, 'DELETE') AS all_it_needs,"
            " has_table_privilege($1, 'TRUNCATE') OR has_table_privilege($1, 'REFERENCES')"
            " OR has_table_privilege($1, 'TRIGGER') AS more",
            table,
        )
        assert (rights["all_it_needs"], rights["more"]) == (True, False), table  # type: ignore[index]  # there is a row


_COLUMNS = "id, tenant_id, actor_kind, actor, action, target_kind, target, details"
_ROW = "gen_random_uuid(), 'acme', 'key', 'anna', 'job.cancelled', 'job', 'j', '{}'"


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit SET actor = 'bob'",
        "DELETE FROM audit",
        "TRUNCATE audit",
        "TRUNCATE audit_chain",
        "UPDATE audit_chain SET seq = 0",
        "DELETE FROM audit_chain",
        "INSERT INTO audit_chain (tenant_id) VALUES ('acme')",
        f"INSERT INTO audit ({_COLUMNS}, at) VALUES ({_ROW}, '2020-01-01')",
        f"INSERT INTO audit ({_COLUMNS}, seq) VALUES ({_ROW}, 1)",
        f"INSERT INTO audit ({_COLUMNS}, previous) VALUES ({_ROW}, '')",
        f"INSERT INTO audit ({_COLUMNS}, hash) VALUES ({_ROW}, '')",
        "ALTER TABLE audit DISABLE TRIGGER audit_link",
        "DROP TRIGGER audit_link ON audit",
        "SET session_replication_role = replica",
        "SELECT audit_hash(a) FROM audit a",
        "SELECT * FROM audit FOR UPDATE",
    ],
)
async def test_the_running_role_adds_rows_to_the_audit_and_changes_none(
    app: asyncpg.Connection[asyncpg.Record], statement: str
) -> None:
    await app.execute(f"INSERT INTO audit ({_COLUMNS}) VALUES ({_ROW})")
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await app.execute(statement)
    for head in await audit.heads(app):
        assert await audit.verify(app, head) is None


async def test_the_running_role_forgets_no_row_of_the_last_month(app: asyncpg.Connection[asyncpg.Record]) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError):
        await audit.forget(app, 29)
    await audit.forget(app, 30)


async def test_the_running_role_makes_days_of_events_ahead_and_drops_old_ones(
    app: asyncpg.Connection[asyncpg.Record], owner: asyncpg.Connection[asyncpg.Record]
) -> None:
    await owner.execute(
        "CREATE TABLE event_20200101 PARTITION OF event FOR VALUES FROM ('2020-01-01 00:00Z') TO ('2020-01-02 00:00Z')"
    )
    before = datetime.now(UTC).date()
    for _ in range(2):
        await history.keep_event_days(app, days_ahead=3, days_kept=8)
    days = [
        row["name"]
        for row in await app.fetch(
            "SELECT inhrelid::regclass::text AS name FROM pg_inherits WHERE inhparent = 'event'::regclass ORDER BY 1"
        )
    ]
    made = [day for day in days if day[6:].isdigit()]
    assert made[-4:] in (  # midnight may have passed
        [f"event_{today + timedelta(days=n):%Y%m%d}" for n in range(4)] for today in (before, datetime.now(UTC).date())
    )
    assert min(made) >= f"event_{before - timedelta(days=1):%Y%m%d}"  # of the server's start


async def test_the_running_role_makes_new_statistics_of_tables_that_grew(
    app: asyncpg.Connection[asyncpg.Record], owner: asyncpg.Connection[asyncpg.Record]
) -> None:
    """Of the owner's tables only, and not by itself: PostgreSQL lets only the owner analyse them."""
    await owner.execute(
        "INSERT INTO tombstone (job_id, tenant_id, pipeline, is_run, because)"
        " SELECT gen_random_uuid(), 't', 'p', false, 'expired' FROM generate_series(1, 5000)"
    )
    assert "tombstone" in await statistics.analyze_grown_tables(app)


@pytest.mark.parametrize("ahead", [-1, 32, 400, None])
async def test_no_days_are_made_but_those_to_come(app: asyncpg.Connection[asyncpg.Record], ahead: int | None) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError):
        await app.execute(f"SELECT add_event_day({TODAY} + $1::int)", ahead)


@pytest.mark.parametrize("ahead", [-1, 0, 5, None])
async def test_no_days_are_dropped_that_are_not_over(
    app: asyncpg.Connection[asyncpg.Record], ahead: int | None
) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError):
        await app.execute(f"SELECT drop_event_day({TODAY} + $1::int)", ahead)


async def test_the_functions_that_run_as_the_owner_look_where_the_owner_says(
    app: asyncpg.Connection[asyncpg.Record],
) -> None:
    """Not where their caller's search_path leads, and for a caller's own temporary tables last."""
    rows = await app.fetch("SELECT proname, proconfig FROM pg_proc"
                           " WHERE pronamespace = 'public'::regnamespace AND prosecdef")  # fmt: skip
    assert {row["proname"] for row in rows} == {
        "add_event_day", "drop_event_day", "analyze_grown_tables", "audit_link", "forget_audit"
    }  # fmt: skip
    for row in rows:
        assert row["proconfig"] == ["search_path=pg_catalog, public, pg_temp"]


async def test_the_doctor_says_which_role_it_is(
    running: Settings, app: asyncpg.Connection[asyncpg.Record], owner: asyncpg.Connection[asyncpg.Record]
) -> None:
    said = [
        [finding.found for finding in await check_database(one, running) if finding.part == "role"]
        for one in (app, owner)
    ]
    assert said == [
        ["reads and writes rows", "sees the sessions of all roles"],
        ["may change the schema", "sees its own sessions only"],
    ]


async def test_the_whole_platform_runs_as_that_role(running: Settings, tmp_path: Path) -> None:
    """API and worker as processes: a picture, a run, a schedule, housekeeping, and no statement that is refused."""
    fleet = await open_fleet(running, tmp_path)
    try:
        worker = await fleet.worker()
        api = await fleet.api()
        accepted = await fleet.send(encoded(noisy(320, 240), "JPEG"))
        await fleet.finished(accepted["media_id"])
        await fleet.assert_done_once(UUID(accepted["job_id"]))
        await fleet.at_rest()
        async with asyncio.timeout(60):  # on a busy machine a check may take too long
            while (await fleet.call("GET", "/readyz")).json() != {"status": "ok"}:
                await asyncio.sleep(0.1)
        await fleet.until(lambda: days_ahead(fleet), worker)
        for process in (worker, api):
            log = process.log.read_text()
            assert "InsufficientPrivilege" not in log
            assert "permission denied" not in log
    finally:
        await fleet.close()
        await fleet.rows.connection.close()


async def days_ahead(fleet: Fleet) -> bool:
    """Whether the worker's housekeeping has made them."""
    name = f"event_{datetime.now(UTC).date() + timedelta(days=7):%Y%m%d}"
    return bool(await fleet.rows.connection.fetchval("SELECT to_regclass($1) IS NOT NULL", name))


async def test_migrating_again_grants_what_was_lost_and_takes_what_was_added(
    server: Postgres, settings: Settings, owner: asyncpg.Connection[asyncpg.Record],
    app: asyncpg.Connection[asyncpg.Record],
) -> None:  # fmt: skip
    await owner.execute("REVOKE ALL ON job FROM leasehold_app")
    await owner.execute("GRANT ALL ON task TO leasehold_app")
    await owner.execute("GRANT CREATE ON SCHEMA public TO leasehold_app")
    await upgrade(settings_of(server, "leasehold_owner", OWNER, settings), "head")
    assert await app.fetchval("SELECT count(*) FROM job") >= 0
    for statement in ("TRUNCATE task", "CREATE TABLE mine (id int)"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await app.execute(statement)


@pytest.mark.parametrize(
    ("role", "code"),
    [("nobody", "role_unknown"), ("leasehold_owner", "role_owns_schema"), ("leasehold", "role_owns_schema")],
)
async def test_a_role_that_nothing_is_kept_from_is_refused(
    server: Postgres, settings: Settings, role: str, code: str
) -> None:
    owning = settings_of(server, "leasehold_owner", OWNER, settings).model_copy(update={"database_app_role": role})
    with pytest.raises(Invalid) as refused:
        await upgrade(owning, "head")
    assert refused.value.code == code


async def test_nobody_else_connects(server: Postgres) -> None:
    admin = await asyncpg.connect(server.url_of("postgres"))
    try:
        await admin.execute("CREATE ROLE stranger LOGIN PASSWORD 'stranger'")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await asyncpg.connect(f"postgresql://stranger:stranger@127.0.0.1:{server.port}/leasehold")
    finally:
        await admin.close()


@pytest.mark.parametrize("old_role", ["leasehold", "alone"])
async def test_an_installation_of_one_role_becomes_one_of_two_by_the_documented_statements(
    server: Postgres, settings: Settings, old_role: str
) -> None:
    """The old role is the superuser that initdb made, as in `compose.yaml` of before, or any role. The roles of the
    script exist already in this server.
    """
    database = f"old_{old_role}"
    (statements,) = re.findall(
        r"```sql\s+(ALTER DATABASE leasehold OWNER .*?)```", DOCUMENT.read_text(), flags=re.DOTALL
    )
    admin = await asyncpg.connect(server.url_of("postgres"))
    if old_role == "alone":
        await admin.execute("CREATE ROLE alone LOGIN PASSWORD 'alone'")
    await admin.execute(f"CREATE DATABASE {database} OWNER {old_role}")
    await admin.close()
    password = server.url.partition("://")[2].partition(":")[2].partition("@")[0]
    alone = settings_of(server, old_role, password if old_role == "leasehold" else "alone", settings, database)
    await upgrade(alone.model_copy(update={"database_app_role": None}), "head")
    script = re.sub(r"(?m)^CREATE .*\n", "", SCRIPT.read_text())
    script = re.sub(r"(DATABASE|connect) leasehold\b", rf"\1 {database}", script)
    await run_script(server, script)
    superuser = await asyncpg.connect(server.url_of(database))
    await superuser.execute(statements.replace("DATABASE leasehold ", f"DATABASE {database} "))
    left = await superuser.fetch(
        "SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'public'::regnamespace"
        " AND relowner <> $1::regrole"
        " UNION ALL SELECT oid::regprocedure::text FROM pg_proc WHERE pronamespace = 'public'::regnamespace"
        " AND proowner <> $1::regrole UNION ALL SELECT oid::regtype::text FROM pg_type"
        " WHERE typnamespace = 'public'::regnamespace AND typowner <> $1::regrole"
        " UNION ALL SELECT datname FROM pg_database WHERE datname = current_database() AND datdba <> $1::regrole",
        "leasehold_owner",
    )
    assert left == []
    await superuser.close()
    await upgrade(settings_of(server, "leasehold_owner", OWNER, settings, database), "head")
    app = await connect(settings_of(server, "leasehold_app", APP, settings, database), "test")
    await history.keep_event_days(app, days_ahead=3, days_kept=8)
    assert await app.fetchval("SELECT count(*) FROM job") == 0
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await app.execute("TRUNCATE task")
    await app.close()
