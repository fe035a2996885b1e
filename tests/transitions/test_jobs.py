"""From submission to the end: what a job's rows, events and hints say at every turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from math import inf, nan
from random import choices
from uuid import UUID, uuid4

import asyncpg
import pytest
from prometheus_client import REGISTRY

from leasehold.broker import outbox
from leasehold.broker.outbox import Announcement
from leasehold.db import history
from leasehold.db.artifacts import note_of
from leasehold.db.database import Connection
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.pipeline import Pipeline, SkipIf, Step
from leasehold.domain.step_names import MAX_STEP_NAME
from leasehold.transitions import claims, concurrency, jobs, settlements, streams, sweeps, workers
from leasehold.transitions.jobs import AdmissionTerms
from leasehold.transitions.progress import Progress, report
from leasehold.transitions.settlements import Completion, Failure, FanningOut, Output, Part, Snoozing, Verdict
from tests.factories import DIAMOND, ONE, THREE, Rows, assert_history
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open


async def complete(rows: Rows, *claimed: claims.Claimed) -> settlements.Settled:
    return await settlements.complete(rows.connection, [Completion(c.lease) for c in claimed])


async def test_steps_run_one_after_the_other_and_the_last_one_ends_the_job(rows: Rows) -> None:
    (first,) = await rows.submit(THREE)
    job_id = (await rows.task(first.hint.task_id))["job_id"]
    assert await rows.statuses(job_id) == {"a": "pending", "b": "blocked", "c": "blocked"}
    seen = []
    hint: Announcement | None = first
    while hint is not None:
        (claimed,) = await claims.claim(rows.connection, rows.terms, [hint.hint.task_id])
        seen.append(claimed.step)
        settled = await complete(rows, claimed)
        hint = settled.announcements[0] if settled.announcements else None
    assert seen == ["a", "b", "c"]
    job = await rows.job(job_id)
    assert (job["status"], job["steps_left"]) == ("succeeded", 0)
    await assert_history(rows, job_id)


async def test_every_hint_of_a_job_says_whose_it_is(rows: Rows) -> None:
    """Of a submission, the step before, a lease given back, a lost worker, a replay, and the relay."""
    trace = {"request_id": "r"}
    submitted = await rows.submit(THREE, tenant="acme", trace=trace)
    (claimed,) = await claims.claim(rows.connection, rows.terms, [submitted[0].hint.task_id])
    completed = (await complete(rows, claimed)).announcements
    (second,) = await claims.claim(rows.connection, rows.terms, [completed[0].hint.task_id])
    released = (await settlements.release(rows.connection, [second.lease])).announcements
    (third,) = await claims.claim(rows.connection, rows.terms, [released[0].hint.task_id])
    await rows.lapse(third.lease.task_id)
    _, lost, _ = await sweeps.expire_leases(rows.connection, [], 5)
    (fourth,) = await claims.claim(rows.connection, rows.terms, [third.lease.task_id])
    await settlements.fail(rows.connection, [Failure(fourth.lease, "error", "x", "", retryable=False, delay=0)])
    replayed = await jobs.replay(rows.connection, claimed.job_id, "acme") or []
    await rows.connection.execute("UPDATE outbox SET relay_at = clock_timestamp()")
    relayed = await outbox.take(rows.connection, 100)
    for hints in (submitted, completed, released, lost, replayed, relayed):
        assert hints
        assert {(one.hint.tenant, tuple(one.hint.headers.items())) for one in hints} == {("acme", (*trace.items(),))}


async def test_a_step_that_needs_two_starts_once_when_both_finish_at_the_same_time(rows: Rows, another: Open) -> None:
    other = await another()
    for _ in range(20):
        claimed = await rows.leased(DIAMOND)
        await complete(rows, claimed)
        left, right = await rows.claim_all()
        first, second = await asyncio.gather(complete(rows, left), complete(other, right))
        hints = first.announcements + second.announcements
        assert len(hints) == 1
        (bottom,) = await claims.claim(rows.connection, rows.terms, [hints[0].hint.task_id])
        assert bottom.step == "bottom"
        await complete(rows, bottom)
        assert (await rows.job(claimed.job_id))["status"] == "succeeded"
        await assert_history(rows, claimed.job_id)


async def test_a_batch_that_ends_both_parents_frees_their_child(rows: Rows) -> None:
    claimed = await rows.leased(DIAMOND)
    await complete(rows, claimed)
    settled = await complete(rows, *await rows.claim_all())
    assert len(settled.announcements) == 1
    await assert_history(rows, claimed.job_id)


async def test_ten_claims_at_once_give_one_lease(rows: Rows, another: Open) -> None:
    (hint,) = await rows.submit()
    others = [await another() for _ in range(10)]
    got = await asyncio.gather(*(claims.claim(o.connection, o.terms, [hint.hint.task_id]) for o in others))
    assert sorted(len(g) for g in got) == [0] * 9 + [1]


async def test_workers_that_look_at_once_share_the_work_without_overlap(rows: Rows, another: Open) -> None:
    await rows.submit(ONE, count=200)
    others = [await another() for _ in range(4)]

    async def take(one: Rows) -> list[claims.Claimed]:
        taken: list[claims.Claimed] = []
        while found := await claims.claim_due(one.connection, one.terms, ["default"], 7):
            taken += found
        return taken

    taken = [c.lease.task_id for found in await asyncio.gather(*map(take, others)) for c in found]
    taken += [c.lease.task_id for c in await rows.claim_all()]  # what was passed over while another held its job
    assert len(taken) == len(set(taken)) == 200


async def test_a_failure_is_tried_again_until_its_attempts_are_spent(rows: Rows) -> None:
    claimed = await rows.leased(ONE)
    for left in (2, 1, 0):
        failure = Failure(claimed.lease, "error", "flaky", "again", True, 0.0)
        settled = await settlements.fail(rows.connection, [failure])
        assert settled.states[claimed.lease.task_id] == ("retry" if left else "failed")
        assert [ended.outcome for ended in settled.ended] == ([] if left else ["failed"])
        if left:
            (claimed,) = await rows.claim_all()
    job = await rows.job(claimed.job_id)
    assert job["status"] == "failed"
    assert job["error"] == {"code": "flaky", "message": "again", "step": "only", "retryable": True}
    assert await rows.connection.fetchval("SELECT count(*) FROM failure") == 3
    await assert_history(rows, claimed.job_id)


async def test_what_cannot_succeed_is_not_tried_again_and_the_rest_is_skipped(rows: Rows) -> None:
    claimed = await rows.leased(THREE)
    await settlements.fail(rows.connection, [Failure(claimed.lease, "error", "bad", "no", False, 0.0)])
    assert await rows.statuses(claimed.job_id) == {"a": "failed", "b": "skipped", "c": "skipped"}
    assert (await rows.job(claimed.job_id))["status"] == "failed"
    await assert_history(rows, claimed.job_id)


async def test_a_poison_step_stops_after_two_crashes_whatever_its_attempts(rows: Rows) -> None:
    claimed = await rows.leased(ONE)
    crash = [Failure(claimed.lease, "crash", "child_crashed", "SIGSEGV", True, 0.0)]
    assert (await settlements.fail(rows.connection, crash)).states[claimed.lease.task_id] == "retry"
    (claimed,) = await rows.claim_all()
    crash = [Failure(claimed.lease, "crash", "child_crashed", "SIGSEGV", True, 0.0)]
    assert (await settlements.fail(rows.connection, crash)).states[claimed.lease.task_id] == "failed"


async def test_a_failing_branch_takes_the_lease_of_its_running_sibling(rows: Rows) -> None:
    claimed = await rows.leased(DIAMOND)
    await complete(rows, claimed)
    left, right = await rows.claim_all()
    await settlements.fail(rows.connection, [Failure(left.lease, "error", "bad", "no", False, 0.0)])
    (answer,) = await claims.renew(rows.connection, rows.terms.owner, [right.lease], 30.0)
    assert not answer.is_valid
    assert (await complete(rows, right)).verdicts[right.lease.task_id] is Verdict.LOST
    await assert_history(rows, claimed.job_id)


async def test_a_replayed_job_goes_on_from_the_step_that_failed(rows: Rows) -> None:
    claimed = await rows.leased(THREE)
    await complete(rows, claimed)
    (second,) = await rows.claim_all()
    await settlements.fail(rows.connection, [Failure(second.lease, "error", "bad", "no", False, 0.0)])
    assert await jobs.replay(rows.connection, claimed.job_id, "somebody else") is None
    assert len(await jobs.replay(rows.connection, claimed.job_id, "t") or []) == 1
    assert await rows.statuses(claimed.job_id) == {"a": "succeeded", "b": "pending", "c": "blocked"}
    for step in ("b", "c"):
        (again,) = await rows.claim_all()
        assert again.step == step
        await complete(rows, again)
    assert (await rows.job(claimed.job_id))["status"] == "succeeded"
    await assert_history(rows, claimed.job_id)


@pytest.mark.parametrize(
    ("from_step", "kept"),
    [
        ("top", set()),
        ("left", {"top", "left", "right"}),
        ("right", {"top", "left", "right"}),
        (None, {"top", "left", "right", "bottom"}),
    ],
)
async def test_a_step_that_starts_anew_has_no_note_and_one_that_goes_on_keeps_it(
    rows: Rows, from_step: str | None, kept: set[str]
) -> None:
    """`top` has succeeded, `right` has failed, and `left` was stopped by that. A note may be all that is known of an
    order.
    """
    claimed = await rows.leased(DIAMOND)
    await complete(rows, claimed)
    right = next(other for other in await rows.claim_all() if other.step == "right")
    await rows.connection.execute("INSERT INTO note (task_id, value) SELECT id, '{}' FROM task")
    await settlements.fail(rows.connection, [Failure(right.lease, "error", "bad", "no", False, 0.0)])
    assert (await rows.statuses(claimed.job_id))["left"] == "cancelled"
    assert await jobs.replay(rows.connection, claimed.job_id, "t", from_step=from_step) is not None
    noted = await rows.connection.fetch("SELECT t.step FROM note n JOIN task t ON t.id = n.task_id")
    assert {row["step"] for row in noted} == kept


async def fan_out(rows: Rows, claimed: claims.Claimed, step: str, count: int) -> list[claims.Claimed]:
    """Divide the step into parts. Returns them claimed, in order."""
    parts = [Part(step, "default", 1, "three.b", number) for number in range(count)]
    await settlements.fan_out(rows.connection, [FanningOut(claimed.lease, parts)])
    return sorted(await rows.claim_all(), key=lambda part: part.step)


async def fail(rows: Rows, claimed: claims.Claimed) -> None:
    await settlements.fail(rows.connection, [Failure(claimed.lease, "error", "bad", "no", False, 0.0)])


async def test_a_part_that_joins_parts_of_its_own_goes_on_with_its_own_prefix(rows: Rows) -> None:
    """Also if the worker claims it with the end of its last part: it wrote over the outputs of the job."""
    spreading = await rows.leased()
    first, _ = await fan_out(rows, spreading, "part", 2)
    (inner,) = await fan_out(rows, first, "inner", 1)
    outcome = await settlements.complete(rows.connection, [Completion(inner.lease, claim_next=True)], rows.terms)
    joining = outcome.next_steps[inner.lease.task_id]
    assert (joining.step, joining.output_prefix) == (first.step, first.output_prefix)
    assert joining.output_prefix == f"{spreading.output_prefix}/part.0"


async def test_parts_of_two_parts_of_one_name_have_names_of_their_own(rows: Rows) -> None:
    first, second = await fan_out(rows, await rows.leased(), "part", 2)
    inner = [await fan_out(rows, part, "inner", 2) for part in (first, second)]
    names = [[claimed.step for claimed in of] for of in inner]
    assert names == [["inner.0", "inner.1"], ["part.1.inner.0", "part.1.inner.1"]]
    prefixes = {claimed.output_prefix for of in inner for claimed in of}
    assert len(prefixes) == 4


async def failed_fan_out(rows: Rows) -> UUID:
    """A job whose step `b` has fanned out into `part.0` to `part.2`; `part.1` into `inner.0` and `inner.1`. Of these,
    `part.0` and `inner.0` have succeeded, `part.2` has not ended, and `inner.1` has failed.
    """
    claimed = await rows.leased(THREE)
    await complete(rows, claimed)
    (spreading,) = await rows.claim_all()
    first, second, _ = await fan_out(rows, spreading, "part", 3)
    inner, failing = await fan_out(rows, second, "inner", 2)
    await streams.append(rows.connection, [streams.StreamChunk(first.lease, 1, [b'{"chunk": 1}'], restarts=False)])
    await complete(rows, first, inner)
    await fail(rows, failing)
    await assert_history(rows, claimed.job_id)
    return claimed.job_id


@pytest.mark.parametrize("from_step", ["a", "b"])
async def test_a_fan_out_step_that_runs_again_divides_its_work_anew(rows: Rows, from_step: str) -> None:
    """Nothing of the old parts is left: the step would join their results, and could not make parts of these names."""
    job_id = await failed_fan_out(rows)
    assert len(await jobs.replay(rows.connection, job_id, "t", from_step=from_step) or []) == 1
    assert set(await rows.statuses(job_id)) == {"a", "b", "c"}
    for table in ("item", "result", "failure", "job_stream"):
        assert await rows.connection.fetchval(f"SELECT count(*) FROM {table}") == 0, table
    await assert_history(rows, job_id)
    (again,) = await rows.claim_all()
    assert again.step == from_step
    if from_step == "a":
        await complete(rows, again)
        (again,) = await rows.claim_all()
    parts = await fan_out(rows, again, "part", 2)
    assert [part.step for part in parts] == ["part.0", "part.1"]
    await complete(rows, *parts)
    for step in "bc":
        (again,) = await rows.claim_all()
        assert again.step == step
        await complete(rows, again)
    assert (await rows.job(job_id))["status"] == "succeeded"
    await assert_history(rows, job_id)


@pytest.mark.parametrize(
    ("from_step", "runs_again"),
    [(None, {"part.2", "inner.1"}), ("part.0", {"part.0", "part.2", "inner.1"}),
     ("inner.0", {"part.2", "inner.0", "inner.1"})],
)  # fmt: skip
@pytest.mark.parametrize("limited", [False, True])
async def test_a_job_that_goes_on_from_a_part_keeps_the_other_parts_and_waits_for_all_of_them(
    rows: Rows, from_step: str | None, runs_again: set[str], limited: bool
) -> None:
    job_id = await failed_fan_out(rows)
    terms = AdmissionTerms([ConcurrencyLimit("t", "k", at_most=1)] if limited else [])
    await jobs.replay(rows.connection, job_id, "t", from_step=from_step, terms=terms)
    await assert_history(rows, job_id)
    await concurrency.admit(rows.connection, [("t", "k")])
    claimed = await rows.claim_all()
    assert {part.step for part in claimed} == runs_again
    for part in claimed:
        assert (await rows.statuses(job_id))["b"] == "blocked"
        await complete(rows, part)
    for step in ("part.1", "b", "c"):
        (again,) = await rows.claim_all()
        assert again.step == step
        await complete(rows, again)
    assert (await rows.job(job_id))["status"] == "succeeded"
    await assert_history(rows, job_id)


async def test_a_step_waits_for_a_failed_step_beside_the_step_from_which_the_job_goes_on(rows: Rows) -> None:
    top = await rows.leased(DIAMOND)
    await complete(rows, top)
    left, right = await rows.claim_all()
    await complete(rows, left)
    await fail(rows, right)
    await jobs.replay(rows.connection, top.job_id, "t", from_step=left.step)
    for step in await rows.claim_all():
        assert (await rows.statuses(top.job_id))["bottom"] == "blocked"
        await complete(rows, step)
    assert (await rows.statuses(top.job_id))["bottom"] == "pending"
    await assert_history(rows, top.job_id)


@pytest.mark.parametrize("together", [False, True])
async def test_many_jobs_that_are_replayed_together_have_hints_behind_those_of_other_jobs(
    rows: Rows, *, together: bool
) -> None:
    """In the last band. The steps themselves keep their priority."""
    claimed = await rows.leased(ONE)
    before = (await rows.task(claimed.lease.task_id))["priority"]
    await settlements.fail(rows.connection, [Failure(claimed.lease, "error", "bad", "no", False, 0.0)])
    if together:
        (hint,) = await jobs.replay_together(rows.connection, [claimed.job_id], "t")
    else:
        (hint,) = await jobs.replay(rows.connection, claimed.job_id, "t") or []
    assert hint.hint.band == (2 if together else before)
    assert (await rows.task(claimed.lease.task_id))["priority"] == before == 1
    (again,) = await rows.claim_all()
    assert again.lease.task_id == claimed.lease.task_id


async def test_a_lost_worker_costs_no_attempt_and_the_fifth_loss_ends_the_job(rows: Rows) -> None:
    claimed = await rows.leased(ONE)
    for loss in range(1, 7):
        await rows.lapse(claimed.lease.task_id)
        ended, hints, ended_jobs = await sweeps.expire_leases(rows.connection, [], 5)
        assert [one.outcome for one in ended_jobs] == (["failed"] if loss == 6 else [])
        row = await rows.task(claimed.lease.task_id)
        assert (ended, row["losses"], row["errors"]) == (1, loss, 0)
        if loss == 6:
            assert (row["status"], hints) == ("failed", [])
        else:
            assert (row["status"], len(hints)) == ("pending", 1)
            (claimed,) = await rows.claim_all()
    assert (await rows.job(claimed.job_id))["error"]["code"] == "worker_lost"
    await assert_history(rows, claimed.job_id)


async def test_a_step_that_a_sweep_fails_is_counted_as_a_dead_letter(rows: Rows) -> None:
    """Nobody else counts it: its worker is lost. A step that runs again is none."""

    def counted() -> float:
        labels = {"pipeline": "diamond", "step": "left", "code": "worker_lost"}
        return REGISTRY.get_sample_value("leasehold_dead_letters_total", labels) or 0

    await rows.submit(DIAMOND)
    (top,) = await rows.claim_all()
    await complete(rows, top)
    before = counted()
    for losses, expected in ((1, before), (0, before + 1)):
        for claimed in await rows.claim_all():
            if claimed.step == "left":
                await rows.lapse(claimed.lease.task_id)
        await sweeps.expire_leases(rows.connection, [], losses)
        assert counted() == expected
    assert await sweeps.expire_leases(rows.connection, [], 0) == (0, [], [])
    assert counted() == before + 1


async def test_a_sweep_counts_a_part_as_a_dead_letter_of_its_declared_step(rows: Rows) -> None:
    claimed = await rows.leased()
    await rows.connection.execute("UPDATE task SET step = 'piece.17', handler = 'scans.piece'")
    await rows.lapse(claimed.lease.task_id)
    labels = {"pipeline": claimed.pipeline, "step": "piece", "code": "worker_lost"}
    before = REGISTRY.get_sample_value("leasehold_dead_letters_total", labels) or 0
    assert (await sweeps.expire_leases(rows.connection, [], 0))[0] == 1
    assert REGISTRY.get_sample_value("leasehold_dead_letters_total", labels) == before + 1


async def test_a_step_of_a_workflow_that_a_sweep_fails_is_no_dead_letter(rows: Rows) -> None:
    claimed = await rows.leased()
    await rows.connection.execute("UPDATE task SET contained = true")
    await rows.lapse(claimed.lease.task_id)
    labels = {"pipeline": claimed.pipeline, "step": claimed.step, "code": "worker_lost"}
    before = REGISTRY.get_sample_value("leasehold_dead_letters_total", labels)
    assert (await sweeps.expire_leases(rows.connection, [], 0))[0] == 1
    assert (await rows.task(claimed.lease.task_id))["status"] == "failed"
    assert REGISTRY.get_sample_value("leasehold_dead_letters_total", labels) == before


async def test_a_step_has_no_longer_name_than_a_request_takes(rows: Rows) -> None:
    await rows.submit()
    name = "".join(choices("0123456789abcdef", k=MAX_STEP_NAME))  # it does not compress
    await rows.connection.execute("UPDATE task SET step = $1", name)
    with pytest.raises(asyncpg.ProgramLimitExceededError):
        await rows.connection.execute("UPDATE task SET step = $1 || repeat('~', 8)", name)


async def test_a_lease_that_still_holds_is_not_swept(rows: Rows) -> None:
    claimed = await rows.leased()
    assert await sweeps.expire_leases(rows.connection, [uuid4()], 5) == (0, [], [])
    assert (await rows.task(claimed.lease.task_id))["status"] == "running"


async def test_a_job_past_its_deadline_expires_with_its_steps(rows: Rows) -> None:
    claimed = await rows.leased(THREE, deadline_at=datetime.now(UTC) - timedelta(seconds=1))
    (ended,) = await sweeps.expire_jobs(rows.connection)
    assert (ended.pipeline, ended.outcome) == ("three", "expired")
    assert (await rows.job(claimed.job_id))["status"] == "expired"
    assert await rows.statuses(claimed.job_id) == {"a": "cancelled", "b": "skipped", "c": "skipped"}
    assert (await complete(rows, claimed)).verdicts[claimed.lease.task_id] is Verdict.LOST
    await assert_history(rows, claimed.job_id)


async def test_a_job_past_its_deadline_ends_whatever_its_steps_wait_for(rows: Rows) -> None:
    deadline = datetime.now(UTC) - timedelta(seconds=1)
    top = await rows.leased(DIAMOND, deadline_at=deadline)
    await complete(rows, top)
    left, right = sorted(await rows.claim_all(), key=lambda claimed: claimed.step)
    await settlements.fail(rows.connection, [Failure(left.lease, "error", "c", "m", True, 60.0)])
    await settlements.snooze(rows.connection, [Snoozing(right.lease, 60.0)])
    before = len(await rows.events(top.job_id))
    await rows.submit(deadline_at=deadline)
    assert len(await sweeps.expire_jobs(rows.connection)) == 2
    assert await rows.statuses(top.job_id) == {
        "top": "succeeded", "left": "skipped", "right": "skipped", "bottom": "skipped",
    }  # fmt: skip
    told = [event["job_status"] for event in (await rows.events(top.job_id))[before:]]
    assert told == ["running", "running", "expired"]
    assert await rows.claim_all() == []
    await assert_history(rows, top.job_id)


async def test_a_claim_says_whether_another_step_needs_the_task(rows: Rows) -> None:
    """By hint, by poll, and with the completion of the step before."""
    assert (await rows.leased()).is_last
    await rows.submit()
    (polled,) = await rows.claim_all()
    assert polled.is_last
    step: claims.Claimed | None = await rows.leased(THREE)
    seen = []
    while step is not None:
        seen.append((step.step, step.is_last))
        settled = await settlements.complete(rows.connection, [Completion(step.lease, claim_next=True)], rows.terms)
        step = settled.next_steps.get(step.lease.task_id)
    assert seen == [("a", False), ("b", False), ("c", True)]


@pytest.mark.parametrize("is_last", [False, True])
async def test_a_step_that_another_needs_after_all_is_completed_with_it(rows: Rows, is_last: bool) -> None:
    """A batch of a step that is the last of its job, and one that the worker only takes for the last."""
    last, first = await rows.leased(), await rows.leased(THREE)
    completions = [Completion(last.lease, value={"n": 1}, is_last=True), Completion(first.lease, is_last=is_last)]
    settled = await settlements.complete(rows.connection, completions)
    assert set(settled.verdicts.values()) == {Verdict.SETTLED}
    assert settled.verdicts.keys() == settled.states.keys() == {last.lease.task_id, first.lease.task_id}
    assert [(ended.pipeline, ended.outcome) for ended in settled.ended] == [("one", "succeeded")]
    assert [hint.hint.task_id for hint in settled.announcements] == [
        await rows.connection.fetchval("SELECT id FROM task WHERE job_id = $1 AND step = 'b'", first.job_id)
    ]
    assert await rows.statuses(first.job_id) == {"a": "succeeded", "b": "pending", "c": "blocked"}
    assert await rows.connection.fetchval("SELECT value FROM result WHERE task_id = $1", last.lease.task_id) == {"n": 1}
    for claimed in (last, first):
        await assert_history(rows, claimed.job_id)


async def test_a_step_that_only_its_worker_takes_for_the_last_is_completed_with_all_that_follows(rows: Rows) -> None:
    going_on, stopping = await rows.leased(THREE), await rows.leased(THREE)
    await jobs.request_cancel(rows.connection, [stopping.job_id], "t", reason="r", by="b")
    completions = [
        Completion(going_on.lease, claim_next=True, is_last=True),
        Completion(stopping.lease, is_last=True),
    ]
    settled = await settlements.complete(rows.connection, completions, rows.terms)
    assert {task: claimed.step for task, claimed in settled.next_steps.items()} == {going_on.lease.task_id: "b"}
    assert [(ended.pipeline, ended.outcome) for ended in settled.ended] == [("three", "cancelled")]


async def test_a_snooze_keeps_the_newest_note_and_the_code_that_was_missing_last(rows: Rows) -> None:
    """One without a note keeps the note of the one before."""
    await rows.submit()
    for note, known, missing in (({"n": 1}, {"n": 1}, "one.a"), (None, {"n": 1}, None), ({"n": 2}, {"n": 2}, "one.b")):
        (claimed,) = await rows.claim_all()
        snoozing = Snoozing(claimed.lease, 0.0, note, missing_handler=missing)
        await settlements.snooze(rows.connection, [snoozing])
        assert await note_of(rows.connection, claimed.lease.task_id) == known
        await rows.connection.execute("UPDATE task SET available_at = clock_timestamp()")
    unknown = await rows.connection.fetch("SELECT epoch, handler FROM unknown_task")
    assert [tuple(row) for row in unknown] == [(3, "one.b")]
    await assert_history(rows, claimed.job_id)


@pytest.mark.parametrize("is_last", [False, True])
async def test_outputs_and_values_are_committed_with_the_step(rows: Rows, is_last: bool) -> None:
    claimed = await rows.leased(ONE)
    output = Output("out.bin", "jobs/x/out.bin", 3, "ab" * 32, "application/octet-stream")
    completions = [Completion(claimed.lease, [output], {"width": 7}, is_last=is_last)]
    await settlements.complete(rows.connection, completions)
    row = await rows.connection.fetchrow("SELECT * FROM output WHERE task_id = $1", claimed.lease.task_id)
    assert row is not None
    assert (row["name"], row["key"], row["size"], row["sha256"]) == ("out.bin", "jobs/x/out.bin", 3, "ab" * 32)
    value = await rows.connection.fetchval("SELECT value FROM result WHERE task_id = $1", claimed.lease.task_id)
    assert value == {"width": 7}


async def test_a_file_that_a_later_attempt_of_a_step_writes_again_replaces_the_one_before(rows: Rows) -> None:
    claimed = await rows.leased()
    first, second = [Output("o", f"key-{n}", n, f"{n}" * 64, f"type/{n}") for n in (1, 2)]
    kept = Output("kept", "key-0", 0, "0" * 64, "type/0")
    await settlements.snooze(rows.connection, [Snoozing(claimed.lease, 0.0, outputs=[kept, first])])
    (again,) = await rows.claim_all()
    await settlements.complete(rows.connection, [Completion(again.lease, [second])])
    found = await rows.connection.fetch("SELECT name, key, size, sha256, content_type FROM output ORDER BY key")
    assert [Output(*row) for row in found] == [kept, second]


async def test_a_job_is_written_whole_or_not_at_all(rows: Rows) -> None:
    new = jobs.NewJob(THREE, "t")
    await jobs.submit(rows.connection, [new])
    with pytest.raises(asyncpg.UniqueViolationError):
        await jobs.submit(rows.connection, [jobs.NewJob(ONE, "t"), new])
    assert await rows.connection.fetchval("SELECT count(*) FROM job") == 1
    assert await rows.connection.fetchval("SELECT count(*) FROM task") == 3


async def test_a_job_that_can_run_is_queued_at_once_and_its_announcement_only_forgets_the_hint(rows: Rows) -> None:
    (hint,) = await rows.submit()
    job_id = (await rows.task(hint.hint.task_id))["job_id"]
    before = await rows.job(job_id)
    assert before["status"] == "queued"
    for _ in range(2):
        await outbox.delete_confirmed(rows.connection, [hint])
    assert await rows.job(job_id) == before
    assert await rows.connection.fetchval("SELECT count(*) FROM outbox") == 0
    assert [(event["kind"], event["job_status"]) for event in await rows.events(job_id)] == [("submitted", "queued")]


async def test_the_hints_of_a_submission_are_one_row_until_the_broker_has_confirmed_all_of_them(rows: Rows) -> None:
    hints = await rows.submit(count=3)
    count = "SELECT count(*) FROM outbox_batch"
    assert await rows.connection.fetchval("SELECT count(*) FROM outbox") == 0
    for left, confirmed in ((1, hints[:1]), (1, hints[:2]), (0, hints[2:])):
        await outbox.delete_confirmed(rows.connection, confirmed)
        assert await rows.connection.fetchval(count) == left


async def test_only_one_relay_takes_a_batch_of_hints(rows: Rows, another: Open) -> None:
    other = await another()
    hints = await rows.submit(count=3)
    await rows.connection.execute("UPDATE outbox_batch SET relay_at = clock_timestamp()")
    async with other.connection.transaction():
        assert await outbox.split(other.connection, 10) == 1
        assert await outbox.split(rows.connection, 10) == 0
    taken = await outbox.take(rows.connection, 10)
    assert {one.hint.task_id for one in taken} == {one.hint.task_id for one in hints}
    await outbox.delete_confirmed(rows.connection, hints)  # of the submitter, too late: it takes nothing away
    assert await rows.connection.fetchval("SELECT count(*) FROM outbox") == 3


async def test_only_the_announcement_goes_on_before_its_commit_is_on_disk(rows: Rows) -> None:
    (hint,) = await rows.submit()
    with pytest.raises(RuntimeError, match="outside of a transaction"):
        async with rows.connection.transaction():
            await outbox.delete_confirmed(rows.connection, [hint])
    assert await rows.connection.fetchval("SELECT count(*) FROM outbox") == 1
    await rows.connection.execute("SET synchronous_commit = on")
    hints = [hint, *await rows.submit(count=2)]
    async with settings_at_commit(rows.connection, "outbox", "outbox_batch") as settings:
        await outbox.delete_confirmed(rows.connection, hints)
    assert settings == ["off", "off"]
    assert await rows.connection.fetchval("SHOW synchronous_commit") == "on"


@asynccontextmanager
async def settings_at_commit(connection: Connection, *tables: str) -> AsyncIterator[list[str]]:
    """In the list, after the block: `synchronous_commit` as each transaction that changed a row of `tables` had it when
    it committed, for each row.
    """
    await connection.execute("""
        CREATE TABLE setting_at_commit (value text);
        CREATE FUNCTION note_setting() RETURNS trigger LANGUAGE plpgsql AS
        $$BEGIN INSERT INTO setting_at_commit VALUES (current_setting('synchronous_commit')); RETURN NULL; END$$""")
    for table in tables:
        await connection.execute(f"""
            CREATE CONSTRAINT TRIGGER note_setting AFTER INSERT OR UPDATE OR DELETE ON {table}
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION note_setting()""")
    settings: list[str] = []
    yield settings
    settings += [row["value"] for row in await connection.fetch("SELECT value FROM setting_at_commit")]


async def test_the_relay_takes_only_what_its_committer_did_not_send_in_time(rows: Rows) -> None:
    before = await rows.connection.fetchval("SELECT clock_timestamp()")
    (hint,) = await rows.submit()
    assert await rows.connection.fetchval("SELECT relay_at FROM outbox") >= before + timedelta(seconds=1)
    await rows.connection.execute("UPDATE outbox SET relay_at = relay_at + interval '1 minute'")
    assert await outbox.take(rows.connection, 10) == []
    await rows.connection.execute("UPDATE outbox SET relay_at = clock_timestamp()")
    assert [a.outbox_id for a in await outbox.take(rows.connection, 10)] == [hint.outbox_id]
    assert await outbox.take(rows.connection, 10) == []  # another relay does not take it too
    assert await rows.connection.fetchval("SELECT count(*) FROM outbox") == 1  # until the broker confirmed


async def test_a_low_band_task_that_waited_goes_before_a_new_high_one(rows: Rows) -> None:
    (low,) = await rows.submit(ONE, priority=2)
    await rows.connection.execute("UPDATE task SET available_at = available_at - interval '2 minutes'")
    await rows.submit(ONE, count=3, priority=0)
    (first,) = await claims.claim_due(rows.connection, rows.terms, ["default"], 1)
    assert first.lease.task_id == low.hint.task_id


async def test_an_urgent_task_goes_before_an_older_normal_one(rows: Rows) -> None:
    await rows.submit(ONE, count=3)
    (urgent,) = await rows.submit(ONE, priority=0)
    (first,) = await claims.claim_due(rows.connection, rows.terms, ["default"], 1)
    assert first.lease.task_id == urgent.hint.task_id


async def test_of_a_tenant_with_little_room_the_urgent_task_goes_first_too(rows: Rows) -> None:
    await rows.submit(ONE, count=3)
    (urgent,) = await rows.submit(ONE, priority=0)
    polled = await claims.poll(rows.connection, rows.terms, ["default"], 5, other_room=1)
    assert [one.lease.task_id for one in polled.claimed] == [urgent.hint.task_id]
    assert polled.held_back


async def test_all_urgent_tasks_of_a_tenant_go_before_its_normal_ones_and_tenants_still_take_turns(rows: Rows) -> None:
    for priority in (2, 1, 0):
        await rows.submit(ONE, count=3, priority=priority)
    await rows.submit(ONE, tenant="quiet", priority=2)
    claimed = await claims.claim_due(rows.connection, rows.terms, ["default"], 4)
    found = await rows.connection.fetch(
        "SELECT tenant_id, priority FROM task WHERE id = ANY($1) ORDER BY priority",
        [one.lease.task_id for one in claimed],
    )
    assert [tuple(row) for row in found] == [("t", 0), ("t", 0), ("t", 0), ("quiet", 2)]


async def test_a_poll_does_not_claim_a_task_that_is_put_off_while_the_poll_runs(rows: Rows, another: Open) -> None:
    """Another worker claims it meanwhile, and it fails or snoozes: it is due again later."""
    (task,) = await rows.submit(ONE)
    other = await another()
    async with other.connection.transaction():
        await other.connection.execute(
            "UPDATE task SET available_at = clock_timestamp() + interval '1 hour' WHERE id = $1", task.hint.task_id
        )
        polling = asyncio.create_task(claims.claim_due(rows.connection, rows.terms, ["default"], 5))
        await until_waiting(other.connection)
    assert await polling == []
    assert (await rows.task(task.hint.task_id))["epoch"] == 0


async def test_a_worker_whose_session_ended_is_known_to_be_gone(rows: Rows, another: Open) -> None:
    other = await another()
    worker = other.terms.owner
    key = await workers.register(other.connection, worker, host="h", pid=1, version="0", queues=["default"])
    assert await workers.dead(rows.connection) == []  # not yet present: nothing is known
    assert await workers.appear(other.connection, worker, key)
    assert await workers.dead(rows.connection) == []
    claimed = await other.leased()
    await other.connection.close()
    # The server ends the session a moment after the socket closes; nothing tells us when.
    while not await workers.dead(rows.connection):
        await asyncio.sleep(0.01)
    assert await workers.dead_owner(rows.connection, claimed.lease.task_id) == worker
    (taken,) = await claims.claim(rows.connection, rows.terms, [claimed.lease.task_id], [worker])
    assert (taken.previous_state, taken.lease.epoch) == ("running", 2)


async def test_one_sweeper_leads_until_it_resigns_or_falls_silent(rows: Rows) -> None:
    first, second = uuid4(), uuid4()
    assert await workers.lead(rows.connection, "sweeper", first, 30)
    assert not await workers.lead(rows.connection, "sweeper", second, 30)
    assert await workers.lead(rows.connection, "sweeper", first, 30)
    await workers.resign(rows.connection, first)
    assert await workers.lead(rows.connection, "sweeper", second, -1)
    assert await workers.lead(rows.connection, "sweeper", first, 30)  # the second one's term has passed


async def test_a_leader_whose_presence_has_ended_leads_no_more(rows: Rows, another: Open) -> None:
    """For thirty seconds otherwise. A server's first ten seconds prove nothing."""
    other = await another()
    leader, heir = uuid4(), uuid4()
    key = await workers.register(rows.connection, leader, host="h", pid=1, version="v", queues=["default"])
    assert await workers.appear(other.connection, leader, key)
    assert await workers.lead(rows.connection, "sweeper", leader, 30)
    assert not await workers.lead(rows.connection, "sweeper", heir, 30)
    await other.connection.close()
    async with asyncio.timeout(30):
        while not await workers.lead(rows.connection, "sweeper", heir, 30):
            await asyncio.sleep(0.05)
    assert not await workers.lead(rows.connection, "sweeper", leader, 30)


