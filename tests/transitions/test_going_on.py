"""Whoever completes a step goes on with the next one: claimed in the same commit, without a hint."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from leasehold.domain.pipeline import Pipeline, Step
from leasehold.transitions import claims, jobs, settlements
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Completion, Settled, Verdict
from tests.factories import DIAMOND, THREE, Rows, assert_histories, assert_history, terms
from tests.support.lock_waits import until_waiting
from tests.transitions import test_workflows as workflows
from tests.transitions.conftest import Open

APART = Pipeline(
    "apart",
    module="tests.factories",
    steps=[Step("a"), Step("b", needs=("a",), queue="elsewhere"), Step("c", needs=("b",))],
)

#: `both` needs `first` and `beside`; `then` and `too` need `first` alone.
FORK = Pipeline(
    "fork",
    module="tests.factories",
    steps=[
        Step("beside"),
        Step("first"),
        Step("both", needs=("first", "beside")),
        Step("then", needs=("first",)),
        Step("too", needs=("first",)),
    ],
)
#: An external worker does one of the steps.
MIXED = Pipeline(
    "mixed",
    module="tests.factories",
    steps=[Step("first"), Step("beside"), Step("outside", needs=("first",), external=True)],
)
#: The test gives the steps of this queue to external workers.
OUTSIDE = "outside"
EXTERNAL = Pipeline(
    "external",
    module="tests.factories",
    steps=[
        Step("first"),
        Step("outside", needs=("first",), queue=OUTSIDE),
        Step("inside", needs=("first",)),
        Step("then", needs=("inside",)),
        Step("last", needs=("outside", "then"), queue=OUTSIDE),
    ],
)


async def go_on(rows: Rows, done: Sequence[Claimed]) -> Settled:
    completions = [Completion(claimed.lease, claim_next=True) for claimed in done]
    return await settlements.complete(rows.connection, completions, rows.terms)


async def states(rows: Rows, claimed: Claimed) -> dict[str, str]:
    found = await rows.connection.fetch("SELECT step, status FROM task WHERE job_id = $1", claimed.job_id)
    return {row["step"]: row["status"] for row in found}


async def test_a_job_of_three_steps_is_done_by_one_worker_with_one_hint(rows: Rows) -> None:
    claimed = first = await rows.leased(THREE)
    for step in ("b", "c"):
        settled = await go_on(rows, [claimed])
        assert settled.announcements == []
        following = settled.next_steps[claimed.lease.task_id]
        assert (following.step, following.lease.epoch, following.lease.attempt) == (step, 1, 1)
        assert (following.job_id, following.params, following.output_prefix) == (
            first.job_id, first.params, first.output_prefix,
        )  # fmt: skip
        assert (following.lease.owner, following.waited) == (rows.terms.owner, 0)
        claimed = following
    assert (await go_on(rows, [claimed])).next_steps == {}
    assert (await rows.job(first.job_id))["status"] == "succeeded"
    assert await rows.connection.fetchval("SELECT count(*) FROM outbox") == 1  # of the submission
    await assert_history(rows, first.job_id)


async def test_of_two_steps_one_goes_on_and_the_other_gets_its_hint(rows: Rows) -> None:
    top = await rows.leased(DIAMOND)
    settled = await go_on(rows, [top])
    left = settled.next_steps[top.lease.task_id]
    assert left.step == "left"
    (right_hint,) = settled.announcements
    right = (await rows.claim_all())[0]
    assert right.lease.task_id == right_hint.hint.task_id
    both = await go_on(rows, [left, right])  # and of two that are completed together, one goes on with what follows
    (bottom,) = both.next_steps.values()
    assert bottom.step == "bottom"
    assert (await rows.job(top.job_id))["leased"] == 1
    await go_on(rows, [bottom])
    assert (await rows.job(top.job_id))["status"] == "succeeded"
    await assert_history(rows, top.job_id)


async def test_a_step_that_waits_for_another_one_is_not_claimed(rows: Rows) -> None:
    top = await rows.leased(DIAMOND)
    left = (await go_on(rows, [top])).next_steps[top.lease.task_id]
    assert (await go_on(rows, [left])).next_steps == {}
    assert (await states(rows, top))["bottom"] == "blocked"


async def test_a_worker_goes_on_with_a_step_behind_one_that_still_waits_and_the_others_wait_for_anybody(
    rows: Rows,
) -> None:
    """The step that waits for one more only counts; the step that anybody may claim is in nobody's hands, and its hint
    carries the trace of its job.
    """
    await rows.submit(FORK, trace={"traceparent": "00-1"})
    (first,) = [claimed for claimed in await rows.claim_all() if claimed.step == "first"]
    before = {row["step"]: dict(row) for row in await rows.connection.fetch("SELECT * FROM task")}
    settled = await go_on(rows, [first])
    assert [claimed.step for claimed in settled.next_steps.values()] == ["then"]
    after = {row["step"]: dict(row) for row in await rows.connection.fetch("SELECT * FROM task")}
    assert after["both"] == before["both"] | {"waiting_on": 1}
    freed = {"status": "pending", "waiting_on": 0, "available_at": after["too"]["available_at"]}
    assert after["too"] == before["too"] | freed
    (hint,) = settled.announcements
    assert (hint.hint.task_id, hint.hint.headers) == (after["too"]["id"], {"traceparent": "00-1"})
    await assert_history(rows, first.job_id)


async def test_a_step_of_another_queue_goes_its_own_way(rows: Rows) -> None:
    """Who completed the step before may not serve it."""
    first = await rows.leased(APART)
    settled = await go_on(rows, [first])
    assert settled.next_steps == {}
    assert [announced.hint.queue for announced in settled.announcements] == ["elsewhere"]


@pytest.mark.parametrize(("paused", "goes_on"), [("default", False), ("elsewhere", True)])
async def test_a_paused_queue_starts_nothing(rows: Rows, paused: str, goes_on: bool) -> None:
    first = await rows.leased(THREE)
    await rows.connection.execute("INSERT INTO paused_queue (queue, reason) VALUES ($1, 'r')", paused)
    settled = await go_on(rows, [first])
    assert (len(settled.next_steps), len(settled.announcements)) == (goes_on, not goes_on)


async def test_a_job_that_is_asked_to_stop_goes_no_further(rows: Rows) -> None:
    first = await rows.leased(THREE, keep_seconds=3600)
    await jobs.request_cancel(rows.connection, [first.job_id], "t", reason="r", by="b")
    settled = await go_on(rows, [first])
    assert (settled.next_steps, [ended.outcome for ended in settled.ended]) == ({}, ["cancelled"])
    assert (await rows.job(first.job_id))["status"] == "cancelled"
    await assert_history(rows, first.job_id)  # also: the job is deleted once it was kept for its time


async def test_a_job_that_is_asked_to_stop_does_not_run_again_in_its_history(rows: Rows) -> None:
    """Its last two steps end together."""
    top = await rows.leased(DIAMOND)
    await settlements.complete(rows.connection, [Completion(top.lease)])
    both = await rows.claim_all()
    await jobs.request_cancel(rows.connection, [top.job_id], "t", reason="r", by="b")
    await go_on(rows, both)
    told = [event["job_status"] for event in await rows.events(top.job_id)]
    assert told[told.index("cancel_requested") :] == ["cancel_requested"] * 3 + ["cancelled"]
    await assert_history(rows, top.job_id)


@pytest.mark.parametrize("asks", [False, True])
async def test_nobody_goes_on_who_did_not_ask_to(rows: Rows, asks: bool) -> None:
    """Nor who does not say for how long."""
    first = await rows.leased(THREE)
    completion = Completion(first.lease, claim_next=True) if asks else Completion(first.lease)
    settled = await settlements.complete(rows.connection, [completion], None if asks else rows.terms)
    assert (settled.next_steps, len(settled.announcements)) == ({}, 1)
    assert await states(rows, first) == {"a": "succeeded", "b": "pending", "c": "blocked"}


@pytest.mark.parametrize(("column", "silent", "asking", "goes_on"), [
    ("queue", "default", "default", True),
    ("queue", "elsewhere", "default", False),
    ("priority", "1", "0", False),
])  # fmt: skip
async def test_of_two_workers_that_end_the_last_needs_together_only_the_one_that_asks_goes_on(
    rows: Rows, column: str, silent: str, asking: str, goes_on: bool
) -> None:
    """And only with what it may claim itself: the step after them is in the queue and the band of the other one."""
    top = await rows.leased(DIAMOND)
    await settlements.complete(rows.connection, [Completion(top.lease)])
    left, right = sorted(await rows.claim_all(), key=lambda claimed: claimed.step)
    values = {"left": silent, "right": asking, "bottom": silent}
    await rows.connection.executemany(
        f"UPDATE task SET {column} = $2::text::{'text' if column == 'queue' else 'smallint'} WHERE step = $1",
        list(values.items()),
    )
    completions = [Completion(left.lease), Completion(right.lease, claim_next=True)]
    settled = await settlements.complete(rows.connection, completions, rows.terms)
    assert {task: claimed.step for task, claimed in settled.next_steps.items()} == (
        {right.lease.task_id: "bottom"} if goes_on else {}
    )
    assert len(settled.announcements) == (not goes_on)
    await assert_history(rows, top.job_id)


async def test_a_job_waits_for_external_workers_while_one_of_its_steps_is_theirs_to_take(rows: Rows) -> None:
    """Nobody goes on with a step of such a job, and a step that waits for an external worker gets no hint."""
    await rows.submit(Pipeline("beside", module="tests.factories", steps=[Step("theirs", queue=OUTSIDE)]))
    first = await rows.leased(EXTERNAL)
    await rows.connection.execute("UPDATE task SET queue = 'ext:t:q' WHERE queue = $1", OUTSIDE)
    await rows.connection.execute("UPDATE job SET external = 2 WHERE id = $1", first.job_id)
    tasks = {row["step"]: row["id"] for row in await rows.connection.fetch("SELECT step, id FROM task")}

    async def end(step: str) -> tuple[str, list[str]]:
        """The job's status after the step, and the steps that got a hint."""
        claimed = [first] if step == "first" else await claims.claim(rows.connection, rows.terms, [tasks[step]])
        settled = await go_on(rows, claimed)
        assert settled.next_steps == {}
        await assert_history(rows, first.job_id)
        hinted = {hint.hint.task_id for hint in settled.announcements}
        return (await rows.job(first.job_id))["status"], [name for name, task in tasks.items() if task in hinted]

    assert await end("first") == ("waiting_worker", ["inside"])
    assert await end("outside") == ("running", [])
    assert await end("inside") == ("running", ["then"])
    assert await end("then") == ("waiting_worker", [])
    assert await end("last") == ("succeeded", [])


