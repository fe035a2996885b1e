"""Whoever completes a step goes on with the next one: claimed in the same commit, without a hint."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from leasehold.domain.pipeline import Pipeline, Step
from leasehold.transitions import claims, jobs, settlements
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Completion, Settled
from tests.factories import DIAMOND, THREE, Rows, assert_history, terms

APART = Pipeline(
    "apart",
    module="tests.factories",
    steps=[Step("a"), Step("b", needs=("a",), queue="elsewhere"), Step("c", needs=("b",))],
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
        assert following.lease.owner == rows.terms.owner
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


async def test_a_step_of_another_queue_goes_its_own_way(rows: Rows) -> None:
    """Who completed the step before may not serve it."""
    first = await rows.leased(APART)
    settled = await go_on(rows, [first])
    assert settled.next_steps == {}
    assert [announced.hint.queue for announced in settled.announcements] == ["elsewhere"]


async def test_a_paused_queue_starts_nothing(rows: Rows) -> None:
    first = await rows.leased(THREE)
    await rows.connection.execute("INSERT INTO paused_queue (queue, reason) VALUES ('default', 'r')")
    settled = await go_on(rows, [first])
    assert (settled.next_steps, len(settled.announcements)) == ({}, 1)


async def test_a_job_that_is_asked_to_stop_goes_no_further(rows: Rows) -> None:
    first = await rows.leased(THREE)
    await jobs.request_cancel(rows.connection, [first.job_id], "t", reason="r", by="b")
    assert (await go_on(rows, [first])).next_steps == {}
    assert (await rows.job(first.job_id))["status"] == "cancelled"


async def test_nobody_goes_on_who_did_not_ask_to(rows: Rows) -> None:
    first = await rows.leased(THREE)
    settled = await settlements.complete(rows.connection, [Completion(first.lease)], rows.terms)
    assert (settled.next_steps, len(settled.announcements)) == ({}, 1)


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
