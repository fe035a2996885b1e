"""A backup is restored to a moment, and `leasehold doctor --reconcile` compares it with the store."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
from pydantic import SecretStr

from leasehold.cli import reconcile as reconciling
from leasehold.db import database
from leasehold.db.database import Connection, migrate
from leasehold.domain.ids import id_of_instant, new_id
from leasehold.embedded.postgres import USER, Postgres
from leasehold.embedded.postgres_programs import find_postgres
from leasehold.embedded.process import run, unprivileged
from leasehold.pipelines.generation import rows as generations
from leasehold.settings import Settings
from leasehold.storage import ObjectStore
from leasehold.transitions import jobs
from tests.factories import ONE
from tests.support.bucket import Bucket

SECONDS = 60.0
LONG_AGO = datetime.now(UTC) - timedelta(hours=3)
#: No keys of the platform: no id, the sum of a file, an id of another version, an id in another form.
NOT_OURS = (
    "jobs/somebody-s/file.txt",
    "jobs/017f22e279b07cc398c4dc0c0c07398f/file.txt",
    "jobs/017f22e2-79b0-4cc3-98c4-dc0c0c07398f/file.txt",
    "jobs/017F22E2-79B0-7CC3-98C4-DC0C0C07398F/file.txt",
)


def connected(server: Postgres) -> AbstractAsyncContextManager[Connection]:
    return database.connected(Settings(_env_file=None, database_url=SecretStr(server.url)), "test")


async def archiving(directory: Path, archive: Path) -> Postgres:
    """A migrated server that archives its WAL."""
    unprivileged().make_directory(archive)
    server = Postgres(directory, durable=True)
    await server.start()
    await migrate(server.url)
    async with connected(server) as connection:
        await connection.execute("ALTER SYSTEM SET archive_mode = on")
        # Renamed when it is complete: else the replay could read half of a file.
        command = f"cp %p {archive}/%f.part && mv {archive}/%f.part {archive}/%f"
        await connection.execute(f"ALTER SYSTEM SET archive_command = '{command}'")
    await server.stop()
    await server.start()
    return server


async def copied(server: Postgres, directory: Path) -> Postgres:
    """What pg_basebackup makes of the server, in a directory of its own."""
    run_as = unprivileged()
    run_as.make_directory(directory)
    password = server.url.partition(f"{USER}:")[2].partition("@")[0]
    run_as.write_file(directory / "password", password)
    source = f"postgresql://{USER}:{password}@127.0.0.1:{server.port}"
    program = (await find_postgres(run_as)) / "pg_basebackup"
    arguments: list[str | Path] = ["-D", directory / "data", "-d", source, "--checkpoint=fast", "--no-sync"]
    await run("pg_basebackup", [program, *arguments], log=directory / "copy.log", env={}, cwd=directory, run_as=run_as)
    return Postgres(directory, durable=True)


async def replayed(backup: Postgres, archive: Path, moment: datetime) -> None:
    """Start the backup, and replay the archived WAL up to the moment. The server waits there, in recovery."""
    run_as = unprivileged()
    with (backup.directory / "data/postgresql.auto.conf").open("a") as settings:
        settings.write(f"restore_command = 'cp {archive}/%f %p'\narchive_mode = off\n")
        settings.write(f"recovery_target_time = '{moment.isoformat()}'\nrecovery_target_action = 'pause'\n")
    run_as.write_file(backup.directory / "data/recovery.signal", "")
    await backup.start()
    async with asyncio.timeout(SECONDS), connected(backup) as connection:
        while await connection.fetchval("SELECT pg_get_wal_replay_pause_state()") != "paused":
            await asyncio.sleep(0.05)


async def promoted(backup: Postgres) -> None:
    async with asyncio.timeout(SECONDS), connected(backup) as connection:
        await connection.execute("SELECT pg_wal_replay_resume()")
        while await connection.fetchval("SELECT pg_is_in_recovery()"):
            await asyncio.sleep(0.05)


async def archived(server: Postgres, archive: Path) -> None:
    async with asyncio.timeout(SECONDS), connected(server) as connection:
        segment = await connection.fetchval("SELECT pg_walfile_name(pg_current_wal_lsn())")
        await connection.execute("SELECT pg_switch_wal()")
        while not (archive / segment).exists():
            await asyncio.sleep(0.05)


async def job_with_output(server: Postgres, store: ObjectStore, ident: UUID) -> str:
    """A job whose step has stored an object and written its row. Returns the key."""
    key = f"jobs/{ident}/output/result.txt"
    stored = await store.put(key, b"the result", content_type="text/plain", metadata={})
    async with connected(server) as connection:
        await jobs.submit(connection, [jobs.NewJob(ONE, "t", id=ident)])
        await connection.execute(
            "INSERT INTO output (task_id, name, job_id, step, key, size, sha256, content_type, tenant_id)"
            " SELECT id, 'result.txt', job_id, step, $2, $3, $4, 'text/plain', 't' FROM task WHERE job_id = $1",
            ident, key, stored.size, stored.sha256,
        )  # fmt: skip
    return key


async def doctor(settings: Settings, database_url: str, *options: str) -> tuple[int, str]:
    """Run the command as an operator does. Returns its exit status and what it printed."""
    variables = {
        "LEASEHOLD_DATABASE_URL": database_url,
        "LEASEHOLD_BROKER": "postgres",
        "LEASEHOLD_S3_ENDPOINT": str(settings.s3_endpoint),
        "LEASEHOLD_S3_BUCKET": settings.s3_bucket,
        "LEASEHOLD_S3_ACCESS_KEY": settings.s3_access_key.get_secret_value(),
        "LEASEHOLD_S3_SECRET_KEY": settings.s3_secret_key.get_secret_value(),
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
    command = Path(sys.executable).with_name("leasehold")
    process = await asyncio.create_subprocess_exec(
        command, "doctor", "--reconcile", *options, env=inherited | variables,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    printed, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, printed.decode()


@pytest.fixture
async def store(settings: Settings, s3: Bucket) -> AsyncIterator[ObjectStore]:
    store = ObjectStore.from_settings(settings)
    await store.open()
    yield store
    await store.close()


async def test_a_restore_to_a_moment_is_reconciled_with_the_store(
    run_directory: Path, settings: Settings, store: ObjectStore
) -> None:
    archive = run_directory / "archive"
    server = await archiving(run_directory / "backed-up", archive)
    backup = None
    try:
        first = await job_with_output(server, store, id_of_instant(LONG_AGO))
        backup = await copied(server, run_directory / "restored")
        kept = await job_with_output(server, store, id_of_instant(LONG_AGO))  # after the backup: only the WAL has it
        lost = await job_with_output(server, store, id_of_instant(LONG_AGO))
        async with connected(server) as connection:
            moment = await connection.fetchval("SELECT clock_timestamp()")
            await asyncio.sleep(0.05)  # commits are replayed up to the moment, by the clock of the server
        later = await job_with_output(server, store, id_of_instant(LONG_AGO))
        young = await job_with_output(server, store, new_id())
        await archived(server, archive)
        await server.kill()
        await store.delete(lost)  # its retention passed after the moment
        for name in NOT_OURS:
            await store.put(name, b"not ours", content_type="text/plain", metadata={})

        await replayed(backup, archive, moment)
        status, printed = await doctor(settings, backup.url, "--apply")
        assert status == 1
        assert "PostgreSQL is in recovery" in " ".join(printed.split())
        assert await store.head(later) is not None
        await promoted(backup)
        async with connected(backup) as connection:
            names = {f"jobs/{row['id']}/output/result.txt" for row in await connection.fetch("SELECT id FROM job")}
        assert names == {first, kept, lost}

        status, printed = await doctor(settings, backup.url)
        assert status == 1
        assert "1 row without its object (10 bytes): not changed" in printed
        assert "1 object without a row (10 bytes): --apply deletes them" in printed
        assert lost in printed
        assert later in printed
        assert "1 object without a row is less than an hour old" in printed
        assert await store.head(later) is not None  # only said

        status, printed = await doctor(settings, backup.url, "--apply")
        assert printed.index(later) < printed.index("Deleted 1 object.")  # first what it will do
        assert status == 1  # one object is still missing
        assert await store.head(later) is None
        for left in (first, kept, young, *NOT_OURS):
            assert await store.head(left) is not None

        status, printed = await doctor(settings, backup.url, "--json")
        found = json.loads(printed)
        assert (found["orphaned"]["count"], found["missing"]["examples"], found["rows"]) == (0, [lost], 3)
    finally:
        for one in (server, backup):
            if one is not None:
                await one.kill()
                await one.forget()
                shutil.rmtree(one.directory, ignore_errors=True)
        shutil.rmtree(archive, ignore_errors=True)


async def insert_picture(rows: Connection, media_id: UUID) -> UUID:
    """Insert an uploaded picture of the tenant `t`. Returns its job."""
    job = jobs.NewJob(ONE, "t")
    await jobs.submit(rows, [job])
    await rows.execute(
        "INSERT INTO media (id, tenant_id, status, job_id, original_key, content_type, file_name)"
        " VALUES ($1, 't', 'UPLOADED', $2, $3, 'image/jpeg', 'a.jpg')",
        media_id, job.id, f"media/{media_id}/original.jpg",
    )  # fmt: skip
    return job.id


async def test_pictures_and_uploads_under_way_are_kept_however_many_rows_a_round_reads(
    settings: Settings, store: ObjectStore, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciling, "_BATCH", 2)
    pictures = [id_of_instant(LONG_AGO) for _ in range(5)]
    uploading, deleted = id_of_instant(LONG_AGO), id_of_instant(LONG_AGO)
    for media_id in pictures:
        await insert_picture(rows, media_id)
    await rows.execute(
        "INSERT INTO upload (key, tenant_id, open, exact, bytes, most, writable_until, look_at, forget_at)"
        " VALUES ($1, 't', true, false, 9, 9, now(), now() + interval '1 day', now() + interval '1 day')",
        f"jobs/{uploading}/input/",
    )
    kept = [f"media/{media_id}/{name}" for media_id in pictures[:4] for name in ("original.jpg", "final.webp")]
    kept += [f"jobs/{uploading}/input/model", f"jobs/{uploading}/input/image-1", f"jobs/{uploading}/input/image-2"]
    orphaned = [f"media/{deleted}/{name}" for name in ("original.jpg", "resize.jpg", "final.webp")]
    for key in (*kept, *orphaned):
        await store.put(key, b"bytes", content_type="image/jpeg", metadata={})
    found = await reconciling.reconcile(settings, apply=True)
    assert found.missing.examples == [f"media/{pictures[4]}/original.jpg"]
    assert (found.rows, found.objects, found.owned, found.deleted) == (5, 14, 11, 3)
    assert sorted(found.orphaned.examples) == sorted(orphaned)
    for key in kept:
        assert await store.head(key) is not None
    for key in orphaned:
        assert await store.head(key) is None


async def test_rows_of_jobs_past_their_retention_need_no_objects(
    settings: Settings, store: ObjectStore, rows: Connection
) -> None:
    """Retention deletes the objects first. A backup that is restored later has the rows once more."""
    ends = [timedelta(hours=-1), timedelta(hours=1), None]
    pictures = [id_of_instant(LONG_AGO) for _ in ends]
    for media_id, end in zip(pictures, ends, strict=True):
        job = await insert_picture(rows, media_id)
        await rows.execute("UPDATE job SET expires_at = now() + $2::interval WHERE id = $1", job, end)
        await rows.execute(
            "INSERT INTO output (task_id, name, job_id, tenant_id, step, key, size, sha256, content_type)"
            " SELECT id, 'final', job_id, tenant_id, step, $2, 9, '', 'image/webp' FROM task WHERE job_id = $1",
            job, f"media/{media_id}/final.webp",
        )  # fmt: skip
    found = await reconciling.reconcile(settings, apply=False)
    expected = [f"media/{media_id}/{name}" for media_id in pictures[1:] for name in ("original.jpg", "final.webp")]
    assert (found.rows, sorted(found.missing.examples)) == (4, sorted(expected))


async def test_source_images_are_as_old_as_the_store_says(
    settings: Settings, store: ObjectStore, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their keys have no id: rows name them whole, and a young one may be an upload under way."""
    monkeypatch.setattr(reconciling, "_BATCH", 2)
    kept, left, expired, lost = [
        [f"sources/{'0' * 16}/{letter * 64}.{ending}" for ending in ("jpg", "png", "webp")] for letter in "abcd"
    ]
    for key in (*kept, *expired, *lost):
        await generations.keep_source(rows, "t", key, 3, timedelta(hours=-1 if key in expired else 1))
    not_ours = ["sources/site/a.png", f"sources/{'0' * 16}/{'A' * 64}.png", f"sources/{'0' * 16}/{'a' * 64}.gif"]
    for key in (*kept, *left, *not_ours):
        await store.put(key, b"image", content_type="image/png", metadata={})
    found = await reconciling.reconcile(settings, apply=True)
    assert (found.rows, found.objects, found.owned, found.young, found.deleted) == (6, 9, 3, 3, 0)
    assert sorted(found.missing.examples) == lost  # an expired one may be gone already
    monkeypatch.setattr(reconciling, "YOUNG", timedelta(minutes=-1))  # all are old
    found = await reconciling.reconcile(settings, apply=True)
    assert (found.owned, found.young, found.deleted) == (3, 0, 3)
    assert sorted(found.orphaned.examples) == left
    assert sorted([stored.key async for stored in store.list("sources/")]) == sorted([*kept, *not_ours])


