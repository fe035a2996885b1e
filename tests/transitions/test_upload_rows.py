"""The rows of uploads: what happens to an upload concerns its own key, of its own tenant, as it was read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, cast
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from leasehold.db.database import Connection
from leasehold.limits import upload_room, uploads
from leasehold.limits.upload_room import LEAST_COUNTED, UploadRoom
from leasehold.limits.uploads import Due
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore, Stored
from tests.factories import Rows

SETTINGS = Settings(_env_file=None)
MIB = LEAST_COUNTED
SIZE = 3 * MIB
ATTEMPT = UUID(int=7)
DAY = timedelta(days=1)
Act = Callable[[Connection, str, str], Awaitable[object]]


class Store:
    """Has an object of `size` bytes at each key, and two objects below each prefix. None: has no object."""

    def __init__(self, size: int | None = SIZE) -> None:
        self.size = size
        self.deleted: list[str] = []
        self.aborted: list[str] = []

    async def head(self, key: str) -> Stored | None:
        return None if self.size is None else Stored(key, self.size, "", "", None, {})

    async def delete(self, *keys: str) -> None:
        self.deleted += keys

    async def abort_uploads(self, prefix: str) -> int:
        self.aborted.append(prefix)
        return 0

    async def list(self, prefix: str) -> AsyncIterator[Stored]:
        for name in ("a", "b"):
            yield Stored(prefix + name, 1, "", "", None, {})


def room() -> UploadRoom:
    return UploadRoom(SETTINGS.upload_unfinished_bytes)


async def add(
    rows: Rows, key: str, *, url: float = 300.0, look: float = -1.0, over: float = 3600.0, **columns: Any
) -> None:
    """The row of an upload of the tenant `t`. `url`, `look`, `over`: in how many seconds its URL ends, its next
    inspection is due, and its last transfer ends.
    """
    row = {"tenant_id": "t", "open": True, "exact": False, "bytes": SIZE, "most": SIZE, "task_id": None} | columns
    await rows.connection.execute(
        "INSERT INTO upload (key, tenant_id, open, exact, bytes, most, task_id, writable_until, look_at, forget_at)"
        " SELECT $1, $2, $3, $4, $5, $6, $7, now() + make_interval(secs => $8), now() + make_interval(secs => $9),"
        " now() + make_interval(secs => $10)",
        key, row["tenant_id"], row["open"], row["exact"], row["bytes"], row["most"], row["task_id"], url, look, over,
    )  # fmt: skip


async def all_uploads(rows: Rows) -> dict[str, dict[str, Any]]:
    return {row["key"]: dict(row) for row in await rows.connection.fetch("SELECT * FROM upload")}


async def now(rows: Rows) -> datetime:
    """By PostgreSQL's clock."""
    instant: datetime = await rows.connection.fetchval("SELECT clock_timestamp()")
    return instant


async def inspect(
    rows: Rows,
    key: str,
    store: Store | None = None,
    *,
    tenant: str = "t",
    is_open: bool = True,
    at_most: int = SIZE,
    url_expired: bool = False,
    transfers_over: bool = False,
) -> list[int]:
    """Inspect the upload as it was read before. Returns the sizes with which it was refused."""
    refused: list[int] = []

    @asynccontextmanager
    async def connections() -> AsyncIterator[Connection]:
        yield rows.connection

    async def on_too_large(_connection: Connection, _upload: Due, size: int) -> None:
        refused.append(size)

    due = Due(key, tenant, is_open, at_most, url_expired, transfers_over)
    await uploads.inspect(connections, cast("ObjectStore", store or Store()), due, on_too_large)
    return refused


async def refuse(connection: Connection, tenant: str, key: str) -> None:
    await uploads.close(connection, tenant, key, keep=None)


async def finish(connection: Connection, tenant: str, key: str) -> None:
    await uploads.close(connection, tenant, key, keep=SIZE)


@pytest.mark.parametrize("is_exact", [False, True], ids=["of any size", "of a signed size"])
@pytest.mark.parametrize("act", [refuse, finish, uploads.keep_prefix, uploads.forget])
async def test_an_upload_ends_alone_and_only_for_its_own_tenant(rows: Rows, act: Act, is_exact: bool) -> None:
    for key in ("before", "mine", "other"):
        await add(rows, key, exact=is_exact)
    before = await all_uploads(rows)
    await act(rows.connection, "u", "mine")
    assert await all_uploads(rows) == before
    await act(rows.connection, "t", "mine")
    after = await all_uploads(rows)
    assert {key: row for key, row in before.items() if after.get(key) != row} == {"mine": before["mine"]}


