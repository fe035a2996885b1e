"""What `submit` writes: all jobs or none, each with what its client and its pipeline say of it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.errors import Invalid
from leasehold.domain.pipeline import Pipeline, RunTerms, SkipIf, Step
from leasehold.runtime.pacing import PIECE_SIZE
from leasehold.transitions import concurrency, jobs
from leasehold.transitions.jobs import NewJob, RunOf
from tests.factories import DIAMOND, ONE, THREE, Rows, assert_histories, assert_history
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open

LIMIT = ConcurrencyLimit("t", "k", at_most=1)
#: With `quick`, no step is left.
SKIPPABLE = Pipeline("skippable", module="tests.factories", steps=[Step("only", skip_if=SkipIf("/quick"))])
OUTSIDE = Pipeline(
    "outside",
    module="tests.factories",
    steps=[Step("first", external=True, timeout=timedelta(minutes=7)), Step("second", needs=("first",))],
)


async def test_a_run_and_the_tags_of_a_job_are_its_own(rows: Rows) -> None:
    made = [
        NewJob(ONE, "t", run=RunOf("template", 2, "scope", "1"), tags={"color": "red", "size": "s"}),
        NewJob(ONE, "other", tags={"color": "blue"}),
        NewJob(ONE, "t"),
        NewJob(THREE, "t", output_prefix="elsewhere"),
    ]
    await jobs.submit(rows.connection, made)
    runs = await rows.connection.fetch("SELECT job_id, tenant_id, template, version, scope, scope_id FROM run")
    assert [tuple(row) for row in runs] == [(made[0].id, "t", "template", 2, "scope", "1")]
    tags = await rows.connection.fetch("SELECT job_id, tenant_id, name, value FROM job_tag")
    assert {tuple(row) for row in tags} == {
        (made[0].id, "t", "color", "red"), (made[0].id, "t", "size", "s"), (made[1].id, "other", "color", "blue"),
    }  # fmt: skip
    prefixes = {claimed.job_id: claimed.output_prefix for claimed in await rows.claim_all()}
    assert prefixes == {new.id: new.output_prefix or f"jobs/{new.id}/output" for new in made}
    await assert_histories(rows.connection)


@pytest.mark.parametrize("limited", [False, True])
async def test_a_job_that_waits_at_its_limits_has_its_own_time_for_that(rows: Rows, limited: bool) -> None:
    terms = RunTerms(timeout=timedelta(hours=3), start_within=timedelta(hours=9))
    timed = Pipeline("timed", module="tests.factories", steps=[Step("only")], terms=terms)
    new = NewJob(timed, "t", limits=[LIMIT] if limited else [])
    await jobs.submit(rows.connection, [new])
    deadline = (await rows.job(new.id))["deadline_at"]
    assert round((deadline - datetime.now(UTC)) / timedelta(hours=1)) == (9 if limited else 3)


async def test_a_time_of_less_than_a_second_is_one_second(rows: Rows) -> None:
    terms = RunTerms(timeout=timedelta(milliseconds=1), start_within=timedelta(seconds=90))
    brief = Pipeline("brief", module="tests.factories", steps=[Step("only")], terms=terms)
    new = NewJob(brief, "t")
    await jobs.submit(rows.connection, [new])
    job = await rows.job(new.id)
    assert (job["timeout_seconds"], job["start_within_seconds"]) == (1, 90)


async def test_only_the_first_steps_of_a_job_wait_for_its_time_and_the_others_for_them(rows: Rows) -> None:
    start = datetime.now(UTC) + timedelta(hours=1)
    new = NewJob(THREE, "t", not_before=start)
    assert await jobs.submit(rows.connection, [new]) == []
    assert await rows.statuses(new.id) == {"a": "waiting", "b": "blocked", "c": "blocked"}
    due = await rows.connection.fetch("SELECT step, available_at FROM task")
    assert {row["step"] for row in due if row["available_at"] >= start} == {"a"}
    assert (await rows.job(new.id))["status"] == "pending"
    await assert_history(rows, new.id)


async def test_a_job_whose_only_step_is_not_due_is_pending_and_its_history_says_so(rows: Rows) -> None:
    later = NewJob(ONE, "t", not_before=datetime.now(UTC) + timedelta(hours=1))
    held = NewJob(ONE, "t", limits=[LIMIT])
    assert await jobs.submit(rows.connection, [later, held]) == []
    for new in (later, held):
        assert (await rows.job(new.id))["status"] == "pending"
        assert [event["job_status"] for event in await rows.events(new.id)] == ["pending"]
        await assert_history(rows, new.id)


@pytest.mark.parametrize("later", [False, True])
async def test_a_job_that_begins_with_an_external_step_waits_for_its_worker_without_a_hint(
    rows: Rows, later: bool
) -> None:
    not_before = datetime.now(UTC) + timedelta(hours=1) if later else None
    new = NewJob(OUTSIDE, "t", not_before=not_before)
    assert await jobs.submit(rows.connection, [new]) == []
    assert (await rows.job(new.id))["status"] == jobs.first_state(new) == "waiting_worker"
    await assert_history(rows, new.id)


async def test_an_external_step_has_the_time_of_its_template_or_else_of_its_code(rows: Rows) -> None:
    """The platform measures it: an external worker has no code of the step. A worker's step has only the template's."""
    own_time = Pipeline(
        "own_time",
        module="tests.factories",
        steps=[
            Step("code", external=True, timeout=timedelta(minutes=7)),
            Step("template", external=True, timeout=timedelta(minutes=7), timeout_seconds=5),
            Step("brief", external=True, timeout=timedelta(milliseconds=1)),
            Step("worker", timeout=timedelta(minutes=7)),
            Step("worker_template", timeout=timedelta(minutes=7), timeout_seconds=5),
        ],
    )
    await rows.submit(own_time)
    found = await rows.connection.fetch("SELECT step, timeout_seconds FROM task")
    assert {row["step"]: row["timeout_seconds"] for row in found} == {
        "code": 420, "template": 5, "brief": 1, "worker": None, "worker_template": 5,
    }  # fmt: skip


async def test_a_step_with_two_needs_waits_for_both_also_in_a_job_with_a_limit(rows: Rows) -> None:
    new = NewJob(DIAMOND, "t", limits=[LIMIT])
    await jobs.submit(rows.connection, [new])
    await assert_history(rows, new.id)
    assert len(await concurrency.admit(rows.connection, [("t", "k")])) == 1
    await assert_history(rows, new.id)


MANY = 2 * PIECE_SIZE + 1


async def test_of_many_jobs_all_are_written_or_none(rows: Rows) -> None:
    many = [NewJob(ONE, "t") for _ in range(MANY)]
    many.append(many[0])  # in the last piece
    with pytest.raises(asyncpg.UniqueViolationError):
        await jobs.submit(rows.connection, many)
    assert await rows.connection.fetchval("SELECT count(*) FROM job") == 0
    assert len(await jobs.submit(rows.connection, many[:-1])) == MANY
    assert await rows.connection.fetchval("SELECT count(*) FROM task") == MANY
    await assert_histories(rows.connection)


@pytest.mark.parametrize(("pipelines", "sizes"), [([ONE], [100, 100, 1]), ([ONE, THREE], [33] * 6 + [3])])
async def test_many_jobs_are_written_in_pieces_of_about_a_hundred_steps(
    rows: Rows, pipelines: list[Pipeline], sizes: list[int]
) -> None:
    """A statement for all of them would hold up everybody else. Each writes its hints into one row."""
    many = [NewJob(pipelines[number % len(pipelines)], "t") for number in range(MANY)]
    await jobs.submit(rows.connection, many)
    batches = await rows.connection.fetch("SELECT cardinality(task_ids) AS size FROM outbox_batch ORDER BY id")
    singles = await rows.connection.fetchval("SELECT count(*) FROM outbox")
    assert [row["size"] for row in batches] + [1] * singles == sizes


async def test_of_many_jobs_of_which_one_has_nothing_to_do_none_is_written(rows: Rows) -> None:
    """The connection serves its next statement, though a piece was being written when that was found."""
    many = [NewJob(ONE, "t") for _ in range(MANY)]
    idle = NewJob(SKIPPABLE, "t", params={"quick": True})
    with pytest.raises(Invalid, match="skip every step"):
        await jobs.submit(rows.connection, [*many, idle])
    assert await rows.connection.fetchval("SELECT count(*) FROM job") == 0
    with pytest.raises(Invalid, match="skip every step"):
        jobs.first_state(idle)


@pytest.mark.parametrize("in_transaction", [False, True])
async def test_nobody_sees_a_job_before_it_waits_at_its_limits(rows: Rows, another: Open, in_transaction: bool) -> None:
    other = await another()

    async def submit_limited() -> None:
        if in_transaction:
            async with rows.connection.transaction():
                await rows.submit(limits=[LIMIT])
        else:
            await rows.submit(limits=[LIMIT])

    async with other.connection.transaction():
        await other.connection.execute("LOCK TABLE gate_job IN SHARE MODE")
        submitting = asyncio.create_task(submit_limited())
        await until_waiting(other.connection)
        assert await other.connection.fetchval("SELECT count(*) FROM job") == 0
    await submitting
    assert len(await concurrency.admit(rows.connection, [("t", "k")])) == 1