async def test_the_backups_of_promotions_belong_to_the_rows_that_name_them(
    settings: Settings, store: ObjectStore, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciling, "_BATCH", 2)
    monkeypatch.setattr(reconciling, "YOUNG", timedelta(minutes=-1))  # all are old
    kept, made, left, lost = sorted([f"promotions/{new_id()}/{n}" for n in range(3)] for _ in range(4))
    for keys, change in ((kept, "replaced"), (made, None), (lost, "replaced")):
        for key in keys:
            await rows.execute(
                "INSERT INTO promoted_object (key, tenant_id, turn, for_job, until, reached, backup)"
                " VALUES ($1, 't', $2, $2, now(), $3, $4)",
                f"t/{key}", new_id(), change, key,
            )  # fmt: skip
    not_ours = ["promotions/site/0", f"promotions/{new_id()}/a.png"]
    for key in (*kept, *made[:1], *left, *not_ours):
        await store.put(key, b"model", content_type="application/octet-stream", metadata={})
    found = await reconciling.reconcile(settings, apply=True)
    # A call records the key of a backup before it makes the backup.
    assert (found.rows, sorted(found.missing.examples)) == (6, lost)
    assert (found.owned, found.young, found.deleted) == (4, 0, 3)
    assert sorted(found.orphaned.examples) == left
    assert sorted([stored.key async for stored in store.list("promotions/")]) == sorted([*kept, *made[:1], *not_ours])


async def test_a_bucket_that_is_mostly_another_s_is_left_alone(
    database_url: str, settings: Settings, store: ObjectStore
) -> None:
    """As with the URL of an empty database: nothing of the other installation is deleted. Keys that the platform does
    not make are no reason to go on.
    """
    for n in range(9):
        await store.put(f"media/site/{n}.jpg", b"not ours", content_type="image/jpeg", metadata={})
    keys = [f"media/{id_of_instant(LONG_AGO)}/original.jpg" for _ in range(3)]
    for key in keys:
        await store.put(key, b"a picture", content_type="image/jpeg", metadata={})
    status, printed = await doctor(settings, database_url, "--apply")
    assert status == 1
    assert "3 objects have no row in this database, and 0 have one" in " ".join(printed.split())
    assert await store.head(keys[0]) is not None
    status, printed = await doctor(settings, database_url, "--apply", "--even-so")
    assert (status, "Deleted 3 objects." in printed) == (0, True)
    assert await store.head(keys[0]) is None