async def test_only_an_upload_whose_signed_size_may_stay_leaves_no_key_to_inspect(rows: Rows) -> None:
    """An object with more bytes could arrive at the others. They are inspected after the end of their URL."""
    await add(rows, "just as large", exact=True, look=0.0)
    await add(rows, "too large", exact=True, bytes=SIZE + 1, most=SIZE + 1, look=0.0)
    await add(rows, "of any size", most=SIZE + 1, look=0.0)
    for key in ("just as large", "too large", "of any size"):
        await uploads.close(rows.connection, "t", key, keep=SIZE)
    after = await all_uploads(rows)
    assert after.keys() == {"too large", "of any size"}
    for row in after.values():
        assert (row["open"], row["bytes"], row["most"]) == (False, 0, SIZE)
        assert row["look_at"] > row["writable_until"]


async def test_objects_below_a_prefix_are_kept_only_for_an_upload_that_is_open(rows: Rows) -> None:
    """Housekeeping closes the upload before it deletes them. Then the job must not be written."""
    await add(rows, "jobs/1/input/")
    await add(rows, "jobs/2/input/", open=False)
    assert await uploads.keep_prefix(rows.connection, "t", "jobs/1/input/")
    assert not await uploads.keep_prefix(rows.connection, "t", "jobs/1/input/")
    assert not await uploads.keep_prefix(rows.connection, "t", "jobs/2/input/")
    assert (await all_uploads(rows)).keys() == {"jobs/2/input/"}


async def test_an_object_is_inspected_while_it_may_grow_and_a_prefix_only_after_the_end_of_its_url(rows: Rows) -> None:
    """The inspection of a prefix deletes its objects."""
    for key in ("media/1/original.jpg", "jobs/1/input/"):
        async with rows.connection.transaction():
            await uploads.open_upload(
                rows.connection, SETTINGS, "t", key, counted_bytes=1, at_most=SIZE, seconds=3600, room=room()
            )
    found = await all_uploads(rows)
    assert not any(row["exact"] for row in found.values()), "a store that accepts any size may have a larger object"
    assert found["media/1/original.jpg"]["look_at"] < found["media/1/original.jpg"]["writable_until"]
    assert found["jobs/1/input/"]["look_at"] > found["jobs/1/input/"]["writable_until"]


async def test_uploads_that_are_set_aside_are_not_due_until_their_next_try(rows: Rows) -> None:
    for key in ("set aside", "to be tried again", "of another duty"):
        await add(rows, key)
    await rows.connection.execute(
        "INSERT INTO quarantine (duty, unit, failures, error, failed_at, retry_at) VALUES"
        " ($1, 'set aside', 1, '{}', now(), now() + interval '1 hour'),"
        " ($1, 'to be tried again', 1, '{}', now(), now() - interval '1 second'),"
        " ('another', 'of another duty', 1, '{}', now(), now() + interval '1 hour')",
        uploads.UPLOADS,
    )
    due = await uploads.due(rows.connection)
    assert {upload.key for upload in due} == {"to be tried again", "of another duty"}


# --- a client gets a new URL


async def count_again(
    rows: Rows, key: str, counted_bytes: int, *, bound: int = 8 * MIB, of: UploadRoom | None = None
) -> None:
    settings = SETTINGS.model_copy(update={"upload_unfinished_bytes": bound})
    async with rows.connection.transaction():
        await uploads.count_again(rows.connection, settings, "t", key, counted_bytes, of or UploadRoom(bound))


async def sizes(rows: Rows) -> dict[str, int]:
    return {key: row["bytes"] for key, row in (await all_uploads(rows)).items()}


async def test_an_upload_counts_again_with_its_own_bytes_and_no_other_does(rows: Rows) -> None:
    before = {"larger": 3 * MIB, "mine": MIB, "other": 3 * MIB}
    for key, size in before.items():
        await add(rows, key, bytes=size)
    await count_again(rows, "mine", MIB + 1)
    assert await sizes(rows) == before | {"mine": MIB + 1}


async def test_an_upload_that_counts_with_as_much_already_gets_its_new_url_also_over_the_bound(rows: Rows) -> None:
    """An operator may have lowered the bound meanwhile."""
    await add(rows, "mine", bytes=2 * MIB)
    await count_again(rows, "mine", 2 * MIB, bound=MIB)
    assert await sizes(rows) == {"mine": 2 * MIB}