@pytest.mark.parametrize(("cancels", "status"), [(False, "waiting_worker"), (True, "cancel_requested")])
async def test_a_job_with_one_external_step_waits_for_its_worker_unless_it_is_asked_to_stop(
    rows: Rows, cancels: bool, status: str
) -> None:
    """Also while another of its steps runs."""
    await rows.submit(MIXED)
    beside, first = sorted(await rows.claim_all(), key=lambda claimed: claimed.step)
    if cancels:
        await jobs.request_cancel(rows.connection, [first.job_id], "t", reason="r", by="b")
    await go_on(rows, [first])
    assert (await rows.job(first.job_id))["status"] == status
    await assert_history(rows, first.job_id)
    await go_on(rows, [beside])
    assert (await rows.job(first.job_id))["status"] == ("cancelled" if cancels else status)
    await assert_history(rows, first.job_id)


async def test_who_ends_a_step_does_not_take_the_workflow_that_another_worker_takes_meanwhile(
    rows: Rows, another: Open
) -> None:
    """When the completion began, the workflow waited, and nobody had it."""
    call = workflows.step(1)
    workflow = await workflows.suspended(rows, call, ends=1, delay=0.0)
    assert call.child is not None
    (child,) = await claims.claim(rows.connection, rows.terms, [call.child])
    other = await another()
    async with other.connection.transaction():
        (taken,) = await claims.claim(other.connection, other.terms, [workflow.lease.task_id])
        claimed = await other.task(workflow.lease.task_id)
        ending = asyncio.create_task(go_on(rows, [child]))
        await until_waiting(other.connection)
    settled = await ending
    assert (settled.verdicts, settled.next_steps) == ({child.lease.task_id: Verdict.SETTLED}, {})
    task = await rows.task(workflow.lease.task_id)
    assert (task["lease_owner"], task["epoch"], task["news"]) == (other.terms.owner, taken.lease.epoch, 1)
    for kept in ("status", "attempt", "lease_until", "started_at"):
        assert task[kept] == claimed[kept]
    await assert_history(rows, workflow.job_id)


