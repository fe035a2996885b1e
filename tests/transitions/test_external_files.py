"""The rows of files that external workers upload: a file counts for the attempt that announced it, and for no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, cast
from uuid import UUID, uuid4

import pytest

from leasehold.db.database import Connection, Pool
from leasehold.domain.errors import Invalid, ObjectTooLarge
from leasehold.domain.lease import Lease
from leasehold.limits import external_files, uploads
from leasehold.limits.external_files import AnnouncedFile, Files, UploadedFile
from leasehold.limits.upload_room import UploadRoom
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore, Stored
from leasehold.transitions import claims, settlements
from leasehold.transitions.settlements import Completion, Output, Verdict
from tests.factories import Rows, stale
from tests.transitions.conftest import Open
from tests.transitions.test_external import QUEUE, claimed_outside

SETTINGS = Settings(_env_file=None)
SIZE = 7
SHA256 = "ab" * 32
REPORT = UploadedFile("report.csv", SHA256)


class Connections:
    """A pool of one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        async with self._lock:
            yield self._connection


class Store:
    """Has an object of `size` bytes at each key. `may_end`: a read ends once this is set. `read_keys`: the keys of the
    reads that have begun.
    """

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.read_keys: list[str] = []

    async def digest(self, key: str, *, max_bytes: int) -> Stored:
        self.read_keys.append(key)
        await self.may_end.wait()
        if self.size > max_bytes:
            raise ObjectTooLarge(key)
        return Stored(key, self.size, SHA256, "text/csv", None, {})


def files_of(rows: Rows, store: Store | None = None) -> Files:
    return Files(cast("Pool", Connections(rows.connection)), cast("ObjectStore", store or Store()))


async def announce(rows: Rows, lease: Lease, tenant: str = "t") -> list[str] | None:
    room = UploadRoom(SETTINGS.upload_unfinished_bytes)
    async with rows.connection.transaction():
        return await external_files.announce(
            rows.connection, SETTINGS, room, tenant, lease, [AnnouncedFile(REPORT.name, SIZE, "text/csv")]
        )


async def key_for(rows: Rows, lease: Lease) -> str:
    """Announce the attempt's file. Returns its key."""
    keys = await announce(rows, lease)
    assert keys is not None
    (key,) = keys
    return key


async def announced(rows: Rows) -> tuple[Lease, str]:
    """A new attempt of an external worker, and the key of the file that the worker has announced."""
    lease = (await claimed_outside(rows)).lease
    return lease, await key_for(rows, lease)


async def complete(rows: Rows, lease: Lease, outputs: Sequence[Output]) -> Verdict:
    async with rows.connection.transaction():
        settled = await external_files.complete(rows.connection, "t", Completion(lease, outputs))
    return settled.verdicts[lease.task_id]


async def all_uploads(rows: Rows) -> dict[str, dict[str, Any]]:
    return {row["key"]: dict(row) for row in await rows.connection.fetch("SELECT * FROM upload")}


async def test_only_the_holder_of_the_lease_gets_keys_and_has_files_read(rows: Rows) -> None:
    lease = (await claimed_outside(rows)).lease
    store = Store()
    files = files_of(rows, store)
    for tenant, other in (
        ("u", lease),
        ("t", stale(lease, owner=uuid4())),
        ("t", stale(lease, epoch=lease.epoch + 1)),
        ("t", stale(lease, task_id=uuid4())),
    ):
        assert await announce(rows, other, tenant) is None
        assert await files.check(tenant, other, [REPORT]) == []
    assert (await all_uploads(rows), store.read_keys) == ({}, [])


@pytest.mark.parametrize(
    "change",
    ["tenant_id = 'u'", "task_id = gen_random_uuid()", "epoch = epoch - 1", "open = false"],
    ids=["of another tenant", "of another step", "of an earlier attempt", "given up"],
)
async def test_a_completion_counts_only_files_that_its_own_attempt_has_announced(rows: Rows, change: str) -> None:
    lease, key = await announced(rows)
    files = files_of(rows)
    outputs = await files.check("t", lease, [REPORT])
    assert outputs == [Output(REPORT.name, key, SIZE, SHA256, "text/csv")]
    await rows.connection.execute(f"UPDATE upload SET {change}")
    with pytest.raises(Invalid) as refused:
        await files.check("t", lease, [REPORT])
    assert refused.value.code == "file_not_announced"
    with pytest.raises(Invalid) as refused:
        await complete(rows, lease, outputs)
    assert refused.value.code == "file_not_announced"
    assert list(await all_uploads(rows)) == [key]
    await rows.connection.execute("DELETE FROM upload")
    assert await key_for(rows, lease) == key
    assert await complete(rows, lease, outputs) is Verdict.SETTLED
    assert await all_uploads(rows) == {}


async def test_an_object_with_more_bytes_than_announced_is_refused(rows: Rows) -> None:
    """A store that ignores the signed size may hold such an object."""
    lease, _ = await announced(rows)
    with pytest.raises(Invalid) as refused:
        await files_of(rows, Store(SIZE + 1)).check("t", lease, [REPORT])
    assert refused.value.code == "file_mismatch"


