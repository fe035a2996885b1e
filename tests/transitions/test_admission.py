"""What an admission makes of the jobs that it admits, in which batches it reads those that wait, and when it searches
behind a batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from leasehold.domain.concurrency_limit import EVERYBODY, ConcurrencyLimit
from leasehold.domain.pipeline import Pipeline, RunTerms, SkipIf, Step
from leasehold.runtime.duty_cycle import Pauses
from leasehold.transitions import concurrency, jobs, quarantine, settlements
from leasehold.transitions.concurrency import ConcurrencyLimitName, admission
from leasehold.transitions.jobs import AdmissionTerms
from leasehold.transitions.settlements import Completion, Failure
from tests.factories import DIAMOND, ONE, THREE, Rows, assert_history
from tests.security.poison import poison, set_aside
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open
from tests.transitions.test_concurrency import finish, free_behind_full, held, wait_at

K = ("t", "k")
LIMIT = ConcurrencyLimit(*K, at_most=100)
WIDE = ("t", "wide")
HOUR = timedelta(hours=1)


@pytest.fixture
def slow_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a test takes on a busy machine, nothing is tried again before it says so."""
    monkeypatch.setattr(quarantine, "BACKOFF", (1200, 2400, 3600, 4800, 6000, 7200))


def pipeline(*steps: Step, terms: RunTerms | None = None) -> Pipeline:
    return Pipeline("several", module="tests.factories", steps=list(steps), terms=terms or RunTerms())


async def waiting_job(rows: Rows, of: Pipeline, **columns: Any) -> UUID:
    """A job that waits at LIMIT."""
    job = jobs.NewJob(of, "t", limits=[LIMIT], **columns)
    async with rows.connection.transaction():
        assert await jobs.submit(rows.connection, [job]) == []
    return job.id


async def tasks_told(rows: Rows) -> list[str]:
    """The steps for which workers get a hint from the table of hints."""
    found = await rows.connection.fetch("SELECT t.step FROM outbox o JOIN task t ON t.id = o.task_id ORDER BY t.step")
    return [row["step"] for row in found]


def search_once() -> Pauses:
    """A clock for one search: it is due until a search has been made."""
    return Pauses(share=1.0, at_least=1.0, at_most=1.0, clock=lambda: 0.0)


# --- what becomes of an admitted job


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (THREE, {"a": "pending", "b": "blocked", "c": "blocked"}),
        (DIAMOND, {"top": "pending", "left": "blocked", "right": "blocked", "bottom": "blocked"}),
        (
            pipeline(Step("maybe", skip_if=SkipIf("/quick")), Step("first"), Step("last", needs=("maybe", "first"))),
            {"maybe": "skipped", "first": "pending", "last": "blocked"},
        ),
    ],
    ids=["three", "diamond", "skipping"],
)
async def test_of_an_admitted_job_only_the_first_steps_may_run(
    rows: Rows, of: Pipeline, expected: dict[str, str]
) -> None:
    job_id = await waiting_job(rows, of, params={"quick": True})
    assert {*(await rows.statuses(job_id)).values()} <= {"blocked", "skipped"}
    assert len(await concurrency.admit(rows.connection, [K])) == 1
    assert await rows.statuses(job_id) == expected
    assert (await rows.job(job_id))["status"] == "queued"
    await assert_history(rows, job_id)


INSIDE, OUTSIDE = Step("inside"), Step("outside", queue="q", external=True)


@pytest.mark.parametrize(
    ("steps", "due", "status", "told"),
    [
        ([INSIDE, OUTSIDE], ["inside", "outside"], "queued", ["inside"]),
        ([INSIDE, OUTSIDE], ["outside"], "pending", []),
        ([INSIDE, OUTSIDE], [], "pending", []),
        ([INSIDE], [], "pending", []),
        ([OUTSIDE], ["outside"], "waiting_worker", []),
    ],
)
async def test_workers_hear_of_the_steps_of_an_admitted_job_that_are_due_and_theirs(
    rows: Rows, steps: list[Step], due: list[str], status: str, told: list[str]
) -> None:
    """A step whose time has not come waits for it, and external workers poll."""
    job_id = await waiting_job(rows, pipeline(*steps), not_before=datetime.now(UTC) + HOUR)
    await rows.connection.execute("UPDATE gate_job SET ready_at = clock_timestamp()")
    await rows.connection.execute("UPDATE task SET available_at = clock_timestamp() WHERE step = ANY($1)", due)
    assert len(await concurrency.admit(rows.connection, [K])) == len(told)
    assert job_id not in await held(rows)
    assert await tasks_told(rows) == told
    assert await rows.statuses(job_id) == {step.name: "pending" if step.name in due else "waiting" for step in steps}
    assert (await rows.job(job_id))["status"] == status
    assert {claimed.step for claimed in await rows.claim_all()} == {*due} - {"outside"}