async def test_whose_lease_is_lost_goes_on_with_nothing(rows: Rows) -> None:
    first = await rows.leased(THREE)
    await rows.connection.execute("UPDATE task SET epoch = 2 WHERE id = $1", first.lease.task_id)
    assert (await go_on(rows, [first])).next_steps == {}
    assert (await states(rows, first))["b"] == "blocked"


@pytest.mark.parametrize("known", [False, True])
async def test_what_was_claimed_by_a_commit_whose_answer_was_lost_is_claimed_anew(rows: Rows, known: bool) -> None:
    first = await rows.leased(THREE)
    unheard = (await go_on(rows, [first])).next_steps[first.lease.task_id]
    again = await go_on(rows, [first])
    assert again.verdicts[first.lease.task_id] is settlements.Verdict.SETTLED
    assert again.next_steps == {}
    held = [unheard.lease.task_id] if known else []
    found = await claims.claim_again(rows.connection, [first.lease.task_id], {}, rows.terms, held)
    if known:  # another claim of ours was heard, and it runs
        assert found == {}
        return
    heard = found[first.lease.task_id]
    assert (heard.step, heard.lease.epoch) == ("b", 2)
    await assert_history(rows, first.job_id)


async def test_a_worker_that_missed_an_answer_claims_only_what_that_commit_claimed_for_it(rows: Rows) -> None:
    first, heard, taken = [await rows.leased(THREE) for _ in range(3)]
    steps = (await go_on(rows, [first, heard, taken])).next_steps
    await assert_histories(rows.connection)
    of_another = steps[taken.lease.task_id].lease.task_id
    await rows.lapse(of_another)  # the worker was thought dead, and another one runs the step
    await claims.claim(rows.connection, terms(), [of_another])
    await rows.lapse(of_another)
    found = await claims.claim_again(rows.connection, [first.lease.task_id, taken.lease.task_id], {}, rows.terms, [])
    assert set(found) == {first.lease.task_id}
    epochs = [(await rows.task(steps[one.lease.task_id].lease.task_id))["epoch"] for one in (first, heard, taken)]
    assert epochs == [2, 1, 2]


@pytest.mark.parametrize(
    ("second", "third", "first_hops"),
    [(1, 1, ["b", "c"]), (0, 0, ["b", "c"]), (0, 1, ["b"]), (2, 2, [])],
)
async def test_who_completes_a_step_does_not_go_on_with_a_less_urgent_one(
    rows: Rows, second: int, third: int, first_hops: list[str]
) -> None:
    claimed = await rows.leased(THREE, step_priority={"b": second, "c": third})
    hops = []
    while following := (await go_on(rows, [claimed])).next_steps.get(claimed.lease.task_id):
        hops.append(following.step)
        claimed = following
    assert hops == first_hops
    found = await rows.connection.fetch("SELECT step, priority FROM task")
    assert {row["step"]: row["priority"] for row in found} == {"a": 1, "b": second, "c": third}