async def test_two_completions_of_a_tenant_are_verified_at_once_and_other_tenants_do_not_wait_for_them(
    rows: Rows,
) -> None:
    leases, keys = zip(*[await announced(rows) for _ in range(4)], strict=True)
    await rows.connection.execute("UPDATE job SET tenant_id = 'u' WHERE id = $1", UUID(keys[3].split("/")[1]))
    await rows.connection.execute("UPDATE task SET tenant_id = 'u' WHERE id = $1", leases[3].task_id)
    await rows.connection.execute("UPDATE upload SET tenant_id = 'u' WHERE key = $1", keys[3])
    store = Store()
    store.may_end.clear()
    files = files_of(rows, store)
    checks = [asyncio.create_task(files.check(tenant, lease, [REPORT]))
              for tenant, lease in zip("tttu", leases, strict=True)]  # fmt: skip
    # The pool serves the checks in their order. Once the last one reads its file, the third one has got past the pool.
    async with asyncio.timeout(60):
        while keys[3] not in store.read_keys:
            await asyncio.sleep(0)
    assert store.read_keys == [keys[0], keys[1], keys[3]]
    store.may_end.set()
    assert [output.key for outputs in await asyncio.gather(*checks) for output in outputs] == list(keys)


async def test_a_file_that_cannot_be_too_large_is_first_inspected_after_its_url_has_ended(rows: Rows) -> None:
    _, key = await announced(rows)
    row = (await all_uploads(rows))[key]
    assert row["exact"]
    assert row["look_at"] > row["writable_until"]


async def test_files_are_given_up_that_no_completion_can_name_any_more(rows: Rows, another: Open) -> None:
    """The attempt has ended, its step runs again, or its job is gone. The duty leaves all other uploads alone: files of
    attempts that go on, uploads of clients, uploads that it has given up already, and rows that somebody holds.
    """
    again, key_of_again = await announced(rows)
    await settlements.release(rows.connection, [again])
    (claimed,) = await claims.claim_due(rows.connection, rows.terms, [QUEUE], 1)
    assert claimed.lease.task_id == again.task_id
    later_key = await key_for(rows, claimed.lease)
    ended, key_of_ended = await announced(rows)
    held, key_of_held = await announced(rows)
    await settlements.release(rows.connection, [ended, held])
    gone, key_of_gone = await announced(rows)
    await rows.connection.execute("DELETE FROM job USING task t WHERE t.job_id = job.id AND t.id = $1", gone.task_id)
    _, key_of_running = await announced(rows)
    async with rows.connection.transaction():
        await uploads.open_upload(
            rows.connection, SETTINGS, "t", "media/1/original.jpg", counted_bytes=1, at_most=1, seconds=60,
            room=UploadRoom(SETTINGS.upload_unfinished_bytes),
        )  # fmt: skip
    before = await all_uploads(rows)
    assert {later_key, key_of_running} < before.keys()

    other = (await another()).connection
    await rows.connection.execute("SET lock_timeout = '5s'")
    async with other.transaction():
        await other.execute("SELECT FROM upload WHERE key = $1 FOR UPDATE", key_of_held)
        await external_files.give_up(rows.connection)
    given_up = await all_uploads(rows)
    assert changed_keys(before, given_up) == {key_of_again, key_of_ended, key_of_gone}
    for key in (key_of_again, key_of_ended, key_of_gone):
        row = given_up[key]
        assert not row["open"]
        assert row["most"] < 0, "housekeeping deletes any object at the key"
        assert row["look_at"] < before[key]["look_at"]

    await external_files.give_up(rows.connection)
    assert changed_keys(given_up, await all_uploads(rows)) == {key_of_held}


def changed_keys(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> set[str]:
    assert before.keys() == after.keys()
    return {key for key, row in after.items() if row != before[key]}


async def test_the_keys_of_a_deleted_run_are_watched_as_if_its_urls_had_been_issued_at_its_end_for_the_longest_time(
    rows: Rows,
) -> None:
    jobs = []
    for _ in range(2):
        lease, key = await announced(rows)
        await complete(rows, lease, await files_of(rows).check("t", lease, [REPORT]))
        jobs.append(UUID(key.split("/")[1]))
    await rows.connection.execute("UPDATE job SET expires_at = clock_timestamp()")
    await external_files.forget_with_jobs(rows.connection, jobs[:1])
    ((key, row),) = (await all_uploads(rows)).items()
    assert key.startswith(f"jobs/{jobs[0]}/")
    (longest,) = [bound.le for bound in Settings.model_fields["upload_url_seconds"].metadata if hasattr(bound, "le")]
    finished_at = (await rows.job(jobs[0]))["finished_at"]
    assert row["writable_until"] == finished_at + timedelta(seconds=longest)
    assert row["forget_at"] == row["look_at"] == row["writable_until"] + uploads.SLOWEST_TRANSFER
    assert not row["open"]
    assert row["most"] < 0, "housekeeping deletes any object at the key"
