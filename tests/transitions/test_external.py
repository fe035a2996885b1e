"""Steps of external workers at their rows: each statement is about one step, beside others that look like it."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest

from leasehold.domain.backoff import DEFAULT_LADDER
from leasehold.domain.lease import Lease
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.evaluation.templates import Templates
from leasehold.transitions import claims, external, settlements
from leasehold.transitions.claims import Claimed
from leasehold.transitions.jobs import RunOf, external_queue
from leasehold.transitions.settlements import Completion, Output, Verdict
from tests.factories import Rows, assert_histories, stale
from tests.transitions.conftest import Open

QUEUE = external_queue("t", "reports")
OUTSIDE = Pipeline(
    "outside", module="tests.factories", steps=[Step("only", queue="reports", max_attempts=3, external=True)]
)
#: `last` needs `first` and `second`; nothing needs `beside`.
CHAIN = Pipeline(
    "chain",
    module="tests.factories",
    steps=[
        *(Step(name, queue="reports", external=True) for name in ("first", "second", "beside")),
        Step("last", queue="reports", external=True, needs=("first", "second")),
    ],
)


class NoTemplates:
    """The reason why a test needs none: the step is of no run of the tenant."""

    async def find_for_run(self, *names: object) -> None:
        raise AssertionError(names)


TEMPLATES = cast("Templates", NoTemplates())


async def claimed_outside(rows: Rows, run: RunOf | None = None) -> Claimed:
    """A new job whose step an external worker has claimed."""
    await rows.submit(OUTSIDE, run=run)
    (claimed,) = await claims.claim_due(rows.connection, rows.terms, [QUEUE], 1)
    return claimed


async def make_late(rows: Rows, lease: Lease) -> None:
    await rows.connection.execute(
        "UPDATE task SET timeout_seconds = 1, started_at = started_at - interval '1 minute' WHERE id = $1",
        lease.task_id,
    )


async def test_a_step_is_of_the_tenant_that_has_it(rows: Rows) -> None:
    lease = (await claimed_outside(rows)).lease
    assert await external.is_of_tenant(rows.connection, "t", lease.task_id)
    assert not await external.is_of_tenant(rows.connection, "u", lease.task_id)
    assert not await external.is_of_tenant(rows.connection, "t", uuid4())


async def test_only_the_report_of_the_lease_waits_for_the_lock_of_its_job(rows: Rows, another: Open) -> None:
    """A worker whose lease is lost must not hold up those who work on the job, nor wait for them."""
    lease = (await claimed_outside(rows)).lease
    other_job = (await claimed_outside(rows)).job_id
    other = (await another()).connection
    await rows.connection.execute("SET lock_timeout = '100 ms'")
    async with other.transaction():
        assert await external.lock(other, "t", lease)
        async with rows.connection.transaction():
            assert await external.lock(rows.connection, "t", stale(lease, owner=uuid4()))
            assert not await external.lock(rows.connection, "u", lease)
            await rows.connection.execute("SELECT FROM job WHERE id = $1 FOR UPDATE", other_job)
        with pytest.raises(Exception, match="lock timeout"):
            await external.lock(rows.connection, "t", lease)


async def test_a_step_that_its_worker_gives_back_waits_for_a_poll_and_has_no_hint(rows: Rows) -> None:
    """No worker of ours may claim it."""
    outside, inside = await claimed_outside(rows), await rows.leased()
    released = await settlements.release(rows.connection, [outside.lease, inside.lease])
    assert set(released.verdicts.values()) == {Verdict.SETTLED}
    assert [hint.hint.task_id for hint in released.announcements] == [inside.lease.task_id]


async def test_a_step_is_late_for_the_worker_that_holds_its_lease(rows: Rows) -> None:
    late, in_time = (await claimed_outside(rows)).lease, (await claimed_outside(rows)).lease
    await make_late(rows, late)
    assert await external.is_late(rows.connection, late)
    assert not await external.is_late(rows.connection, in_time)
    assert not await external.is_late(rows.connection, stale(late, owner=uuid4()))
    assert not await external.is_late(rows.connection, stale(late, epoch=late.epoch + 1))


async def test_the_duty_ends_the_late_attempts_of_external_workers_and_no_others(rows: Rows) -> None:
    """A step that waits for its next attempt was late once; a step of our own worker is stopped by that worker; and a
    step that could not be ended a moment ago is left for later.
    """
    late, in_time, waiting, set_aside = [(await claimed_outside(rows)).lease for _ in range(4)]
    inside = (await rows.leased()).lease
    for lease in (late, waiting, set_aside, inside):
        await make_late(rows, lease)
    await external.time_out(rows.connection, TEMPLATES, "t", waiting)
    await rows.connection.execute(
        "INSERT INTO quarantine (duty, unit, failures, error, failed_at, retry_at)"
        " VALUES ($1, $2, 1, '{}', now(), now() + interval '1 hour')",
        external.DUTY,
        str(set_aside.task_id),
    )
    others = [lease.task_id for lease in (in_time, waiting, set_aside, inside)]
    before = [await rows.task(task_id) for task_id in others]
    (outcome,) = await external.end_overdue(rows.connection, TEMPLATES)
    assert outcome.verdicts == {late.task_id: Verdict.SETTLED}
    assert [await rows.task(task_id) for task_id in others] == before
    assert (await rows.task(late.task_id))["status"] == "retry"
    assert await external.end_overdue(rows.connection, TEMPLATES) == []
    await assert_histories(rows.connection)


@pytest.mark.parametrize("tenant", ["t", "u"])
async def test_a_step_of_no_run_of_the_tenant_waits_as_a_step_without_a_retry_policy(rows: Rows, tenant: str) -> None:
    run = RunOf("outside", 1, "", "") if tenant == "u" else None
    lease = (await claimed_outside(rows, run)).lease
    for _ in range(20):  # the delay is random
        delay = await external.backoff(rows.connection, TEMPLATES, tenant, lease.task_id)
        assert DEFAULT_LADDER[0] / 2 <= delay <= DEFAULT_LADDER[0]


class Laddered:
    """The template of each run has this ladder for each step."""

    ladder = tuple(timedelta(seconds=seconds) for seconds in (10, 100, 1000))

    async def find_for_run(self, _connection: object, tenant_id: str, template: str, version: int) -> Any:
        assert (tenant_id, template, version) == ("t", "outside", 1)
        return SimpleNamespace(template=self)

    def retry(self, step: str) -> Any:
        assert step == "only"
        return self


async def test_a_step_of_a_run_waits_by_the_ladder_of_its_template(rows: Rows) -> None:
    """The longer, the more of its attempts have failed. The delay is random: at least the half of the ladder's."""
    lease = (await claimed_outside(rows, RunOf("outside", 1, "", ""))).lease
    for errors, longest in enumerate(Laddered.ladder):
        await rows.connection.execute("UPDATE task SET errors = $2 WHERE id = $1", lease.task_id, errors)
        delay = await external.backoff(rows.connection, cast("Templates", Laddered()), "t", lease.task_id)
        assert longest / 2 <= delay <= longest