async def test_event_days_are_made_ahead_and_dropped_when_old(rows: Rows) -> None:
    await rows.connection.execute(
        "CREATE TABLE event_20200101 PARTITION OF event"
        " FOR VALUES FROM ('2020-01-01 00:00+00') TO ('2020-01-02 00:00+00')"
    )
    today = "SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date"
    began = await rows.connection.fetchval(today)
    for _ in range(2):
        await history.keep_event_days(rows.connection, days_ahead=3, days_kept=8)
    midnights = (await rows.connection.fetchval(today) - began).days
    names = [
        r["relname"]
        for r in await rows.connection.fetch("SELECT relname FROM pg_class WHERE relname ~ '^event_[0-9]+$'")
    ]
    assert 4 <= len(names) <= 4 + midnights
    assert "event_20200101" not in names


async def test_events_that_came_before_their_day_was_made_keep_nobody_waiting(rows: Rows, another: Open) -> None:
    """They stay in the default partition, and nothing locks that to find out so."""
    await rows.submit(THREE)
    writer = (await another()).connection
    async with writer.transaction():
        await writer.execute("LOCK TABLE event_default IN ROW EXCLUSIVE MODE")  # as each new event does
        async with asyncio.timeout(60):
            await history.keep_event_days(rows.connection, days_ahead=0, days_kept=8)
    assert await rows.connection.fetchval("SELECT count(*) FROM event_default") == 1


