"""Limits are locked before the rows of jobs and their keys, so that no two transactions wait for each other. Here the
limits are new: nobody else can use a limit's row before the transaction that writes it has ended.
"""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.ids import new_id
from leasehold.transitions import concurrency, jobs, settlements
from leasehold.transitions.jobs import AdmissionTerms
from leasehold.transitions.settlements import Failure
from tests.factories import ONE, Rows
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open
from tests.transitions.test_concurrency import held

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
