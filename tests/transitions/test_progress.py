"""What a running step says of its progress is its latest word, and only the holder of its lease may say it."""

from __future__ import annotations

import asyncio
from uuid import UUID, uuid4

from leasehold.transitions import claims, progress
from leasehold.transitions.progress import Progress
from tests.factories import Rows, stale
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open


async def said(rows: Rows) -> dict[UUID, tuple[int, float, str]]:
    found = await rows.connection.fetch("SELECT task_id, epoch, percent, summary FROM progress")
    return {row["task_id"]: (row["epoch"], row["percent"], row["summary"]) for row in found}


async def test_the_latest_word_of_each_step_counts_and_its_text_is_cut_off(rows: Rows) -> None:
    own, beside = (await rows.leased()).lease, (await rows.leased()).lease
    for percent, text in ((10.0, "begun"), (20.0, "x" * 600)):
        reports = [Progress(own, percent, text), Progress(beside, percent / 2, text[:9])]
        assert await progress.report(rows.connection, reports) == {own.task_id, beside.task_id}
    assert await said(rows) == {own.task_id: (1, 20.0, "x" * 500), beside.task_id: (1, 10.0, "x" * 9)}


async def test_only_the_holder_of_the_lease_is_heard(rows: Rows) -> None:
    own = (await rows.leased()).lease
    others = [stale(own, owner=uuid4()), stale(own, epoch=0), stale(own, epoch=2)]
    assert await progress.report(rows.connection, [Progress(lease, 50.0, "not mine") for lease in others]) == set()
    assert await said(rows) == {}


async def test_the_word_of_an_attempt_whose_lease_was_taken_over_meanwhile_is_not_heard(
    rows: Rows, another: Open
) -> None:
    """It comes while the next attempt commits its first word."""
    lease, other = (await rows.leased()).lease, await another()
    await progress.report(rows.connection, [Progress(lease, 50.0, "half")])
    await rows.lapse(lease.task_id)
    async with other.connection.transaction():
        (taken_over,) = await claims.claim(other.connection, other.terms, [lease.task_id])
        await progress.report(other.connection, [Progress(taken_over.lease, 1.0, "begun again")])
        late = asyncio.create_task(progress.report(rows.connection, [Progress(lease, 60.0, "more than half")]))
        await until_waiting(other.connection)
    assert await late == set()
    assert await said(rows) == {lease.task_id: (2, 1.0, "begun again")}
