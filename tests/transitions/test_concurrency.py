"""Concurrency limits at their rows: who waits, who is let in, and what is forgotten, beside neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, cast
from uuid import UUID

import pytest

from leasehold.app.writing import template_version_of
from leasehold.db import job_reads, overview_reads
from leasehold.db.database import Connection
from leasehold.domain.concurrency_limit import EVERYBODY, ConcurrencyLimit
from leasehold.domain.ids import new_id
from leasehold.domain.pipeline import Pipeline, PipelineLimit, RunTerms, Step
from leasehold.runtime.duty_cycle import Pauses
from leasehold.transitions import concurrency, jobs, limits, quarantine, runs, settlements
from leasehold.transitions.concurrency import admission
from leasehold.transitions.concurrency.room import rooms_of
from leasehold.transitions.debounce import Debounced
from leasehold.transitions.jobs import AdmissionTerms
from leasehold.transitions.runs import NewRun
from leasehold.transitions.settlements import Completion, Failure
from tests.factories import ONE, Rows
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open

#: Of another tenant with the same key, and of another key.
NEIGHBOURS = (("u", "k"), ("t", "l"))


async def wait_at(rows: Rows, *limits: ConcurrencyLimit, tenant: str = "t", count: int = 1) -> list[UUID]:
    """New jobs that wait at the limits, the oldest first."""
    before = {row["id"] for row in await rows.connection.fetch("SELECT id FROM job")}
    async with rows.connection.transaction():
        await rows.submit(ONE, count, tenant, limits=list(limits))
    made = await rows.connection.fetch("SELECT id FROM job ORDER BY id")
    return [row["id"] for row in made if row["id"] not in before]


async def held(rows: Rows) -> set[UUID]:
    return {row["id"] for row in await rows.connection.fetch("SELECT id FROM job WHERE held")}


async def finish(rows: Rows) -> None:
    """Everything that can run has run."""
    while claimed := await rows.claim_all():
        await settlements.complete(rows.connection, [Completion(one.lease) for one in claimed])


async def named(rows: Rows, table: str) -> set[tuple[str, str]]:
    return {(row[0], row[1]) for row in await rows.connection.fetch(f"SELECT tenant_id, key FROM {table}")}


async def test_room_is_counted_for_each_limit_by_itself(rows: Rows) -> None:
    """What is inside at another tenant's limit, or at another key, takes no room here."""
    for tenant, key in NEIGHBOURS:
        await wait_at(rows, ConcurrencyLimit(tenant, key, at_most=3), tenant=tenant, count=3)
        await concurrency.admit(rows.connection, [(tenant, key)])
    assert await held(rows) == set()
    first, second, third = await wait_at(rows, ConcurrencyLimit("t", "k", at_most=2), count=3)
    await concurrency.admit(rows.connection, [("t", "k")])
    assert await held(rows) == {third}
    await concurrency.admit(rows.connection, [("t", "k"), *NEIGHBOURS])
    assert await held(rows) == {third}
    await finish(rows)
    await concurrency.admit(rows.connection, [("t", "k")], [first, second])
    assert await held(rows) == set()


