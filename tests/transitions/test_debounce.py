"""Debouncing at its rows: a submission changes the one waiting run of its key, and nothing else."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.ids import new_id
from leasehold.domain.pipeline import Pipeline, RunTerms, Step
from leasehold.transitions import concurrency, debounce, jobs, settlements
from leasehold.transitions.debounce import Debounced
from leasehold.transitions.jobs import RunOf
from leasehold.transitions.settlements import Completion, Failure, Snoozing
from tests.factories import Rows, assert_histories
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open
from tests.transitions.test_bystanders import everything

DEBOUNCED = Pipeline(
    "debounced",
    module="tests.factories",
    terms=RunTerms(timeout=timedelta(hours=1), start_within=timedelta(hours=5)),
    steps=[Step("only")],
)
OTHER = Pipeline("other", module="tests.factories", steps=[Step("only")])
#: Two limits: the job waits at them until both have room.
LIMITS = [ConcurrencyLimit("t", key, at_most=1) for key in ("k", "l")]


async def written(
    rows: Rows,
    pipeline: Pipeline = DEBOUNCED,
    tenant: str = "t",
    key: str | None = "key",
    *,
    due: bool = False,
    **of: Any,
) -> UUID:
    """A run with this key, which waits for its time unless it is due."""
    job_id: UUID = new_id()
    not_before = None if due else datetime.now(UTC) + timedelta(minutes=1)
    run = RunOf(pipeline.name, 1, "scope", "id")
    async with rows.connection.transaction():
        await rows.submit(
            pipeline, 1, tenant, id=job_id, dedupe_key=key, not_before=not_before, run=run, params={"n": 1}, **of
        )
    return job_id


async def neighbours(rows: Rows) -> list[UUID]:
    """Runs that another submission is about: of another tenant, task or key, without a key, and one that has ended."""
    ended = await written(rows, due=True)
    (claimed,) = await rows.claim_all()
    await settlements.complete(rows.connection, [Completion(claimed.lease)])
    return [
        ended,
        await written(rows, tenant="u"),
        await written(rows, OTHER),
        await written(rows, key="another"),
        await written(rows, key=None, limits=[ConcurrencyLimit("t", "m", at_most=1)]),
        await written(rows, tenant="u", key="another", limits=[ConcurrencyLimit("u", "k", at_most=1)]),
    ]


async def submitted(
    rows: Rows, delay: float = 7200.0, submission: UUID | None = None, tenant: str = "t"
) -> UUID | None:
    """The run that takes the arguments of one submission; None: there is none, or an earlier one is repeated."""
    one = Debounced(submission or new_id(), "debounced", "key", {"n": 2}, delay)
    async with rows.connection.transaction():
        records = await debounce.lock_keys(rows.connection, tenant, [one])
        if await debounce.written_earlier(rows.connection, tenant, records):
            return None
        return (await debounce.merge(rows.connection, tenant, records)).get(1)


async def rows_of(rows: Rows, job_ids: list[UUID]) -> list[str]:
    runs = await rows.connection.fetch("SELECT to_jsonb(r)::text FROM run r")
    texts = [*await everything(rows), *(row[0] for row in runs)]
    return [text for text in texts if any(str(job_id) in text for job_id in job_ids)]


@pytest.mark.parametrize("limits", [[], LIMITS], ids=["without limits", "at limits"])
async def test_a_submission_changes_the_waiting_run_of_its_key_and_no_other(
    rows: Rows, limits: list[ConcurrencyLimit]
) -> None:
    others = await neighbours(rows)
    own = await written(rows, limits=limits)
    before = await rows_of(rows, others)
    assert len(before) > 2 * len(others)
    assert await submitted(rows) == own
    assert await rows_of(rows, others) == before
    job = await rows.job(own)
    starts_at = await rows.connection.fetchval("SELECT available_at FROM task WHERE job_id = $1", own)
    assert (job["params"], job["dedupe_key"], job["held"]) == ({"n": 2}, "key", bool(limits))
    assert job["deadline_at"] == starts_at + (DEBOUNCED.terms.start_within if limits else DEBOUNCED.terms.timeout)
    assert starts_at > await rows.connection.fetchval("SELECT now() + interval '100 minutes'")
    assert await rows.connection.fetchval("SELECT scheduled_at FROM run WHERE job_id = $1", own) == starts_at
    ready = await rows.connection.fetch("SELECT ready_at FROM gate_job WHERE job_id = $1", own)
    assert [row["ready_at"] for row in ready] == [starts_at] * len(limits)
    await assert_histories(rows.connection)


@pytest.mark.parametrize("state", ["due", "running", "waits for a poll"])
async def test_a_run_that_has_started_keeps_all_but_its_key(rows: Rows, state: str) -> None:
    """The submission becomes a run of its own."""
    own = await written(rows, due=True)
    if state != "due":
        (claimed,) = await rows.claim_all()
        if state != "running":
            await settlements.snooze(rows.connection, [Snoozing(claimed.lease, 600.0, by_step=True)])
    before = await rows.job(own)
    task = await rows.connection.fetchrow("SELECT * FROM task WHERE job_id = $1", own)
    submission = new_id()
    assert await submitted(rows, submission=submission) is None
    assert await rows.job(own) == before | {"dedupe_key": None}
    assert await rows.connection.fetchrow("SELECT * FROM task WHERE job_id = $1", own) == task
    again = await written(rows)  # as the caller does, in the same transaction
    assert await submitted(rows, submission=submission) == again, "no earlier submission had been merged"


async def put_off(rows: Rows, *, by_step: bool = False, missing: str | None = None) -> None:
    """A worker claims the task that is due, and snoozes it for no time."""
    (claimed,) = await rows.claim_all()
    await settlements.snooze(rows.connection, [Snoozing(claimed.lease, 0.0, missing_handler=missing, by_step=by_step)])


@pytest.mark.parametrize("times", [1, 2])
async def test_a_run_whose_code_no_worker_could_run_yet_has_not_started(rows: Rows, times: int) -> None:
    """Its epoch does not go back, and no worker that has the code wakes the run before its new start. A run of another
    key is in the same state, and one waits at limits.
    """
    other = await written(rows, key="another", due=True)
    await put_off(rows, missing="debounced.only")
    await rows.connection.execute("UPDATE task SET available_at = now() + interval '1 hour'")
    await written(rows, key="limited", due=True, limits=LIMITS)
    own = await written(rows, due=True)
    for _ in range(times):
        await put_off(rows, missing="debounced.only")
    assert await submitted(rows) == own
    task = await rows.connection.fetchrow("SELECT * FROM task WHERE job_id = $1", own)
    assert task is not None
    assert (task["status"], task["epoch"]) == ("waiting", times)
    assert task["available_at"] > await rows.connection.fetchval("SELECT now() + interval '100 minutes'")
    unknown = await rows.connection.fetch("SELECT job_id FROM unknown_task JOIN task ON task.id = task_id")
    assert [row["job_id"] for row in unknown] == [other]
    job = await rows.job(own)
    assert (job["params"], job["dedupe_key"]) == ({"n": 2}, "key")
    assert job["deadline_at"] == task["available_at"] + DEBOUNCED.terms.timeout
    await assert_histories(rows.connection)


@pytest.mark.parametrize("before", ["a snooze of the step", "a failure", "a release", "a limit"])
async def test_a_run_that_is_put_off_after_its_start_has_started(rows: Rows, before: str) -> None:
    own = await written(rows, due=True, limits=LIMITS if before == "a limit" else [])
    if before == "a limit":
        await concurrency.admit(rows.connection, [(limit.tenant_id, limit.key) for limit in LIMITS])
    elif before == "a snooze of the step":
        await put_off(rows, by_step=True)
    else:
        (claimed,) = await rows.claim_all()
        if before == "a release":
            await settlements.release(rows.connection, [claimed.lease])
        else:
            failure = Failure(claimed.lease, "error", "no", "no", retryable=True, delay=0.0)
            await settlements.fail(rows.connection, [failure])
    await put_off(rows)
    assert await submitted(rows) is None
    assert (await rows.job(own))["dedupe_key"] is None


async def test_a_workflow_that_snoozes_to_see_its_cancel_has_started(rows: Rows) -> None:
    """Its only attempt failed, and a failure of a workflow that is being cancelled is a snooze."""
    own = await written(rows, due=True)
    (claimed,) = await rows.claim_all()
    await rows.connection.execute("UPDATE task SET journaled = true WHERE job_id = $1", own)
    await jobs.request_cancel(rows.connection, [own], "t", reason="", by="tests")
    await settlements.snooze(rows.connection, [Snoozing(claimed.lease, 600.0)])
    assert (await rows.task(claimed.lease.task_id))["status"] == "waiting"
    assert await submitted(rows) is None
    assert (await rows.job(own))["params"] == {"n": 1}


async def test_a_repeated_submission_is_found_by_its_tenant_and_task_alone(rows: Rows) -> None:
    """It is remembered for a day. A submission that became a run is found by the id of the run."""
    own, submission = await written(rows), new_id()

    async def found(tenant: str, pipeline: str, submission: UUID) -> dict[int, UUID]:
        one = Debounced(submission, pipeline, "key", {}, 1.0)
        async with rows.connection.transaction():
            records = await debounce.lock_keys(rows.connection, tenant, [one])
            return await debounce.written_earlier(rows.connection, tenant, records)

    assert await found("t", "debounced", submission) == {}
    assert await submitted(rows, submission=submission) == own
    for name in (own, submission):
        assert await found("t", "debounced", name) == {1: own}
        assert await found("u", "debounced", name) == {}
    assert await found("t", "other", own) == {}
    await rows.connection.execute("UPDATE idempotency SET expires_at = clock_timestamp()")
    assert await found("t", "debounced", submission) == {}
    assert await submitted(rows, submission=submission) == own


async def test_a_submission_that_waits_for_a_transaction_about_the_run_has_locked_nothing_of_it(
    rows: Rows, another: Open
) -> None:
    """A cancel locks the job, and then its tasks."""
    own = await written(rows)
    other = (await another()).connection
    async with other.transaction():
        await other.execute("SELECT FROM job WHERE id = $1 FOR UPDATE", own)
        merging = asyncio.create_task(submitted(rows))
        await until_waiting(other)
        await other.execute("SELECT FROM task WHERE job_id = $1 FOR UPDATE", own)
    assert await merging == own