async def test_what_counts_again_is_in_the_room_that_the_process_remembers(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of the bound, here two MiB, needs no exact count."""
    monkeypatch.setattr(upload_room, "FRESH_SECONDS", 3600.0)
    remembered = UploadRoom(8 * MIB)
    await add(rows, "mine", bytes=0)
    assert await remembered.reserve(rows.connection, "t", 0)
    await count_again(rows, "mine", 3 * MIB, of=remembered)
    assert not await remembered.reserve(rows.connection, "t", 0)


# --- inspections


@pytest.mark.parametrize(
    ("was_expired", "url", "stored", "counted", "is_last"),
    [
        (True, -61.0, MIB, MIB, True),
        (True, -61.0, None, 0, True),
        (True, 300.0, MIB, SIZE, False),
        (False, -61.0, MIB, SIZE, False),
        (False, 300.0, SIZE + 1, SIZE + 1, False),
    ],
    ids=["URL over", "never sent", "new URL meanwhile", "URL over since", "larger"],
)
async def test_an_upload_counts_with_what_is_stored_once_its_url_is_over_and_before_with_no_less_than_declared(
    rows: Rows, was_expired: bool, url: float, stored: int | None, counted: int, is_last: bool
) -> None:
    """Its next inspection is then its last one, after which no transfer can arrive. Other uploads stay as they are."""
    for key in ("before", "mine", "other"):
        await add(rows, key, url=url, most=2 * SIZE)
    before = await all_uploads(rows)
    assert await inspect(rows, "mine", Store(stored), at_most=2 * SIZE, url_expired=was_expired) == []
    after = await all_uploads(rows)
    assert {key for key, row in after.items() if row != before[key]} == {"mine"}
    row = after["mine"]
    assert row["bytes"] == counted
    assert (row["look_at"] == row["forget_at"]) == is_last
    assert await now(rows) < row["look_at"] <= row["forget_at"]


@pytest.mark.parametrize(
    "change",
    [{"look": 1800.0}, {"most": 1}],
    ids=["is not due any more", "may stay with fewer bytes"],
)
async def test_an_upload_that_changed_during_its_inspection_stays_as_it_is(rows: Rows, change: dict[str, Any]) -> None:
    await add(rows, "mine", **change)
    before = await all_uploads(rows)
    await inspect(rows, "mine", Store(1), url_expired=True)
    assert await all_uploads(rows) == before


async def test_an_ended_upload_counts_nothing_and_its_object_that_is_too_large_goes(rows: Rows) -> None:
    """Nobody is refused for it: the upload has ended already."""
    await add(rows, "mine", open=False)
    store = Store(SIZE)
    assert await inspect(rows, "mine", store, is_open=False) == []
    assert (await sizes(rows), store.deleted) == ({"mine": 0}, [])
    await rows.connection.execute("UPDATE upload SET look_at = now() - interval '1 second'")
    larger = Store(SIZE + 1)
    assert await inspect(rows, "mine", larger, is_open=False) == []
    assert (await sizes(rows), larger.deleted) == ({"mine": 0}, ["mine"])


async def test_once_no_transfer_can_arrive_only_a_file_of_an_attempt_that_goes_on_keeps_its_row(rows: Rows) -> None:
    """The completion of the attempt names the file. Until then, one inspection a day is enough."""
    await add(rows, "mine")
    await add(rows, "ended", open=False, task_id=ATTEMPT)
    await add(rows, "file", task_id=ATTEMPT)
    await add(rows, "other")
    await add(rows, "other file", task_id=ATTEMPT)
    before = await all_uploads(rows)
    for key in ("mine", "file"):
        await inspect(rows, key, Store(MIB), tenant="u", transfers_over=True)
    assert await all_uploads(rows) == before
    for key in ("mine", "ended", "file"):
        await inspect(rows, key, Store(MIB), transfers_over=True)
    after = await all_uploads(rows)
    file = after.pop("file")
    assert after == {key: before[key] for key in ("other", "other file")}
    assert file["bytes"] == MIB
    assert await now(rows) < file["look_at"] <= await now(rows) + DAY


@pytest.mark.parametrize(
    "columns", [{}, {"open": False, "task_id": ATTEMPT}], ids=["of a client", "of an attempt that has ended"]
)
async def test_an_upload_that_was_refused_during_its_last_inspection_stays_due(
    rows: Rows, columns: dict[str, Any]
) -> None:
    """Its object is deleted by the next inspection, and not a day later."""
    await add(rows, "mine", most=-1, **columns)
    before = await all_uploads(rows)
    await inspect(rows, "mine", Store(MIB), transfers_over=True)
    assert await all_uploads(rows) == before


async def test_an_upload_below_a_prefix_goes_with_its_objects_and_no_other_does(rows: Rows) -> None:
    """An upload whose row is gone is that of a job, so its objects stay."""
    prefix, other = "jobs/1/input/", "jobs/2/input/"
    for key in (prefix, other):
        await add(rows, key)
    before = await all_uploads(rows)
    store = Store()
    await inspect(rows, prefix, store, tenant="u")
    await inspect(rows, "jobs/3/input/", store)
    assert (store.deleted, store.aborted, await all_uploads(rows)) == ([], [], before)
    await inspect(rows, prefix, store)
    assert (store.deleted, store.aborted) == ([f"{prefix}a", f"{prefix}b"], [prefix])
    assert await all_uploads(rows) == {other: before[other]}


async def test_multipart_uploads_of_dead_writers_are_logged_where_there_were_any() -> None:
    class Aborting:
        async def abort_uploads(self, prefix: str, *, older_than: timedelta) -> int:
            return 2 if prefix == "jobs/" else 0

    with capture_logs() as logs:
        await uploads.abort_dead_uploads(cast("ObjectStore", Aborting()), ["media/"])
    assert [(entry["log_level"], entry["prefix"], entry["uploads"]) for entry in logs] == [("warning", "jobs/", 2)]