async def settled_chain(rows: Rows) -> Claimed:
    """A run of CHAIN whose last step is claimed. Each of its other steps has a result and a file."""
    await rows.submit(CHAIN)
    for claimed in await claims.claim_due(rows.connection, rows.terms, [QUEUE], 3):
        output = Output(claimed.step, f"jobs/{claimed.job_id}/{claimed.step}", 1, "ff", "text/plain")
        await settlements.complete(rows.connection, [Completion(claimed.lease, [output], {"of": claimed.step})])
    (last,) = await claims.claim_due(rows.connection, rows.terms, [QUEUE], 3)
    return last


async def test_a_claim_has_the_results_and_the_files_of_the_steps_that_it_needs(rows: Rows) -> None:
    own, other = await settled_chain(rows), await settled_chain(rows)
    ids = [one.lease.task_id for one in (own, other)]
    needed = await external.needed_steps(rows.connection, ids)

    def found(claimed: Claimed) -> list[tuple[Any, ...]]:
        return [
            (row["step"], row["value"], [file["key"] for file in row["files"]]) for row in needed[claimed.lease.task_id]
        ]

    for claimed in (own, other):
        assert found(claimed) == [
            (step, {"of": step}, [f"jobs/{claimed.job_id}/{step}"]) for step in ("first", "second")
        ]
    assert list(await external.needed_steps(rows.connection, ids[:1])) == ids[:1]


async def test_a_step_that_was_skipped_gives_a_claim_nothing(rows: Rows) -> None:
    last = await settled_chain(rows)
    await rows.connection.execute("UPDATE task SET status = 'skipped' WHERE step = 'second'")
    needed: dict[UUID, list[Any]] = await external.needed_steps(rows.connection, [last.lease.task_id])
    assert [row["step"] for row in needed[last.lease.task_id]] == ["first"]