@pytest.mark.parametrize(
    ("terms", "before", "after"),
    [
        (RunTerms(timeout=2 * HOUR), None, 2),
        (RunTerms(start_within=HOUR), 1, None),
        (RunTerms(start_within=HOUR, timeout=2 * HOUR), 1, 2),
    ],
)
async def test_the_time_of_an_admitted_job_begins_with_its_admission(
    rows: Rows, terms: RunTerms, before: int | None, after: int | None
) -> None:
    job_id = await waiting_job(rows, pipeline(Step("only"), terms=terms))

    async def hours_left() -> int | None:
        found: int | None = await rows.connection.fetchval(
            "SELECT ceil(extract(epoch FROM deadline_at - clock_timestamp()) / 3600) FROM job WHERE id = $1", job_id
        )
        return found

    assert await hours_left() == before
    await concurrency.admit(rows.connection, [K])
    assert await hours_left() == after


async def test_an_admission_keeps_the_deadline_that_a_client_set(rows: Rows) -> None:
    deadline = datetime(2100, 1, 1, tzinfo=UTC)
    job_id = await waiting_job(rows, pipeline(Step("only"), terms=RunTerms(timeout=HOUR)), deadline_at=deadline)
    await concurrency.admit(rows.connection, [K])
    assert (await rows.job(job_id))["deadline_at"] == deadline


async def test_a_job_that_is_cancelled_while_it_is_being_admitted_takes_no_entry(rows: Rows, another: Open) -> None:
    """The admission has chosen it before the cancel commits. The next job gets its entry of the minute."""
    first, second = await wait_at(rows, ConcurrencyLimit(*K, per_minute=1), count=2)
    other = (await another()).connection
    async with other.transaction():
        await jobs.request_cancel(other, [first], "t", reason="", by="test")
        admitting = asyncio.create_task(concurrency.admit(rows.connection, [K]))
        await until_waiting(other)
    assert await admitting == []
    assert (await rows.job(first))["status"] == "cancelled"
    assert await held(rows) == {second}
    assert len(await concurrency.admit(rows.connection, [K])) == 1
    await assert_history(rows, first)


@pytest.mark.usefixtures("slow_to_retry")
async def test_a_job_that_cannot_be_admitted_is_set_aside_alone(rows: Rows) -> None:
    """Neither those before it nor those after it fail with it, and one call admits them."""
    first, bad, last = await wait_at(rows, LIMIT, count=3)
    await poison(rows.connection, "job", f"{{row}}.id = '{bad}'")
    assert len(await concurrency.admit(rows.connection, [K])) == 2
    assert await held(rows) == {bad}
    assert await set_aside(rows.connection, concurrency.JOBS) == {str(bad): 1}
    assert {first, last} == {claimed.job_id for claimed in await rows.claim_all()}


async def broken_beside_good(rows: Rows) -> list[ConcurrencyLimitName]:
    """Two limits at which a job waits. The place of a job that has ended cannot be given back at the second."""
    bad = ConcurrencyLimit("t", "bad", at_most=1)
    await wait_at(rows, bad)
    assert len(await concurrency.admit(rows.connection, [("t", "bad")])) == 1
    await finish(rows)
    await wait_at(rows, bad)
    await wait_at(rows, ConcurrencyLimit("a", "good", at_most=1))
    await poison(rows.connection, "gate_job", "{row}.key = 'bad'", on="DELETE")
    return [("t", "bad"), ("a", "good")]


