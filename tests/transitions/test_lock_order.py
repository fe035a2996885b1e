"""Limits are locked before the rows of jobs and their keys, so that no two transactions wait for each other. Here the
limits are new: nobody else can use a limit's row before the transaction that writes it has ended.
"""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from leasehold.app.writing import template_version_of
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.ids import new_id
from leasehold.domain.pipeline import Pipeline, PipelineLimit, Step
from leasehold.transitions import concurrency, jobs, runs, settlements
from leasehold.transitions.jobs import AdmissionTerms
from leasehold.transitions.limits import TenantRules
from leasehold.transitions.runs import NewRun
from leasehold.transitions.settlements import Failure
from leasehold.transitions.workflows import children
from tests.factories import ONE, Rows
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open
from tests.transitions.test_concurrency import held
from tests.transitions.test_started_runs import running, start

LIMIT = ConcurrencyLimit("t", "k", at_most=1)


async def test_a_submission_with_the_key_of_a_job_that_is_being_retried_is_refused_without_a_deadlock(
    rows: Rows, another: Open
) -> None:
    """Both lock the limit before they take the key."""
    failed = new_id()
    await rows.submit(ONE, id=failed, dedupe_key="key")
    (claimed,) = await rows.claim_all()
    await settlements.fail(rows.connection, [Failure(claimed.lease, "error", "x", "", False, 0.0)])
    other = await another()
    async with rows.connection.transaction():
        await concurrency.lock_limits(rows.connection, [LIMIT])  # as `replay` does first
        submitting = asyncio.create_task(other.submit(ONE, dedupe_key="key", limits=[LIMIT]))
        await until_waiting(rows.connection)
        assert await jobs.replay(rows.connection, failed, "t", terms=AdmissionTerms([LIMIT])) == []
    with pytest.raises(asyncpg.UniqueViolationError, match="job_dedupe"):
        await submitting
    assert await held(rows) == {failed}


async def test_a_workflow_that_starts_a_run_does_not_deadlock_with_a_run_that_replaces_the_workflow(
    rows: Rows, another: Open
) -> None:
    """The run that replaces it locks its limits first, and then cancels the workflow."""
    workflow = await running(rows)
    limited = Pipeline("limited", module="tests.factories", steps=[Step("only")])
    limited.limits = (PipelineLimit(1),)
    call = start(1, new_id())
    assert call.child is not None
    new = NewRun(template_version_of(limited), "t", {}, id=call.child)
    other = (await another()).connection

    async def start_run() -> None:
        async with other.transaction():
            assert await children.start(other, workflow.lease, call, new) is not None

    async with rows.connection.transaction():
        await concurrency.lock_limits(rows.connection, runs.limits_of(new, TenantRules([], False)))
        starting = asyncio.create_task(start_run())
        await until_waiting(rows.connection)
        await rows.connection.execute("SELECT FROM job WHERE id = $1 FOR UPDATE", workflow.job_id)
    await starting
    assert await held(rows) == {call.child}
