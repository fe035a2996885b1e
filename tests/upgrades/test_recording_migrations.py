"""`leasehold migrate` refuses before it changes anything, and the audit has a row for each change of a schema."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pydantic import SecretStr

from leasehold.cli import migrate as migrating
from leasehold.cli.migrate import plan_of_upgrade, upgrade
from leasehold.db import schemas as revisions
from leasehold.db.database import migrate
from leasehold.db.roles import grant
from leasehold.domain.errors import Invalid, SchemaLocked
from leasehold.settings import Settings
from tests.support.databases import Databases

FIRST, OLD, AUDITED, LATER = (
    "0001", "0015_times_of_waiting", "0022_audit", "0023_workflows",
)  # fmt: skip
HEAD = revisions.known_revisions(revisions.CORE.versions).head
#: The folder of the package `printing`: a kind of work with a schema of its own.
OUTSIDE = Path(__file__).parents[1] / "kinds/outside"
_PROGRAM = (
    "import asyncio, sys; from leasehold.settings import Settings; from leasehold.cli.migrate import upgrade;"
    "asyncio.run(upgrade(Settings(database_url=sys.argv[1]), 'head'))"
)


@pytest.fixture
async def url(postgres: Databases) -> AsyncIterator[str]:
    url = await postgres.create_database()
    yield url
    await postgres.drop_database(url)


@pytest.fixture(scope="module")
async def audited_template(postgres: Databases) -> str:
    url = await postgres.create_database()
    await migrate(url, AUDITED)
    return url


@pytest.fixture
async def audited(postgres: Databases, audited_template: str) -> AsyncIterator[str]:
    """A database at the revision that adds the audit."""
    url = await postgres.create_database(audited_template)
    yield url
    await postgres.drop_database(url)


def settings_of(url: str, **changes: Any) -> Settings:
    return Settings(_env_file=None, database_url=SecretStr(url), **changes)


async def asked(url: str, statement: str) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


async def recorded(url: str) -> list[tuple[str, str]]:
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch("SELECT target, details FROM audit WHERE action = 'schema.migrated' ORDER BY seq")
    finally:
        await connection.close()
    return [(row["target"], row["details"]) for row in rows]


async def test_a_role_that_does_not_exist_is_refused_before_any_change(audited: str) -> None:
    with pytest.raises(Invalid) as refused:
        await upgrade(settings_of(audited, database_app_role="nobody_has_this_role"), "head")
    assert refused.value.code == "role_unknown"
    assert await asked(audited, "SELECT version_num FROM alembic_version") == AUDITED


async def test_a_migration_that_fails_on_its_way_has_recorded_what_it_did(
    audited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(audited, migrate_lock_seconds=0.1, migrate_seconds=0.2)
    blocker = await asyncpg.connect(audited)
    try:
        async with blocker.transaction():
            await blocker.execute("SELECT count(*) FROM worker")  # a later revision adds a column to it
            with pytest.raises(SchemaLocked):
                await upgrade(settings, "head")
        reached = await asked(audited, "SELECT version_num FROM alembic_version")
        assert reached not in (AUDITED, HEAD)
        assert await recorded(audited) == [(reached, f'{{"was":"{AUDITED}"}}')]
        await upgrade(settings_of(audited), "head")
    finally:
        await blocker.close()
    assert await recorded(audited) == [(reached, f'{{"was":"{AUDITED}"}}'), (HEAD, f'{{"was":"{reached}"}}')]


async def test_a_failure_after_the_core_leaves_the_row_of_the_core(
    audited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_arguments: object) -> None:
        raise Invalid("role_unknown", "somebody dropped the role meanwhile")

    monkeypatch.setattr(migrating, "grant", refused)
    monkeypatch.setattr(migrating, "check_role", grant_nothing)
    with pytest.raises(Invalid):
        await upgrade(settings_of(audited, database_app_role="app"), "head")
    assert await recorded(audited) == [(HEAD, f'{{"was":"{AUDITED}"}}')]


async def grant_nothing(*_arguments: object) -> None:
    return


async def test_of_two_migrations_at_once_the_one_that_changed_the_schema_is_recorded(audited: str) -> None:
    programs = [await asyncio.create_subprocess_exec(sys.executable, "-c", _PROGRAM, audited) for _ in range(2)]
    assert [await program.wait() for program in programs] == [0, 0]
    assert await recorded(audited) == [(HEAD, f'{{"was":"{AUDITED}"}}')]


async def test_two_migrations_of_one_process_wait_for_one_another(audited: str) -> None:
    await asyncio.gather(*(upgrade(settings_of(audited), "head") for _ in range(2)))
    assert len(await recorded(audited)) == 1


async def test_a_migration_of_a_kind_alone_is_recorded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(OUTSIDE))
    await migrate(url)
    await upgrade(settings_of(url, pipelines="printing:pipelines"), "head")
    await upgrade(settings_of(url, pipelines="printing:pipelines"), "head")
    assert await recorded(url) == [("p0002", '{"kind":"printing"}')]


async def test_rights_are_granted_at_any_revision(postgres: Databases, url: str) -> None:
    role = f"app_{url.rpartition('/')[2][-12:]}"
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(f'CREATE ROLE "{role}"')
        await upgrade(settings_of(url, database_app_role=role), OLD)
        assert await connection.fetchval("SELECT has_table_privilege($1, 'job', 'INSERT')", role)
        for revision in (AUDITED, LATER):
            await migrate(url, revision)
            await grant(connection, role)
        assert await connection.fetchval("SELECT has_function_privilege($1, 'forget_audit(int, int)', 'EXECUTE')", role)
        await connection.execute(f'DROP OWNED BY "{role}"')
        await connection.execute(f'DROP ROLE "{role}"')
    finally:
        await connection.close()


@pytest.mark.parametrize("name", [FIRST, OLD, "0015"])
async def test_a_revision_that_the_schema_has_passed_is_refused(audited: str, name: str) -> None:
    for refusing in (upgrade, plan_of_upgrade):
        with pytest.raises(Invalid) as refused:
            await refusing(settings_of(audited), name)
        assert refused.value.code == "revision_passed"
        assert AUDITED in str(refused.value)


async def test_the_revision_that_is_reached_and_a_relative_one_are_no_error(audited: str) -> None:
    await upgrade(settings_of(audited), AUDITED)
    assert await recorded(audited) == []
    await upgrade(settings_of(audited), "+1")
    assert await recorded(audited) == [(LATER, f'{{"was":"{AUDITED}"}}')]


async def test_an_unknown_revision_is_refused(audited: str) -> None:
    with pytest.raises(Invalid) as refused:
        await upgrade(settings_of(audited), "9999_nothing")
    assert refused.value.code == "unknown_revision"


async def test_a_schema_that_a_newer_release_has_migrated_stays_as_it_is(audited: str) -> None:
    """To go back to an older release, its processes start on the newer schema, and so does its `leasehold migrate`,
    for which Compose and the chart wait. The newer release knows best which rights its tables need.
    """
    role = f"app_{audited.rpartition('/')[2][-12:]}"
    connection = await asyncpg.connect(audited)
    sentences: list[str] = []
    try:
        await connection.execute(f'CREATE ROLE "{role}"')
        await connection.execute("UPDATE alembic_version SET version_num = '9999_newer'")
        await upgrade(settings_of(audited, database_app_role=role), "head", sentences.append)
        assert sentences == ["The schema is at 9999_newer, of a newer release, and stays as it is."]
        assert await connection.fetchval("SELECT version_num FROM alembic_version") == "9999_newer"
        assert await recorded(audited) == []
        assert not await connection.fetchval("SELECT has_table_privilege($1, 'job', 'SELECT')", role)
        await connection.execute(f'DROP ROLE "{role}"')
    finally:
        await connection.close()
    assert (await plan_of_upgrade(settings_of(audited), "head")).revisions == ()


@pytest.mark.parametrize("target", [LATER, "+1"])
async def test_a_newer_schema_is_not_taken_to_a_revision_of_this_release(audited: str, target: str) -> None:
    await asked(audited, "UPDATE alembic_version SET version_num = '9999_newer' RETURNING 1")
    for asking in (upgrade, plan_of_upgrade):
        with pytest.raises(Invalid) as refused:
            await asking(settings_of(audited), target)
        assert refused.value.code == "unknown_revision"


async def test_a_newer_schema_of_a_kind_stays_and_the_platforms_is_migrated(
    audited: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(OUTSIDE))
    settings = settings_of(audited, pipelines="printing:pipelines")
    connection = await asyncpg.connect(audited)
    try:
        await connection.execute("CREATE TABLE alembic_version_printing (version_num text)")
        await connection.execute("INSERT INTO alembic_version_printing VALUES ('p9999')")
        assert {planned.schema for planned in (await plan_of_upgrade(settings, "head")).revisions} == {"leasehold"}
        await upgrade(settings, "head")
        assert await connection.fetchval("SELECT version_num FROM alembic_version_printing") == "p9999"
    finally:
        await connection.close()
    assert await recorded(audited) == [(HEAD, f'{{"was":"{AUDITED}"}}')]