@pytest.mark.usefixtures("slow_to_retry")
async def test_a_limit_that_cannot_be_served_is_set_aside_alone(rows: Rows) -> None:
    names = await broken_beside_good(rows)
    (hint,) = await concurrency.admit_each(rows.connection, names)
    assert [claimed.lease.task_id for claimed in await rows.claim_all()] == [hint.hint.task_id]
    assert await set_aside(rows.connection, concurrency.LIMITS) == {"t/bad": 1}
    assert await set_aside(rows.connection, concurrency.JOBS) == {}
    assert await concurrency.with_waiting_jobs(rows.connection, ("", "")) == []


@pytest.mark.usefixtures("slow_to_retry")
async def test_beside_a_limit_that_cannot_be_served_a_locked_one_is_not_set_aside(rows: Rows, another: Open) -> None:
    """It is served in a later turn. Meanwhile nobody waits for it."""
    names = await broken_beside_good(rows)
    (waiting,) = await wait_at(rows, ConcurrencyLimit("t", "z", at_most=1))
    other = (await another()).connection
    await rows.connection.execute("SET lock_timeout = '3s'")
    async with other.transaction():
        await concurrency.lock_limits(other, [ConcurrencyLimit("t", "z", at_most=1)])
        assert len(await concurrency.admit_each(rows.connection, [*names, ("t", "z")])) == 1
    assert await set_aside(rows.connection, concurrency.LIMITS) == {"t/bad": 1}
    assert waiting in await held(rows)


async def test_an_admission_that_the_database_breaks_off_is_no_fault_of_its_limits(rows: Rows) -> None:
    """The caller hears of it and tries again; nothing else is tried before."""
    names = await broken_beside_good(rows)
    before = await held(rows)
    await rows.connection.execute(
        "CREATE OR REPLACE FUNCTION poisoned() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'a deadlock' USING ERRCODE = 'deadlock_detected'; END $$"
    )
    with pytest.raises(asyncpg.DeadlockDetectedError):
        await concurrency.admit_each(rows.connection, names)
    assert await held(rows) == before
    assert await quarantine.list_units(rows.connection) == []


async def test_a_job_that_is_retried_at_a_limit_goes_on_behind_the_steps_that_have_succeeded(rows: Rows) -> None:
    claimed = await rows.leased(THREE)
    await settlements.complete(rows.connection, [Completion(claimed.lease)])
    (second,) = await rows.claim_all()
    await settlements.fail(rows.connection, [Failure(second.lease, "error", "bad", "no", False, 0.0)])
    await jobs.replay(rows.connection, claimed.job_id, "t", terms=AdmissionTerms([LIMIT]))
    assert await rows.statuses(claimed.job_id) == {"a": "succeeded", "b": "blocked", "c": "blocked"}
    assert len(await concurrency.admit(rows.connection, [K])) == 1
    assert await rows.statuses(claimed.job_id) == {"a": "succeeded", "b": "pending", "c": "blocked"}
    await assert_history(rows, claimed.job_id)


async def test_a_job_that_another_admission_has_admitted_since_it_was_chosen_counts_once(rows: Rows) -> None:
    """A second time of the admission would make its entry of the minute last longer."""
    job_id = await waiting_job(rows, THREE)
    assert len(await concurrency.admit(rows.connection, [K])) == 1
    places = "SELECT to_jsonb(g) FROM gate_job g"
    before = await rows.connection.fetch(places), await rows.job(job_id), await rows.events(job_id)
    assert await rows.connection.fetch(admission.ADMIT, [job_id]) == []
    assert (await rows.connection.fetch(places), await rows.job(job_id), await rows.events(job_id)) == before


# --- in which order


async def test_of_two_jobs_at_a_limit_the_older_comes_first_however_much_its_other_limit_has_admitted(
    rows: Rows,
) -> None:
    """Only at a limit that all tenants share do the admitted jobs count for the turn."""
    busy, idle, narrow = (ConcurrencyLimit("t", key, at_most=9) for key in ("busy", "idle", "narrow"))
    names = [("t", "busy"), ("t", "idle"), ("t", "narrow")]
    await wait_at(rows, busy, count=4)
    assert len(await concurrency.admit(rows.connection, names)) == 4
    (older,) = await wait_at(rows, busy, narrow)
    (newer,) = await wait_at(rows, idle, narrow)
    await rows.connection.execute("UPDATE gate SET at_most = 1 WHERE key = 'narrow'")
    assert len(await concurrency.admit(rows.connection, names)) == 1
    assert await held(rows) == {newer}
    assert older not in await held(rows)


