"""The release beside this code: its processes run its own code, and its schema is brought up to ours."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import asyncpg
import pytest

from chaos import row_changes
from chaos.plan import make_plan, plan_of
from chaos.release import Release, migrate_with
from chaos.slots import Slot
from leasehold.db.schemas import CORE, state_of
from tests.support.databases import Databases

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
async def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    release = Release(tmp_path_factory.mktemp("release") / "it")
    await release.unpack()
    return release


async def test_a_process_of_the_release_finds_its_own_code_and_our_kinds_of_work(release: Release) -> None:
    code = "import leasehold, leasehold.worker.main, chaos.old_process, chaos.steps; print(leasehold.__file__)"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code,
        cwd=release.directory, env=release.environment(os.environ), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    said, _ = await process.communicate()
    assert said.decode().strip() == str(release.directory / "leasehold" / "__init__.py")


async def test_the_schema_of_the_release_is_brought_up_to_this_code(release: Release, postgres: Databases) -> None:
    url = await postgres.create_database()
    await release.migrate(url)
    connection = await asyncpg.connect(url)
    try:
        before = await state_of(connection, CORE)
        await connection.execute(row_changes.install(None))
        await migrate_with(ROOT, {**os.environ, "LEASEHOLD_DATABASE_URL": url})
        after = await state_of(connection, CORE)
        for _ in range(2):  # the answer of the first may be lost
            await connection.execute(row_changes.WATCH_LATER_TABLES)
        watched = await connection.fetchval(
            "SELECT count(*) FROM pg_trigger WHERE tgname = 'call' OR tgrelid = 'outbox_batch'::regclass"
        )
    finally:
        await connection.close()
    assert before.revision == "0018_uploads_of_attempts"
    assert after.revision == after.head
    assert watched == 2


async def test_a_migration_that_fails_is_an_error(release: Release) -> None:
    with pytest.raises(RuntimeError, match="leasehold migrate failed"):
        await release.migrate("postgresql://nobody@127.0.0.1:1/none")


def test_a_slot_is_given_to_the_release_and_back_and_only_our_process_has_failpoints(
    release: Release, tmp_path: Path
) -> None:
    said = {"PYTHONPATH": "ours", "LEASEHOLD_FAILPOINTS": "after_claim:kill"}
    slot = Slot("worker-0", directory=tmp_path, environment=lambda _: said)
    programs = []
    for of in (None, release, None):
        slot.release = of
        programs.append(slot._program())
    assert ["chaos.old_process" in command for command, _, _ in programs] == [False, True, False]
    assert [directory for _, directory, _ in programs] == [ROOT, release.directory, ROOT]
    assert [its["PYTHONPATH"] for _, _, its in programs] == ["ours", str(release.directory), "ours"]
    assert [its["LEASEHOLD_FAILPOINTS"] for _, _, its in programs] == ["after_claim:kill", "", "after_claim:kill"]


def test_only_a_plan_with_an_upgrade_begins_with_the_release() -> None:
    assert plan_of("F43 upgrade from the release", 0).begins_with_release
    assert not plan_of("F42 an old worker beside the new", 0).begins_with_release
    plans = [make_plan(seed) for seed in range(60)]
    assert {plan.begins_with_release for plan in plans} == {True, False}