async def test_they_are_dropped_when_old_as_all_others(rows: Rows) -> None:
    await rows.submit(THREE)
    await rows.connection.execute("UPDATE event SET at = at - interval '9 days'")
    await rows.submit(THREE)
    await history.keep_event_days(rows.connection, days_ahead=0, days_kept=8)
    assert await rows.connection.fetchval("SELECT count(*) FROM event") == 1


async def test_a_finished_job_is_forgotten_with_everything_of_it(rows: Rows) -> None:
    claimed = await rows.leased(ONE, keep_seconds=0)
    output = Output("o", "k", 1, "00", "text/plain")
    await settlements.complete(rows.connection, [Completion(claimed.lease, [output], {"v": 1})])
    kept = await rows.leased(ONE)
    await complete(rows, kept)
    (old,) = await sweeps.forgettable_jobs(rows.connection)
    assert old.job_id == claimed.job_id
    await sweeps.forget_jobs(rows.connection, [claimed.job_id, kept.job_id])
    assert [r["id"] for r in await rows.connection.fetch("SELECT id FROM job")] == [kept.job_id]
    assert await rows.connection.fetchval("SELECT count(*) FROM output") == 0


async def test_a_replay_leaves_out_the_steps_that_the_parameters_skip(rows: Rows) -> None:
    chosen = Pipeline(
        "chosen",
        module="tests.factories",
        steps=[Step("first"), Step("maybe", skip_if=SkipIf("/quick")), Step("last", needs=("first", "maybe"))],
    )
    claimed = await rows.leased(chosen, params={"quick": True})
    await settlements.fail(rows.connection, [Failure(claimed.lease, "error", "c", "m", False, 0.0)])
    assert set((await rows.statuses(claimed.job_id)).values()) == {"failed", "skipped"}
    await jobs.replay(rows.connection, claimed.job_id, "t")
    assert await rows.statuses(claimed.job_id) == {"first": "pending", "maybe": "skipped", "last": "blocked"}
    for step in ("first", "last"):
        (again,) = await rows.claim_all()
        assert again.step == step
        await complete(rows, again)
    assert (await rows.job(claimed.job_id))["status"] == "succeeded"
    await assert_history(rows, claimed.job_id)