async def test_a_tenant_s_turn_at_a_shared_limit_counts_nothing_of_its_own_limit_of_the_same_key(rows: Rows) -> None:
    shared = ConcurrencyLimit(EVERYBODY, "k", at_most=9)
    await wait_at(rows, ConcurrencyLimit("a", "k", at_most=9), tenant="a", count=3)
    await wait_at(rows, shared, tenant="b")
    assert len(await concurrency.admit(rows.connection, [("a", "k"), (EVERYBODY, "k")])) == 4
    (of_b,) = await wait_at(rows, shared, tenant="b")
    await wait_at(rows, shared, tenant="a")
    await rows.connection.execute("UPDATE gate SET at_most = 2 WHERE tenant_id = $1", EVERYBODY)
    assert len(await concurrency.admit(rows.connection, [(EVERYBODY, "k")])) == 1
    assert await held(rows) == {of_b}


async def test_an_admission_at_a_tenant_s_limit_admits_nobody_at_the_shared_limit_of_the_same_key(rows: Rows) -> None:
    """There the tenant would jump the queue."""
    (elsewhere,) = await wait_at(rows, ConcurrencyLimit(EVERYBODY, "k", at_most=9))
    await wait_at(rows, LIMIT)
    assert len(await concurrency.admit(rows.connection, [K])) == 1
    assert await held(rows) == {elsewhere}


async def test_each_of_many_tenants_has_its_turn(rows: Rows) -> None:
    count = 60
    name = (EVERYBODY, "k")
    shared = ConcurrencyLimit(*name, at_most=count)
    made = [jobs.NewJob(ONE, f"tenant{n // 2:02}", limits=[shared]) for n in range(2 * count)]
    async with rows.connection.transaction():
        await jobs.submit(rows.connection, made)
    assert len(await concurrency.admit(rows.connection, [name])) == count
    left = await rows.connection.fetch("SELECT tenant_id FROM job WHERE held")
    assert sorted(row["tenant_id"] for row in left) == [f"tenant{n:02}" for n in range(count)]


# --- in which batches


async def test_as_many_are_admitted_as_there_is_room_for_however_few_have_ended(rows: Rows) -> None:
    """The first batch after a few ends is small. Those behind it come with the next."""
    await wait_at(rows, LIMIT, count=admission._MIN_BATCH + 8)
    assert len(await concurrency.admit(rows.connection, [K], ended=())) == admission._MIN_BATCH + 8


