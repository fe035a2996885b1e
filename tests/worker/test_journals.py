"""What an attempt at a workflow reads: the requests of one round trip to the journals each get the answer for their own
lease, and a large result is that of the awaited step or run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from uuid import UUID

import pytest

from leasehold.domain.errors import ObjectMissing
from leasehold.settings import Settings
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Completion, Output, complete
from leasehold.transitions.workflows.records import Call, Recorded, Recording
from leasehold.worker.attempts.journals import Journals
from tests.factories import DIAMOND, Rows, stale
from tests.unit.test_primary_reads import Servers, port_of
from tests.worker.conftest import SECONDS


@pytest.fixture
async def journals(settings: Settings) -> AsyncIterator[Journals]:
    journals = Journals(settings, lambda _hints: None, at_most=64)
    yield journals
    await journals.close()


@pytest.mark.parametrize("lost_is_first", [True, False])
async def test_an_attempt_that_lost_its_workflow_and_the_same_workers_next_attempt_each_get_their_own_answer(
    journals: Journals, rows: Rows, lost_is_first: bool
) -> None:
    """The worker claims the workflow again while a call of its lost attempt still waits for PostgreSQL."""
    lease = (await rows.leased()).lease
    calls = (Call("", 1, "signal", "go"),)
    lost, won = Recording(stale(lease, epoch=lease.epoch - 1), calls), Recording(lease, calls)
    asked = [asyncio.create_task(journals.record(one)) for one in ([lost, won] if lost_is_first else [won, lost])]
    await asyncio.sleep(0)
    journals.start()  # so both wait for the first round trip
    async with asyncio.timeout(SECONDS):
        answers = await asyncio.gather(*asked)
    assert answers == [Recorded(not is_lost, cancelling=False) for is_lost in (lost_is_first, not lost_is_first)]
    assert await rows.connection.fetchval("SELECT count(*) FROM journal") == 1


async def test_a_large_result_is_that_of_the_awaited_step_or_run_and_of_nothing_beside_it(rows: Rows) -> None:
    """Beside it are the step's other outputs, results of other steps and runs, and results of the steps that the
    awaited run has started itself, if it is the run of a workflow (`contained`).
    """
    names = ("result", "other")
    tasks: dict[tuple[str, str], UUID] = {}
    runs: dict[str, UUID] = {}
    for run in ("one", "two"):
        top = await rows.leased(DIAMOND)
        await complete(rows.connection, [_completion(top, f"{run} top", names)], rows.terms)
        sides = [each for each in await rows.claim_all() if each.job_id == top.job_id]
        await complete(rows.connection, [_completion(side, f"{run} {side.step}", names) for side in sides], rows.terms)
        runs[run] = top.job_id
        tasks |= {(run, each.step): each.lease.task_id for each in (top, *sides)}
    # The run's own step is its first one here, and its last one there, whatever order PostgreSQL reads them in.
    for contained, tasks_of_step in ((True, ("one top", "two left")), (False, ("one left", "two top"))):
        for run, step in (name.split() for name in tasks_of_step):
            await rows.connection.execute("UPDATE task SET contained = $2 WHERE id = $1", tasks[run, step], contained)
    await rows.connection.execute("UPDATE task SET contained = true WHERE step = 'right'")
    expected = {(task, name): f"{run} {step} {name}" for (run, step), task in tasks.items() for name in names}
    for (task, name), key in expected.items():
        assert await port_of(Servers(rows.connection)).fetch(task, name, is_run=False) == key.encode()
    for run, own_step in (("one", "left"), ("two", "top")):
        for name in names:
            read = await port_of(Servers(rows.connection)).fetch(runs[run], name, is_run=True)
            assert read == f"{run} {own_step} {name}".encode()
    for child, name, is_run in ((runs["one"], "result", False), (tasks["one", "top"], "result", True)):
        with pytest.raises(ObjectMissing):
            await port_of(Servers(rows.connection)).fetch(child, name, is_run=is_run)
    with pytest.raises(ObjectMissing):
        await port_of(Servers(rows.connection)).fetch(tasks["one", "top"], "unknown", is_run=False)


def _completion(of: Claimed, key: str, names: Sequence[str]) -> Completion:
    return Completion(of.lease, [Output(name, f"{key} {name}", 1, "abc", "text/plain") for name in names])