CHAIN = Pipeline(
    "chain",
    module="tests.factories",
    steps=[
        Step("a"),
        Step("b", needs=("a",), skip_if=SkipIf("/quick")),
        Step("c", needs=("b",), skip_if=SkipIf("/quick")),
        Step("d", needs=("c",)),
    ],
)


async def test_a_step_after_a_skipped_one_waits_for_the_steps_that_the_skipped_one_needs(rows: Rows) -> None:
    first = await rows.leased(CHAIN, params={"quick": True})
    assert await rows.statuses(first.job_id) == {"a": "running", "b": "skipped", "c": "skipped", "d": "blocked"}
    await complete(rows, first)
    assert await rows.statuses(first.job_id) == {"a": "succeeded", "b": "skipped", "c": "skipped", "d": "pending"}
    (last,) = await rows.claim_all()
    await settlements.fail(rows.connection, [Failure(last.lease, "error", "c", "m", False, 0.0)])
    await jobs.replay(rows.connection, first.job_id, "t", from_step="a")
    assert await rows.statuses(first.job_id) == {"a": "pending", "b": "skipped", "c": "skipped", "d": "blocked"}
    for step in ("a", "d"):
        (again,) = await rows.claim_all()
        assert again.step == step
        await complete(rows, again)
    assert (await rows.job(first.job_id))["status"] == "succeeded"
    await assert_history(rows, first.job_id)


