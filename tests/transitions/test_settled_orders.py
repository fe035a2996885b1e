"""A person settles a failed step: what it counts for, which job it counts for, and who may adopt which order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from leasehold.domain.errors import Conflict
from leasehold.domain.states import JobState
from leasehold.transitions import jobs, settlements, sweeps
from leasehold.transitions.claims import Claimed
from leasehold.transitions.jobs import resolving
from leasehold.transitions.jobs.resolving import Action, Unresolved
from leasehold.transitions.settlements import Completion, Failure, Verdict
from tests.factories import DIAMOND, THREE, Rows, assert_history
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open
from tests.transitions.test_workflows import children, step, suspended

#: What a step writes down before it orders.
INTENT = {"asked": True}


async def failed(rows: Rows, tenant: str = "t", code: str = "unknown", **columns: Any) -> Claimed:
    """A job whose first step has failed, and may have ordered."""
    claimed = await rows.leased(THREE, tenant=tenant, **columns)
    await rows.connection.execute("INSERT INTO note (task_id, value) VALUES ($1, $2)", claimed.lease.task_id, INTENT)
    await settlements.fail(rows.connection, [Failure(claimed.lease, "error", code, "no answer", False, 0.0)])
    return claimed


async def found(rows: Rows, claimed: Claimed, tenant: str = "t") -> Unresolved:
    unresolved = await resolving.lock(rows.connection, claimed.job_id, tenant, "a", "asked")
    assert unresolved is not None
    return unresolved


async def adopt(rows: Rows, claimed: Claimed, ref: str, tenant: str = "t", system: str = "shop") -> bool:
    unresolved = await found(rows, claimed, tenant)
    return await resolving.write(
        rows.connection, claimed.job_id, tenant, unresolved, "adopt", "anna", system=system, ref=ref
    )


@pytest.mark.parametrize("keep_seconds", [None, 3600])
async def test_a_job_goes_on_after_the_step_that_a_person_resolved(rows: Rows, keep_seconds: int | None) -> None:
    """The steps after it read the person's value; the failed attempt's worker can no longer change it."""
    claimed = await failed(rows, keep_seconds=keep_seconds)
    await rows.connection.execute(
        "INSERT INTO result (task_id, value) VALUES ($1, '{\"old\": 1}')", claimed.lease.task_id
    )
    async with rows.connection.transaction():
        assert await jobs.resolve(rows.connection, claimed.job_id, "t", "a", {"ref": "x"}, "anna")
        hints = await jobs.replay(rows.connection, claimed.job_id, "t") or []
    assert await rows.statuses(claimed.job_id) == {"a": "succeeded", "b": "pending", "c": "blocked"}
    assert len(hints) == 1
    late = Completion(claimed.lease, value={"ref": "late"})
    assert (await settlements.complete(rows.connection, [late])).verdicts[claimed.lease.task_id] is Verdict.LOST
    assert [row["value"] for row in await rows.connection.fetch("SELECT value FROM result")] == [{"ref": "x"}]
    (resolved,) = [event for event in await rows.events(claimed.job_id) if event["kind"] == "completed"]
    assert (resolved["step"], resolved["data"]) == ("a", {"resolved_by": "anna"})
    assert (await rows.task(claimed.lease.task_id))["epoch"] == claimed.lease.epoch + 1
    for name in "bc":
        (following,) = await rows.claim_all()
        assert following.step == name
        await settlements.complete(rows.connection, [Completion(following.lease)])
    assert (await rows.job(claimed.job_id))["status"] == "succeeded"
    await assert_history(rows, claimed.job_id)


@pytest.mark.parametrize(("name", "intent"), [("a", "other"), ("b", "asked"), ("z", "asked")])
async def test_only_a_step_that_has_recorded_its_intent_is_settled(rows: Rows, name: str, intent: str) -> None:
    claimed = await failed(rows)
    assert await resolving.lock(rows.connection, claimed.job_id, "t", name, intent) is None
    if name != "a":
        assert not await jobs.resolve(rows.connection, claimed.job_id, "t", name, {}, "anna")
    assert await rows.statuses(claimed.job_id) == {"a": "failed", "b": "skipped", "c": "skipped"}
    assert await rows.connection.fetchval("SELECT count(*) FROM result") == 0


@pytest.mark.parametrize("expired", [False, True])
async def test_a_failed_step_of_a_workflow_that_has_not_failed_itself_is_the_workflows_affair(
    rows: Rows, expired: bool
) -> None:
    workflow = await suspended(rows, step(1), step(2), ends=2)
    child = (await children(rows))[0]
    await rows.connection.execute("INSERT INTO note (task_id, value) VALUES ($1, $2)", child.lease.task_id, INTENT)
    await settlements.fail(rows.connection, [Failure(child.lease, "error", "unknown", "no", False, 0.0)])
    if expired:
        await rows.connection.execute("UPDATE job SET deadline_at = clock_timestamp()")
        assert len(await sweeps.expire_jobs(rows.connection)) == 1
    assert await resolving.lock(rows.connection, workflow.job_id, "t", child.step, "asked") is None
    assert not await jobs.resolve(rows.connection, workflow.job_id, "t", child.step, {}, "anna")
    assert (await rows.task(child.lease.task_id))["status"] == "failed"
    await assert_history(rows, workflow.job_id)


async def test_whoever_settles_a_step_reads_its_own_note_of_the_last_attempt(rows: Rows) -> None:
    mine, other = [await failed(rows) for _ in range(2)]
    for claimed in (other, mine):
        await rows.connection.execute("DELETE FROM note WHERE task_id = $1", claimed.lease.task_id)
        await rows.connection.execute(
            "INSERT INTO note (task_id, value) SELECT id, jsonb_build_object('step', step, 'job', job_id, 'asked', 1)"
            " FROM task WHERE job_id = $1",
            claimed.job_id,
        )
    for one in (mine, other):
        assert await found(rows, one) == Unresolved(
            one.lease.task_id, one.lease.epoch, {"step": "a", "job": str(one.job_id), "asked": 1}, JobState.FAILED
        )


@pytest.mark.parametrize("end", ["expired", "cancelled", "cancelled while it ran"])
async def test_an_order_of_a_job_that_has_ended_for_good_is_settled_too(rows: Rows, end: str) -> None:
    claimed = await rows.leased(THREE)
    await rows.connection.execute("INSERT INTO note (task_id, value) VALUES ($1, $2)", claimed.lease.task_id, INTENT)
    assert await resolving.lock(rows.connection, claimed.job_id, "t", "a", "asked") is None  # it may still succeed
    if end == "cancelled":
        await settlements.release(rows.connection, [claimed.lease])
    if end == "expired":
        await rows.connection.execute("UPDATE job SET deadline_at = clock_timestamp()")
        assert len(await sweeps.expire_jobs(rows.connection)) == 1
    else:
        await jobs.request_cancel(rows.connection, [claimed.job_id], "t", reason="r", by="b")
    if end == "cancelled while it ran":
        await settlements.acknowledge_cancel(rows.connection, [claimed.lease])
    unresolved = await found(rows, claimed)
    assert unresolved.job_status == end.partition(" ")[0]
    assert not await jobs.resolve(rows.connection, claimed.job_id, "t", "a", {}, "anna")
    for ref in "wx":  # the latest decision counts
        await resolving.record(rows.connection, unresolved, {"ref": ref})
    assert [tuple(row) for row in await rows.connection.fetch("SELECT task_id, value FROM result")] == [
        (claimed.lease.task_id, {"ref": "x"})
    ]
    await assert_history(rows, claimed.job_id)


async def test_a_step_whose_note_is_forgotten_begins_anew_and_the_other_steps_keep_theirs(rows: Rows) -> None:
    """Otherwise it would ask for the order of its last attempt, and place none."""
    claimed = await failed(rows)
    await rows.connection.execute(
        "INSERT INTO note (task_id, value) SELECT id, '{\"sent\": true}' FROM task ON CONFLICT DO NOTHING"
    )
    await resolving.forget_note(rows.connection, await found(rows, claimed))
    assert await resolving.lock(rows.connection, claimed.job_id, "t", "a", "asked") is None
    noted = await rows.connection.fetch("SELECT t.step FROM note n JOIN task t ON t.id = n.task_id")
    assert {row["step"] for row in noted} == {"b", "c"}


async def test_of_two_who_settle_a_step_at_once_the_second_finds_it_retried(rows: Rows, another: Open) -> None:
    claimed, other = await failed(rows), await another()
    async with other.connection.transaction():
        await found(other, claimed)
        await jobs.replay(other.connection, claimed.job_id, "t")
        second = asyncio.ensure_future(resolving.lock(rows.connection, claimed.job_id, "t", "a", "asked"))
        await until_waiting(other.connection)
    assert await second is None


async def test_two_failed_steps_of_a_job_that_are_resolved_at_once_are_both_in_its_history(
    rows: Rows, another: Open
) -> None:
    top = await rows.leased(DIAMOND)
    await settlements.complete(rows.connection, [Completion(top.lease)])
    failures = [Failure(one.lease, "error", "unknown", "no", False, 0.0) for one in await rows.claim_all()]
    await settlements.fail(rows.connection, failures)
    other = await another()
    async with other.connection.transaction():
        assert await jobs.resolve(other.connection, top.job_id, "t", "left", {}, "anna")
        second = asyncio.ensure_future(jobs.resolve(rows.connection, top.job_id, "t", "right", {}, "bob"))
        await until_waiting(other.connection)
    assert await second
    await assert_history(rows, top.job_id)
    await jobs.replay(rows.connection, top.job_id, "t")
    (last,) = await rows.claim_all()
    assert last.step == "bottom"
    await assert_history(rows, top.job_id)


async def test_one_person_settles_a_failure_and_the_next_failure_is_settled_again(rows: Rows) -> None:
    """Whatever is settled in other jobs."""
    claimed, foreign = await failed(rows), await failed(rows, "other")
    other = await failed(rows)
    for one, tenant in ((other, "t"), (foreign, "other")):
        assert await adopt(rows, one, str(one.job_id), tenant)
    assert await resolving.latest(rows.connection, claimed.job_id, "t") is None
    failure = await found(rows, claimed)
    decisions: list[tuple[bool, Action, str]] = [(True, "give_up", "anna"), (False, "again", "bob")]
    for first, action, actor in decisions:
        assert await resolving.write(rows.connection, claimed.job_id, "t", failure, action, actor) is first
        latest = await resolving.latest(rows.connection, claimed.job_id, "t")
        assert (latest["action"], latest["ref"], latest["actor"]) == ("give_up", None, "anna")
    await jobs.replay(rows.connection, claimed.job_id, "t")
    (again,) = await rows.claim_all()
    await settlements.fail(rows.connection, [Failure(again.lease, "error", "unknown", "no", False, 0.0)])
    assert await resolving.write(rows.connection, claimed.job_id, "t", await found(rows, claimed), "again", "bob")
    assert (await resolving.latest(rows.connection, claimed.job_id, "t"))["actor"] == "bob"
    assert await resolving.latest(rows.connection, foreign.job_id, "t") is None
    assert await resolving.latest(rows.connection, claimed.job_id, "other") is None


async def test_an_order_belongs_to_one_job_of_a_tenant_and_other_systems_have_orders_of_the_same_id(rows: Rows) -> None:
    first, second = [await failed(rows) for _ in range(2)]
    assert await adopt(rows, first, "order")
    with pytest.raises(Conflict, match="Another job has this order"):
        await adopt(rows, second, "order")
    assert await resolving.latest(rows.connection, second.job_id, "t") is None
    assert await adopt(rows, second, "order", system="another shop")


async def test_what_other_tenants_adopted_is_found_by_the_system_and_the_id_of_the_order(rows: Rows) -> None:
    for number, (tenant, system, ref) in enumerate(
        [("other", "shop", "order"), ("other", "shop", "another"), ("other", "another shop", "order"),
         ("t", "shop", "order")]
    ):  # fmt: skip
        await adopt(rows, await failed(rows, tenant, params={"n": number}), ref, tenant, system)
    for tenant, expected in (("t", [{"n": 0}]), ("other", [{"n": 3}])):
        assert await resolving.other_adopters(rows.connection, tenant, "shop", "order") == expected


async def test_two_who_adopt_the_same_order_do_so_one_after_the_other(rows: Rows, another: Open) -> None:
    other = await another()

    async def adopt_both() -> None:
        async with rows.connection.transaction():
            for ref in ("another order", "order"):
                await resolving.lock_order(rows.connection, ref)

    async with other.connection.transaction():
        await resolving.lock_order(other.connection, "order")
        second = asyncio.create_task(adopt_both())
        await until_waiting(other.connection)
        assert not second.done()
    await second