async def test_jobs_with_limits_are_written_with_their_places_or_not_at_all(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A held job without a place in a queue would never be let in."""

    async def lost(*_arguments: object) -> None:
        raise ConnectionResetError

    with monkeypatch.context() as patched:
        patched.setattr(concurrency, "queue_up", lost)
        with pytest.raises(ConnectionResetError):
            await rows.submit(ONE, limits=[ConcurrencyLimit("t", "k", at_most=1)])
    assert await rows.connection.fetchval("SELECT count(*) FROM job") == 0
    await rows.submit(ONE, limits=[ConcurrencyLimit("t", "k", at_most=1)])
    assert await named(rows, "gate_job") == {("t", "k")}


async def test_a_rate_is_counted_for_each_limit_by_itself(rows: Rows) -> None:
    for tenant, key in NEIGHBOURS:
        await wait_at(rows, ConcurrencyLimit(tenant, key, per_minute=3), tenant=tenant, count=3)
        await concurrency.admit(rows.connection, [(tenant, key)])
    await wait_at(rows, ConcurrencyLimit("t", "k", per_minute=2), count=3)
    assert len(await concurrency.admit(rows.connection, [("t", "k")])) == 2
    await finish(rows)
    assert await concurrency.admit(rows.connection, [("t", "k")]) == []  # who has ended was still let in this minute


async def test_who_has_not_ended_keeps_its_place(rows: Rows) -> None:
    """Only jobs that have ended leave, whichever the caller says may have."""
    first, second = await wait_at(rows, ConcurrencyLimit("t", "k", at_most=1), count=2)
    await concurrency.admit(rows.connection, [("t", "k")])
    assert await concurrency.admit(rows.connection, [("t", "k")], [first, second]) == []
    assert await concurrency.admit(rows.connection, [("t", "k")]) == []
    assert await held(rows) == {second}
    assert sorted(await concurrency.limits_of(rows.connection, [first])) == [("t", "k")]


async def test_a_job_is_let_in_when_its_time_has_come(rows: Rows) -> None:
    early, late = await wait_at(rows, ConcurrencyLimit("t", "k", at_most=5), count=2)
    await rows.connection.execute(
        "UPDATE gate_job SET ready_at = clock_timestamp() + interval '1 hour' WHERE job_id = $1", late
    )
    await concurrency.admit(rows.connection, [("t", "k")])
    assert await held(rows) == {late}
    await rows.connection.execute("UPDATE gate_job SET ready_at = clock_timestamp() WHERE job_id = $1", late)
    await concurrency.admit(rows.connection, [("t", "k")])
    assert await held(rows) == set()
    assert await rows.connection.fetchval("SELECT count(*) FROM gate_job WHERE job_id = $1", early) == 1


@pytest.mark.parametrize("batch", [500, 1])
async def test_jobs_of_a_tenant_come_by_priority_then_by_the_time_of_their_start(
    rows: Rows, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(admission, "_MAX_BATCH", batch)
    limit = ConcurrencyLimit("t", "k", at_most=0)
    late, early, low = await wait_at(rows, limit, count=3)
    for job_id, priority, minutes in ((late, 1, 1), (early, 1, 2), (low, 2, 3)):
        await rows.connection.execute(
            "UPDATE gate_job SET priority = $2, ready_at = ready_at - make_interval(mins => $3) WHERE job_id = $1",
            job_id, priority, minutes,
        )  # fmt: skip
    (urgent,) = await wait_at(rows, limit)
    await rows.connection.execute("UPDATE gate_job SET priority = 0 WHERE job_id = $1", urgent)
    order = [urgent, early, late, low]
    explained = [(await job_reads.why_held(rows.connection, "t", job_id))[0]["ahead"] for job_id in order]
    assert explained == [0, 1, 2, 3]
    listed = await overview_reads.jobs_at_limit(rows.connection, "t", "k", 4, admitted=False)
    assert [row["id"] for row in listed] == order
    for number in range(1, 5):
        await rows.connection.execute("UPDATE gate SET at_most = $1", number)
        await concurrency.admit(rows.connection, [("t", "k")])
        assert await held(rows) == {*order[number:]}


@pytest.mark.parametrize("batch", [500, 1])
async def test_of_two_tenants_whose_turn_it_is_the_one_whose_start_came_first_is_served(
    rows: Rows, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(admission, "_MAX_BATCH", batch)
    limit = ConcurrencyLimit(EVERYBODY, "k", at_most=1)
    (first,) = await wait_at(rows, limit)
    (second,) = await wait_at(rows, limit, tenant="u")
    await rows.connection.execute(
        "UPDATE gate_job SET ready_at = ready_at - interval '1 min' WHERE job_id = $1", second
    )
    await concurrency.admit(rows.connection, [(EVERYBODY, "k")])
    assert await held(rows) == {first}


async def test_a_job_that_is_retried_waits_before_those_that_came_since(rows: Rows) -> None:
    limit = ConcurrencyLimit("t", "k", at_most=1)
    (first,) = await wait_at(rows, limit)
    await concurrency.admit(rows.connection, [("t", "k")])
    (claimed,) = await rows.claim_all()
    await settlements.fail(rows.connection, [Failure(claimed.lease, "error", "x", "", False, 0.0)])
    later = await wait_at(rows, limit, count=2)
    await jobs.replay(rows.connection, first, "t", terms=AdmissionTerms([limit]))
    await concurrency.admit(rows.connection, [("t", "k")])
    assert await held(rows) == {*later}


async def test_a_tenant_s_turn_counts_its_own_jobs_that_are_inside_at_this_very_limit(rows: Rows) -> None:
    """Neither those that wait, nor those inside at another limit, nor those of another tenant."""
    shared, other = (ConcurrencyLimit(EVERYBODY, key, at_most=3) for key in ("shared", "other"))
    (inside,) = await wait_at(rows, shared, tenant="b")
    await wait_at(rows, shared, tenant="c", count=2)
    await wait_at(rows, other, tenant="a", count=3)
    await concurrency.admit(rows.connection, [(EVERYBODY, "shared"), (EVERYBODY, "other")])
    assert await held(rows) == set()
    older = await wait_at(rows, shared, tenant="b")
    newer = await wait_at(rows, shared, tenant="a", count=4)
    (claimed, *_) = [one for one in await rows.claim_all() if one.tenant_id == "c"]
    await settlements.complete(rows.connection, [Completion(claimed.lease)])
    await concurrency.admit(rows.connection, [(EVERYBODY, "shared")], [claimed.job_id])
    assert await held(rows) == {*older, *newer[1:]}
    assert inside in {row["job_id"] for row in await rows.connection.fetch("SELECT job_id FROM gate_job")}


async def test_of_the_jobs_that_ended_only_those_that_are_named_leave(rows: Rows) -> None:
    """A caller that knows who ended does not have all the others read."""
    first, second, *_ = await wait_at(rows, ConcurrencyLimit("t", "k", at_most=2), count=4)
    await concurrency.admit(rows.connection, [("t", "k")])
    await finish(rows)
    assert len(await concurrency.admit(rows.connection, [("t", "k")], [first])) == 1
    assert second in {row["job_id"] for row in await rows.connection.fetch("SELECT job_id FROM gate_job")}


@pytest.mark.parametrize(("seconds", "stays"), [(45, True), (61, False)])
async def test_a_job_that_ended_is_forgotten_after_a_minute_and_its_limit_with_it(
    rows: Rows, seconds: int, stays: bool
) -> None:
    await wait_at(rows, ConcurrencyLimit("t", "k", at_most=1))
    await wait_at(rows, ConcurrencyLimit("t", "l", at_most=0))  # waits, and stays
    await concurrency.admit(rows.connection, [("t", "k")])
    await finish(rows)
    await rows.connection.execute(
        "UPDATE job SET finished_at = clock_timestamp() - make_interval(secs => $1) WHERE finished_at IS NOT NULL",
        seconds,
    )
    await rows.connection.execute(
        "INSERT INTO gate (tenant_id, key, at_most, declared) VALUES ('t', 'declared', 1, true), ('u', 'k', 1, false)"
    )
    await concurrency.forget_unused_limits(rows.connection)
    expected = {("t", "l")} | ({("t", "k")} if stays else set())
    assert await named(rows, "gate_job") == expected
    assert await named(rows, "gate") == expected | {("t", "declared")}


async def free_behind_full(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> UUID:
    """A job that its only limit has room for. Before it two whole batches wait, which other limits hold back."""
    monkeypatch.setattr(admission, "_MAX_BATCH", 3)
    wide = ConcurrencyLimit("t", "wide", at_most=2)
    for full in ("a", "b"):
        await wait_at(rows, wide, ConcurrencyLimit("t", full, at_most=0), count=3)
    return (await wait_at(rows, wide))[0]


async def test_however_many_jobs_another_limit_holds_back_those_behind_them_are_let_in(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = await free_behind_full(rows, monkeypatch)
    await wait_at(rows, ConcurrencyLimit("t", "wide", at_most=2), count=2)
    names = await concurrency.with_waiting_jobs(rows.connection, ("", ""))
    assert len(await concurrency.admit_each(rows.connection, names, concurrency.new_search())) == 2
    assert free not in await held(rows)


async def test_a_search_does_not_wait_for_a_limit_that_another_transaction_keeps_locked(
    rows: Rows, another: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = await free_behind_full(rows, monkeypatch)
    other = (await another()).connection
    await rows.connection.execute("SET lock_timeout = '3s'")
    async with other.transaction():
        await concurrency.lock_limits(other, [ConcurrencyLimit("t", "b", at_most=0)])
        assert len(await concurrency.admit_each(rows.connection, [("t", "wide")], concurrency.new_search())) == 1
    assert free not in await held(rows)


async def test_the_jobs_behind_are_searched_for_no_more_often_than_the_caller_may(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = await free_behind_full(rows, monkeypatch)
    now = 0.0
    search = Pauses(share=1.0, at_least=1.0, at_most=1.0, clock=lambda: now)
    search.done(now)
    assert await concurrency.admit(rows.connection, [("t", "wide")], search=search) == []
    now = 1.0
    assert len(await concurrency.admit(rows.connection, [("t", "wide")], search=search)) == 1
    assert free not in await held(rows)
    assert not search.due


async def test_a_search_that_takes_too_long_is_no_fault_of_its_limits(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else they have room for is let in, and they are not set aside."""
    await free_behind_full(rows, monkeypatch)
    (first,) = await wait_at(rows, ConcurrencyLimit("t", "wide", at_most=2))
    await rows.connection.execute("UPDATE gate_job SET priority = 0 WHERE job_id = $1", first)
    await rows.connection.execute(
        "CREATE FUNCTION time_out(text[], text[], int, text, uuid, text[], text[]) RETURNS int LANGUAGE plpgsql"
        " AS $$ BEGIN RAISE EXCEPTION 'canceled' USING ERRCODE = 'query_canceled'; END $$"
    )
    monkeypatch.setattr(admission, "_WAITING_BEHIND", "SELECT time_out($1, $2, $3, $4, $5, $6, $7)")
    assert len(await concurrency.admit_each(rows.connection, [("t", "wide")], concurrency.new_search())) == 1
    assert first not in await held(rows)
    assert await quarantine.list_units(rows.connection) == []


async def test_jobs_that_ended_long_ago_are_forgotten_batch_by_batch(rows: Rows) -> None:
    await rows.connection.execute(
        "INSERT INTO gate (tenant_id, key, at_most, declared) VALUES ('t', 'k', 2, true)"  # declared, so it stays
    )
    await wait_at(rows, ConcurrencyLimit("t", "k", at_most=2), count=2)
    await concurrency.admit(rows.connection, [("t", "k")])
    await finish(rows)
    await rows.connection.execute("UPDATE job SET finished_at = clock_timestamp() - interval '61 seconds'")
    for has_more in (True, True, False):
        assert await concurrency.forget_unused_limits(rows.connection, batch_size=1) is has_more
    assert await named(rows, "gate_job") == set()


async def test_two_jobs_that_end_at_once_admit_two_others(rows: Rows, another: Open) -> None:
    """The second admission has chosen before the first one commits: both chose the same job."""
    limit = ConcurrencyLimit("t", "k", at_most=2)
    first, second, third, fourth = await wait_at(rows, limit, count=4)
    await concurrency.admit(rows.connection, [("t", "k")])
    assert await held(rows) == {third, fourth}
    await finish(rows)
    other = (await another()).connection
    admitting = other.transaction()
    await admitting.start()
    assert len(await concurrency.admit(other, [("t", "k")], [first])) == 1
    waiting = asyncio.create_task(concurrency.admit(rows.connection, [("t", "k")], [second]))
    await until_waiting(other)
    await admitting.commit()
    assert len(await waiting) == 1
    assert await held(rows) == set()


async def test_a_run_that_replaces_another_does_not_deadlock_with_an_admission(rows: Rows, another: Open) -> None:
    """Both lock the limits in the order of their names. Here `queue:...` comes before `scope:...`."""
    terms = RunTerms(concurrency="replace_same_scope")
    replacing = Pipeline("replacing", module="tests.factories", steps=[Step("only")], terms=terms)
    await limits.declare(rows.connection, [replacing], ConcurrencyLimit("t", "queue:default", at_most=5))

    async def create() -> list[tuple[str, str]]:
        async with rows.connection.transaction():
            return sorted((await runs.create(rows.connection, NewRun(template_version_of(replacing), "t", {}))).limits)

    names = await create()
    assert [key.partition(":")[0] for _, key in names] == ["queue", "scope"]
    other = (await another()).connection
    async with other.transaction():
        await rooms_of(other, names[:1], None)
        creating = asyncio.create_task(create())
        await until_waiting(other)
        await rooms_of(other, names, None)
    assert await creating == names


@dataclass
class Interrupted:
    """A connection. After its first query, another transaction commits that the query has not seen."""

    connection: Connection
    interrupt: Callable[[], Awaitable[object]]
    is_interrupted: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)

    async def fetch(self, *arguments: Any) -> Any:
        found = await self.connection.fetch(*arguments)
        if not self.is_interrupted:
            self.is_interrupted = True
            await self.interrupt()
        return found


