"""Which job gets a new deadline, and until when. A step whose work is paid for asks for more time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from leasehold.transitions import settlements
from leasehold.transitions.jobs.deadlines import extend_deadline, set_deadline
from leasehold.transitions.settlements import Completion
from tests.factories import Rows

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


async def test_a_job_has_at_least_the_time_that_its_step_needs_and_no_other_job_has_more(rows: Rows) -> None:
    soon, late = datetime.now(UTC) + MINUTE, datetime.now(UTC) + DAY
    own, patient, other = [await rows.leased(deadline_at=at) for at in (soon, late, soon)]
    before = await rows.connection.fetchval("SELECT clock_timestamp()")
    for claimed in (own, patient):
        await extend_deadline(rows.connection, claimed.job_id, HOUR)
    after = await rows.connection.fetchval("SELECT clock_timestamp()")
    extended, kept, unnamed = [(await rows.job(one.job_id))["deadline_at"] for one in (own, patient, other)]
    assert before + HOUR <= extended <= after + HOUR
    assert (kept, unnamed) == (late, soon)


async def test_a_job_without_a_deadline_or_that_has_ended_gets_no_new_one(rows: Rows) -> None:
    soon = datetime.now(UTC) + MINUTE
    endless, ended = await rows.leased(), await rows.leased(deadline_at=soon)
    await settlements.complete(rows.connection, [Completion(ended.lease)])
    for claimed in (endless, ended):
        await extend_deadline(rows.connection, claimed.job_id, HOUR)
    assert [(await rows.job(one.job_id))["deadline_at"] for one in (endless, ended)] == [None, soon]


async def test_a_job_gets_the_deadline_that_is_set_for_it_and_no_other_job_does(rows: Rows) -> None:
    """Also if it had an earlier or a later one, or none."""
    now = datetime.now(UTC)
    soon, set_for, late = now + MINUTE, now + HOUR, now + DAY
    jobs = [await rows.leased(deadline_at=at) for at in (soon, late, None) for _ in range(2)]
    for claimed in jobs[::2]:
        await set_deadline(rows.connection, claimed.job_id, set_for)
    deadlines = [(await rows.job(one.job_id))["deadline_at"] for one in jobs]
    assert deadlines == [set_for, soon, set_for, late, set_for, None]