async def test_as_many_are_admitted_as_there_is_room_for_in_however_many_batches(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_MAX_BATCH", 2)
    await wait_at(rows, LIMIT, count=5)
    assert len(await concurrency.admit(rows.connection, [K])) == 5


async def test_after_a_small_batch_that_other_limits_hold_back_the_next_is_looked_at(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No search is needed for those behind the first few."""
    monkeypatch.setattr(admission, "_MIN_BATCH", 2)
    wide = ConcurrencyLimit(*WIDE, at_most=2)
    await wait_at(rows, wide, ConcurrencyLimit("t", "full", at_most=0), count=2)
    (free,) = await wait_at(rows, wide)
    assert len(await concurrency.admit(rows.connection, [WIDE], ended=())) == 1
    assert free not in await held(rows)


async def test_however_many_urgent_jobs_wait_for_tomorrow_those_of_today_are_admitted(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_MAX_BATCH", 2)
    later = [
        await waiting_job(rows, ONE, priority=0, not_before=datetime.now(UTC) + timedelta(days=1)) for _ in range(2)
    ]
    await waiting_job(rows, ONE, priority=2)
    assert len(await concurrency.admit(rows.connection, [K])) == 1
    assert await held(rows) == {*later}


# --- the search behind a batch


async def test_a_caller_without_a_clock_leaves_those_behind_a_batch_to_the_sweeper(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = await free_behind_full(rows, monkeypatch)
    assert await concurrency.admit(rows.connection, [WIDE]) == []
    assert free in await held(rows)


async def many_free(rows: Rows) -> tuple[ConcurrencyLimitName, int]:
    await wait_at(rows, LIMIT, count=5)
    return K, 5


async def many_at_a_full_limit(rows: Rows) -> tuple[ConcurrencyLimitName, int]:
    await wait_at(rows, ConcurrencyLimit(*K, at_most=0), count=5)
    return K, 0


async def few_held_back(rows: Rows) -> tuple[ConcurrencyLimitName, int]:
    await wait_at(rows, LIMIT, ConcurrencyLimit("t", "full", at_most=0))
    return K, 0


async def many_of_a_tenant_that_has_its_share(rows: Rows) -> tuple[ConcurrencyLimitName, int]:
    await wait_at(rows, ConcurrencyLimit(EVERYBODY, "k", at_most=4), count=9)
    return (EVERYBODY, "k"), 3


@pytest.mark.parametrize(
    "prepare", [many_free, many_at_a_full_limit, few_held_back, many_of_a_tenant_that_has_its_share]
)
async def test_where_no_other_limit_holds_back_a_whole_batch_nothing_is_searched(
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[Rows], Awaitable[tuple[ConcurrencyLimitName, int]]],
) -> None:
    """A search may read all that wait, and most limits are full most of the time."""
    monkeypatch.setattr(admission, "_MAX_BATCH", 3)
    name, admitted = await prepare(rows)
    search = search_once()
    assert len(await concurrency.admit(rows.connection, [name], search=search)) == admitted
    assert search.due


@pytest.mark.parametrize(("most_full", "found"), [(0, 0), (1, 0), (2, 1)])
async def test_a_search_ends_when_it_has_found_more_full_limits_than_it_may(
    rows: Rows, monkeypatch: pytest.MonkeyPatch, most_full: int, found: int
) -> None:
    """Two limits are full before the job that might be admitted."""
    await free_behind_full(rows, monkeypatch)
    monkeypatch.setattr(admission, "_MAX_FULL", most_full)
    assert len(await concurrency.admit(rows.connection, [WIDE], search=search_once())) == found


async def test_a_search_admits_all_that_it_finds_also_in_several_batches(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    await free_behind_full(rows, monkeypatch)
    await wait_at(rows, ConcurrencyLimit(*WIDE, at_most=9), count=6)
    assert len(await concurrency.admit(rows.connection, [WIDE], search=search_once())) == 7


@pytest.mark.usefixtures("slow_to_retry")
async def test_a_search_passes_over_a_job_that_is_set_aside(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its batches would try the job again."""
    bad = await free_behind_full(rows, monkeypatch)
    good = await wait_at(rows, ConcurrencyLimit(*WIDE, at_most=9), count=5)
    await poison(rows.connection, "job", f"{{row}}.id = '{bad}'")
    assert len(await concurrency.admit(rows.connection, [WIDE], search=search_once())) == 5
    assert {bad, *good} & await held(rows) == {bad}
    assert await set_aside(rows.connection, concurrency.JOBS) == {str(bad): 1}


def test_searches_take_a_hundredth_of_the_time_and_one_is_due_after_a_minute_in_any_case() -> None:
    """The first may have been slow because it waited for a lock."""
    for seconds, at_least in ((0.5, 50), (9, 60)):
        search = concurrency.new_search()
        assert search.due
        assert search.done(monotonic() - seconds) == 0
        assert at_least <= search.done(monotonic() - seconds) <= 60


async def test_a_search_that_finds_only_cancelled_jobs_ends_and_the_sweeper_clears_them_away(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_MAX_BATCH", 3)
    *cancelled, free = await wait_at(rows, LIMIT, count=4)
    await jobs.request_cancel(rows.connection, cancelled, "t", reason="", by="test")
    async with asyncio.timeout(60):
        assert await concurrency.admit(rows.connection, [K], ended=(), search=search_once()) == []
    assert len(await concurrency.admit_each(rows.connection, [K], concurrency.new_search())) == 1
    assert free not in await held(rows)