async def test_a_limit_that_admits_a_job_starts_no_step_whose_need_is_a_need_of_a_skipped_one(rows: Rows) -> None:
    limited = jobs.NewJob(CHAIN, "t", params={"quick": True}, limits=[ConcurrencyLimit("t", "k", at_most=1)])
    await jobs.submit(rows.connection, [limited])
    await concurrency.admit(rows.connection, [("t", "k")])
    assert await rows.statuses(limited.id) == {"a": "pending", "b": "skipped", "c": "skipped", "d": "blocked"}


async def test_a_step_after_skipped_ones_that_need_nothing_is_due(rows: Rows) -> None:
    pipeline = Pipeline(
        "head",
        module="tests.factories",
        steps=[
            Step("a", skip_if=SkipIf("/quick")),
            Step("b", needs=("a",), skip_if=SkipIf("/quick")),
            Step("c", needs=("b",)),
        ],
    )
    claimed = await rows.leased(pipeline, params={"quick": True})
    assert await rows.statuses(claimed.job_id) == {"a": "skipped", "b": "skipped", "c": "running"}


async def test_a_step_that_names_a_need_twice_runs_when_that_step_has_succeeded(rows: Rows) -> None:
    twice = Pipeline("twice", module="tests.factories", steps=[Step("a"), Step("b", needs=("a", "a"))])
    first = await rows.leased(twice)
    await complete(rows, first)
    assert await rows.statuses(first.job_id) == {"a": "succeeded", "b": "pending"}
    await assert_history(rows, first.job_id)


@pytest.mark.parametrize("delay", [timedelta.max.total_seconds(), inf])
async def test_a_delay_beyond_the_end_of_timestamps_is_a_long_one(rows: Rows, delay: float) -> None:
    snoozing, failing = await rows.leased(), await rows.leased()
    await settlements.snooze(rows.connection, [Snoozing(snoozing.lease, delay)])
    await settlements.fail(rows.connection, [Failure(failing.lease, "error", "x", "y", retryable=True, delay=delay)])
    for claimed, status in ((snoozing, "waiting"), (failing, "retry")):
        task = await rows.task(claimed.lease.task_id)
        assert task["status"] == status
        assert task["available_at"] - datetime.now(UTC) > timedelta(days=36_000)


async def test_a_report_of_nothing_by_nothing_costs_the_others_nothing(rows: Rows) -> None:
    odd, plain = await rows.leased(), await rows.leased()
    reports = [Progress(odd.lease, nan, "half \ud800 and \x00"), Progress(plain.lease, 50.0, "well")]
    assert len(await report(rows.connection, reports)) == 2
    found = await rows.connection.fetch("SELECT percent, summary FROM progress ORDER BY percent")
    assert [tuple(row) for row in found] == [(0.0, "half ? and "), (50.0, "well")]