def debounced(customer: str) -> NewRun:
    """A run of a task with a limit for each customer, and always the same key."""
    pipeline = Pipeline("debounced", module="tests.factories", steps=[Step("only")])
    pipeline.limits = (PipelineLimit(1, None, "/customer"),)
    return NewRun(template_version_of(pipeline), "t", {"customer": customer}, dedupe_key="key")


@pytest.mark.parametrize(("customer", "delay"), [("bob", 0.0), ("alice", 3600.0)])
async def test_a_run_that_a_debounce_changes_while_it_is_about_to_be_admitted_waits_as_changed(
    rows: Rows, another: Open, customer: str, delay: float
) -> None:
    """It has another customer, whose place is taken, or it starts later. The admission has chosen it before."""
    async with rows.connection.transaction():
        taken = await runs.create(rows.connection, replace(debounced("bob"), dedupe_key=None))
        waiting = await runs.create(rows.connection, debounced("alice"))
    await concurrency.admit(rows.connection, taken.limits)
    other = (await another()).connection
    async with other.transaction():
        again = Debounced(new_id(), "debounced", "key", {"customer": customer}, delay)
        assert await runs.merge(other, "t", [debounced(customer)], [again]) == [waiting.id]
        admitting = asyncio.create_task(concurrency.admit(rows.connection, waiting.limits))
        await until_waiting(other)
    assert await admitting == []
    assert await held(rows) == {waiting.id}
    assert await rows.connection.fetchval("SELECT admitted_at FROM gate_job WHERE job_id = $1", waiting.id) is None


async def test_a_limit_at_which_a_job_begins_to_wait_meanwhile_is_kept(rows: Rows) -> None:
    """No duty would find a job that waits at a limit without a row."""
    job_id = (await wait_at(rows, ConcurrencyLimit("t", "other", at_most=1)))[0]
    await rows.connection.execute(
        "INSERT INTO gate (tenant_id, key, at_most, declared) VALUES ('t', 'k', 1, false), ('t', 'l', 1, false)"
    )

    async def queue_up() -> None:
        await rows.connection.execute("UPDATE gate_job SET key = 'k' WHERE job_id = $1", job_id)

    await concurrency.forget_unused_limits(cast("Connection", Interrupted(rows.connection, queue_up)))
    assert await named(rows, "gate") == {("t", "k"), ("t", "other")}
    await concurrency.forget_unused_limits(rows.connection)
    assert await named(rows, "gate") == {("t", "k")}
