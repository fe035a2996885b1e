"""Runs that a workflow starts: awaited, cancelled with it, or detached."""

from __future__ import annotations

from tests.workflows import shop
from tests.workflows.conftest import Runs, Start


async def test_a_workflow_waits_for_the_result_of_a_run_of_its_own(runs: Runs, worker_of: Start) -> None:
    await worker_of()
    run = await runs.submit(shop.starts)
    assert await runs.ended(run) == ("succeeded", "7: 5")
    assert [row[1:4] for row in await runs.journal(run)] == [(1, "start", "checkout"), (2, "result", "checkout")]


async def test_a_started_run_is_cancelled_with_its_workflow_unless_it_is_detached(runs: Runs, worker_of: Start) -> None:
    await worker_of()
    run = await runs.submit(shop.starts_both)
    await runs.until(run, "EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id AND e.kind = 'signal')")
    await runs.waits(run)
    bound, detached = [
        row["child_id"]
        for row in await runs.connection.fetch(
            "SELECT child_id FROM journal WHERE job_id = $1 AND kind = 'start' ORDER BY number", run
        )
    ]
    await runs.cancel(run)
    status, _ = await runs.ended(bound)
    assert status == "cancelled"
    assert await runs.connection.fetchval("SELECT finished_at IS NULL FROM job WHERE id = $1", detached)
    await runs.cancel(detached)


async def test_the_result_of_a_run_that_is_deleted_meanwhile_is_an_error_and_no_endless_wait(
    runs: Runs, worker_of: Start
) -> None:
    run = await runs.submit(shop.slow_child)  # a run that does not end meanwhile
    first = await worker_of()
    await runs.until(run, "EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id AND e.kind = 'result')")
    await first.__aexit__()
    await runs.connection.execute("DELETE FROM job WHERE id = (SELECT child_id FROM journal WHERE kind = 'result')")
    await worker_of()
    status, error = await runs.ended(run)
    assert (status, error["code"]) == ("failed", "run_deleted")
