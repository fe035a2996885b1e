"""The log lines and chunks of an external worker's attempt at their rows: they have bounds, and count once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import uuid4

import pytest

from leasehold.domain.lease import Lease
from leasehold.limits import external_output
from leasehold.limits.external_output import Line, StoredItems
from leasehold.settings import Settings
from leasehold.telemetry.emissions import encoded_chunk
from leasehold.transitions import claims, settlements
from tests.factories import Rows, stale
from tests.transitions.test_external import QUEUE, claimed_outside

SETTINGS = Settings(_env_file=None)
#: Stores texts as lines or as chunks. (rows, settings, lease, the number of the first text, the texts).
Store = Callable[[Rows, Settings, Lease, int, Sequence[str]], Awaitable[StoredItems | None]]


async def log(rows: Rows, settings: Settings, lease: Lease, first: int, texts: Sequence[str]) -> StoredItems | None:
    return await external_output.log(rows.connection, settings, lease, first, [Line(text) for text in texts])


async def emit(rows: Rows, settings: Settings, lease: Lease, first: int, texts: Sequence[str]) -> StoredItems | None:
    return await external_output.emit(rows.connection, settings, lease, first, texts)


both = pytest.mark.parametrize("store", [log, emit])


def bounded(**bounds: int) -> Settings:
    return SETTINGS.model_copy(update=bounds)


async def stored_rows(rows: Rows) -> list[tuple[Any, ...]]:
    """(first, n) of each stored row."""
    found = await rows.connection.fetch(
        "SELECT first, n FROM job_log UNION ALL SELECT first, n FROM job_stream ORDER BY first"
    )
    return [tuple(row) for row in found]


@both
async def test_only_the_holder_of_the_lease_stores_output(rows: Rows, store: Store) -> None:
    lease = (await claimed_outside(rows)).lease
    for other in (stale(lease, owner=uuid4()), stale(lease, epoch=lease.epoch + 1), stale(lease, task_id=uuid4())):
        assert await store(rows, SETTINGS, other, 1, ["x"]) is None
    assert await stored_rows(rows) == []


@both
async def test_a_repeated_request_is_answered_as_before_and_takes_no_room(rows: Rows, store: Store) -> None:
    """It would not fit any more if it counted again."""
    lease = (await claimed_outside(rows)).lease
    three = bounded(job_log_lines=3, stream_chunks=3)
    for _ in range(2):
        assert await store(rows, three, lease, 1, ["a", "b"]) == StoredItems(2, cut=False)
    assert await store(rows, three, lease, 3, ["c"]) == StoredItems(1, cut=False)
    assert await stored_rows(rows) == [(1, 2), (3, 1)]
    assert await store(rows, three, lease, 4, ["d"]) == StoredItems(0, cut=True)


@both
async def test_one_request_may_store_as_many_items_as_an_attempt_may_have(rows: Rows, store: Store) -> None:
    lease = (await claimed_outside(rows)).lease
    two = bounded(job_log_lines=2, stream_chunks=2)
    assert await store(rows, two, lease, 1, ["a", "b"]) == StoredItems(2, cut=False)


@pytest.mark.parametrize(("more", "stored"), [(0, StoredItems(2, cut=False)), (-1, StoredItems(1, cut=True))])
async def test_one_request_may_emit_as_many_bytes_as_an_attempt_may_have(
    rows: Rows, more: int, stored: StoredItems
) -> None:
    lease = (await claimed_outside(rows)).lease
    settings = bounded(stream_bytes=2 * len(encoded_chunk("x")) + more)
    assert await emit(rows, settings, lease, 1, ["x", "x"]) == stored


async def test_a_log_that_may_have_no_line_is_cut_and_stores_none(rows: Rows) -> None:
    lease = (await claimed_outside(rows)).lease
    assert await log(rows, bounded(job_log_lines=0), lease, 1, ["a"]) == StoredItems(0, cut=True)
    assert await stored_rows(rows) == []


async def test_the_stream_begins_again_also_after_an_attempt_that_was_given_back(rows: Rows) -> None:
    """The next worker begins with the step's first chunk, although no attempt has failed."""
    lease = (await claimed_outside(rows)).lease
    await emit(rows, SETTINGS, lease, 1, ["old"])
    await settlements.release(rows.connection, [lease])
    (claimed,) = await claims.claim_due(rows.connection, rows.terms, [QUEUE], 1)
    await emit(rows, SETTINGS, claimed.lease, 1, ["new"])
    restarts = await rows.connection.fetch("SELECT task_id, epoch, restarts FROM job_stream ORDER BY epoch")
    assert [tuple(row) for row in restarts] == [(lease.task_id, 1, False), (lease.task_id, 2, True)]
