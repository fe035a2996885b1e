"""A new or a retried run beside the runs of others: of another tenant, template, scope or key, and those that have
ended. It is refused because of its own like alone, replaces these alone, and waits for these alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from uuid import UUID

import asyncpg
import pytest

from leasehold.app.writing import template_version_of
from leasehold.db.database import Connection
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.errors import Conflict, Invalid
from leasehold.domain.ids import new_id
from leasehold.domain.pipeline import Concurrency, Pipeline, PipelineLimit, RunTerms, SkipIf, Step
from leasehold.runtime.gather import cancel_and_wait
from leasehold.transitions import concurrency, debounce, limits, runs, settlements
from leasehold.transitions.concurrency.room import rooms_of
from leasehold.transitions.debounce import Debounced
from leasehold.transitions.runs import CreatedRun, Duplicate, NewRun
from leasehold.transitions.settlements import Failure
from tests.factories import ONE, Rows, assert_histories
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open
from tests.transitions.test_concurrency import finish, held
from tests.transitions.test_limits_beside_others import wait_for_no_lock
from tests.transitions.test_retried_jobs import subscribe


def pipeline(name: str = "m", policy: Concurrency = "allow", **terms: Any) -> Pipeline:
    steps = [Step("first", skip_if=SkipIf("/dry_run")), Step("last")]
    return Pipeline(name, module="tests.factories", steps=steps, terms=RunTerms(concurrency=policy, **terms))


def new_run(of: Pipeline, tenant: str = "t", scope_id: str = "1", **columns: Any) -> NewRun:
    return NewRun(template_version_of(of), tenant, columns.pop("params", {}), scope_id=scope_id, **columns)


async def create(rows: Rows, new: NewRun) -> CreatedRun:
    async with rows.connection.transaction():
        return await runs.create(rows.connection, new)


async def fail(rows: Rows) -> None:
    """Every run that can run has failed."""
    claimed = await rows.claim_all()
    failures = [Failure(one.lease, "error", "bad", "no", False, 0.0) for one in claimed]
    await settlements.fail(rows.connection, failures)


async def admit(rows: Rows, created: CreatedRun) -> None:
    """As the caller does after the commit."""
    await concurrency.admit(rows.connection, created.limits, created.departed)


async def states(rows: Rows) -> dict[UUID, str]:
    return {row["id"]: row["status"] for row in await rows.connection.fetch("SELECT id, status FROM job")}


async def others(rows: Rows, policy: Concurrency, **columns: Any) -> list[UUID]:
    """A run of the same scope that has ended, and unfinished ones of another tenant, template and scope. They are the
    newest runs if the caller has made the id of its own run before.
    """
    ended = await create(rows, new_run(pipeline(policy=policy), **columns))
    await admit(rows, ended)
    await finish(rows)
    mine, another = pipeline(policy=policy), pipeline("a", policy)
    created = [await create(rows, new_run(of, tenant, **columns)) for of, tenant in ((mine, "a"), (another, "t"))]
    created += [await create(rows, new_run(mine, scope_id=f"{n}", **columns)) for n in range(2, 6)]
    return [ended.id, *(one.id for one in created)]


# --- a run of the same scope


async def test_a_run_that_is_refused_names_the_unfinished_run_of_its_scope(rows: Rows) -> None:
    rejecting = pipeline(policy="reject_same_scope")
    own = new_run(rejecting)
    await others(rows, "reject_same_scope")
    await create(rows, own)
    with pytest.raises(Conflict, match=str(own.id)) as refused:
        await create(rows, new_run(rejecting))
    assert refused.value.code == "same_scope_running"


@pytest.mark.parametrize("is_cancelable", [True, False])
async def test_a_run_replaces_the_unfinished_run_of_its_scope_alone(rows: Rows, *, is_cancelable: bool) -> None:
    """Also one that no client may cancel."""
    replacing = pipeline(policy="replace_same_scope", cancelable=is_cancelable)
    await others(rows, "replace_same_scope")
    own = await create(rows, new_run(replacing))
    before = await states(rows)
    assert sorted(before.values()) == ["pending"] * (len(before) - 1) + ["succeeded"]
    newer = await create(rows, new_run(replacing))
    assert newer.departed == [own.id]
    assert [(one.pipeline, one.outcome) for one in newer.ended] == [("m", "cancelled")]
    after = await states(rows)
    assert after.pop(newer.id) == "pending"
    assert after == before | {own.id: "cancelled"}
    await assert_histories(rows.connection)


async def test_of_two_runs_that_replace_each_other_at_once_the_later_one_replaces_the_earlier_one(
    rows: Rows, another: Open
) -> None:
    replacing = pipeline(policy="replace_same_scope")
    other = await another()
    async with other.connection.transaction():
        earlier = await runs.create(other.connection, new_run(replacing))
        creating = asyncio.create_task(create(rows, new_run(replacing)))
        await until_waiting(other.connection)
    later = await creating
    assert list(later.departed) == [earlier.id]
    assert await states(rows) == {earlier.id: "cancelled", later.id: "pending"}


async def test_a_repeated_submission_does_not_replace_its_own_run(rows: Rows) -> None:
    new = new_run(pipeline(policy="replace_same_scope"), dedupe_key="key")
    own = await create(rows, new)
    with pytest.raises(Duplicate, match=str(own.id)):
        await create(rows, replace(new, id=new_id()))
    assert await states(rows) == {own.id: "pending"}


# --- a run with the same key


async def test_the_unfinished_runs_with_some_keys_are_those_of_the_tenant_and_the_template(rows: Rows) -> None:
    ended = await create(rows, new_run(pipeline(), dedupe_key="a"))
    await finish(rows)
    made = {}
    for tenant, name, key in [
        ("u", "m", "a"), ("t", "z", "a"), ("t", "m", "other"), ("t", "m", None), ("t", "m", "a"), ("t", "m", "b"),
    ]:  # fmt: skip
        made[tenant, name, key] = (await create(rows, new_run(pipeline(name), tenant, dedupe_key=key))).id
    found = await runs.unfinished_by_key(rows.connection, "t", "m", ["a", "b", "unknown"])
    assert {key: row["id"] for key, row in found.items()} == {key: made["t", "m", key] for key in ("a", "b")}
    assert ended.id in await states(rows)


async def test_runs_that_are_created_together_are_all_refused_if_one_has_a_key_that_is_taken(rows: Rows) -> None:
    own = await create(rows, new_run(pipeline(), dedupe_key="key"))
    with pytest.raises(Duplicate):
        await runs.create_together(rows.connection, [new_run(pipeline()), new_run(pipeline(), dedupe_key="key")])
    assert await states(rows) == {own.id: "queued"}


@pytest.mark.parametrize("policy", ["allow", "reject_same_scope"])
async def test_a_second_run_of_a_schedule_s_tick_is_told_so_although_its_key_and_its_scope_are_free(
    rows: Rows, policy: Concurrency
) -> None:
    """The schedule knows this error, and does not count a refusal."""
    of_tick: dict[str, Any] = {"schedule_id": new_id(), "tick": datetime.now(UTC)}
    await create(rows, new_run(pipeline(policy=policy), scope_id="1", dedupe_key="a", **of_tick))
    with pytest.raises(asyncpg.UniqueViolationError, match="run_of_tick"):
        await create(rows, new_run(pipeline(policy=policy), scope_id="2", dedupe_key="b", **of_tick))


async def test_of_runs_that_are_written_without_a_transaction_those_with_a_limit_are_left_out(rows: Rows) -> None:
    limited, free = debounced("k", "alice"), new_run(pipeline("free"))
    is_written, hints = await runs.create_unlimited(rows.connection, [limited, free])
    assert is_written == [False, True]
    assert {(await rows.task(hint.hint.task_id))["job_id"] for hint in hints} == {free.id}
    assert await runs.create_unlimited(rows.connection, [limited]) == ([False], [])
    assert await states(rows) == {free.id: "queued"}


@dataclass
class EndsMeanwhile:
    """A connection. When a statement fails because another row has its key, that row's job ends just then."""

    connection: Connection
    end: Callable[[], Awaitable[None]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)

    async def fetch(self, *arguments: Any) -> Any:
        try:
            return await self.connection.fetch(*arguments)
        except asyncpg.UniqueViolationError:
            await self.end()
            raise


async def test_a_run_whose_key_is_taken_by_one_that_ends_meanwhile_is_a_duplicate_too(
    rows: Rows, another: Open
) -> None:
    new = new_run(pipeline(), dedupe_key="key")
    await create(rows, new)
    other = await another()
    async with rows.connection.transaction():
        connection = cast("Connection", EndsMeanwhile(rows.connection, lambda: finish(other)))
        with pytest.raises(Duplicate, match="just started"):
            await runs.create(connection, replace(new, id=new_id()))


# --- a retried run


@pytest.mark.parametrize("asked", ["another tenant's", "one that is not there", "a succeeded one", "a pending one"])
async def test_a_retry_of_what_has_not_failed_here_replaces_no_run_of_its_scope(rows: Rows, asked: str) -> None:
    replacing = pipeline(policy="replace_same_scope")
    retried = new_run(replacing)
    bystander = new_run(replacing, scope_id="2")
    stranger = new_run(replacing, "u")
    for failing in (bystander, stranger):
        await admit(rows, await create(rows, failing))
    await fail(rows)
    assert set((await states(rows)).values()) == {"failed"}
    if asked in ("a succeeded one", "a pending one"):
        created = await create(rows, retried)
        if asked == "a succeeded one":
            await admit(rows, created)
            await finish(rows)
    elif asked == "another tenant's":
        retried = replace(retried, id=stranger.id)
    if asked != "a pending one":
        await create(rows, new_run(replacing))
    before = await states(rows)
    async with rows.connection.transaction():
        assert await runs.revive(rows.connection, retried) is None
    assert await states(rows) == before


async def test_of_two_retries_at_once_one_revives_the_run_and_the_other_does_nothing(rows: Rows, another: Open) -> None:
    """The other one would take the revived run for an older one of its scope, and replace it."""
    new = new_run(pipeline(policy="replace_same_scope"))
    await admit(rows, await create(rows, new))
    await fail(rows)
    other = (await another()).connection

    async def retry() -> CreatedRun | None:
        async with rows.connection.transaction():
            return await runs.revive(rows.connection, new)

    async with other.transaction():
        assert await runs.revive(other, new) is not None
        retrying = asyncio.create_task(retry())
        await until_waiting(other)
    assert await retrying is None
    assert await states(rows) == {new.id: "pending"}


async def test_a_run_is_retried_with_its_own_parameters_and_key_whatever_others_have(rows: Rows) -> None:
    made = [
        new_run(pipeline(), params={"dry_run": is_dry, "n": n}, dedupe_key=f"{n}")
        for n, is_dry in enumerate([True, False])
    ]
    for new in made:
        await create(rows, new)
    await fail(rows)
    assert set((await states(rows)).values()) == {"failed"}
    for new in made:
        stored = replace(new, dedupe_key=None)
        async with rows.connection.transaction():
            with pytest.raises(Invalid, match="skip"):
                await runs.revive(rows.connection, replace(stored, params={"dry_run": not new.params["dry_run"]}))
            assert await runs.revive(rows.connection, stored) is not None
        job = await rows.job(new.id)
        assert (job["status"], job["params"], job["dedupe_key"]) == ("queued", new.params, new.dedupe_key)


async def test_a_retried_run_keeps_its_parameters_unless_others_replace_them(rows: Rows) -> None:
    stored = new_run(pipeline(), params={"n": 1})
    await create(rows, stored)
    for new, replaces in ((stored, False), (replace(stored, params={"n": 2}), True)):
        await fail(rows)
        async with rows.connection.transaction():
            assert await runs.revive(rows.connection, new, replaces_params=replaces) is not None
        assert (await rows.job(stored.id))["params"] == new.params


async def test_a_workflow_that_has_made_calls_is_retried_with_its_own_parameters_alone(rows: Rows) -> None:
    """The calls of another workflow do not count."""
    begun, beside = new_run(pipeline(), params={"n": 1}), new_run(pipeline(), params={"n": 1})
    for new in (begun, beside):
        await create(rows, new)
    await fail(rows)
    await rows.connection.execute(
        "INSERT INTO journal (job_id, branch, number, kind, name, state, epoch)"
        " VALUES ($1, '', 1, 'call', 'f', 'done', 1)",
        begun.id,
    )
    async with rows.connection.transaction():
        with pytest.raises(Invalid) as refused:
            await runs.revive(rows.connection, replace(begun, params={"n": 2}), replaces_params=True)
        assert refused.value.code == "workflow_has_begun"
        assert await runs.revive(rows.connection, begun, replaces_params=True) is not None
        assert await runs.revive(rows.connection, replace(beside, params={"n": 2}), replaces_params=True) is not None
    for new, params in ((begun, {"n": 1}), (beside, {"n": 2})):
        job = await rows.job(new.id)
        assert (job["status"], job["params"]) == ("queued", params)


# --- debounced runs at their limits


def debounced(key: str, customer: str, name: str = "m", tenant: str = "t") -> NewRun:
    """A run that waits for its time, of a template with a limit for each customer."""
    limited = pipeline(name)
    limited.limits = (PipelineLimit(1, None, "/customer"),)
    later = datetime.now(UTC) + timedelta(hours=1)
    return new_run(limited, tenant, params={"customer": customer}, dedupe_key=key, scheduled_at=later)


async def merge(rows: Rows, *new: NewRun, ids: dict[str, UUID] | None = None) -> list[UUID | None]:
    submissions = []
    for run in new:
        key = cast("str", run.dedupe_key)
        submissions.append(Debounced((ids or {}).get(key) or new_id(), "m", key, run.params, 3600.0))
    async with rows.connection.transaction():
        return await runs.merge(rows.connection, new[0].tenant_id, new, submissions)


async def limit_keys(rows: Rows, job_id: UUID | None) -> set[str]:
    assert job_id is not None
    return {key for _, key in await concurrency.limits_of(rows.connection, [job_id])}


async def test_submissions_of_one_call_wait_at_the_limits_of_their_own_arguments(rows: Rows) -> None:
    """Also if an earlier call has brought one of them."""
    customers = {f"k{n}": f"c{n}" for n in range(3)}
    for key in customers:
        await create(rows, debounced(key, "nobody"))
    ids = {"k0": new_id()}
    (earlier,) = await merge(rows, debounced("k0", "c0"), ids=ids)
    merged = await merge(rows, *(debounced(key, customer) for key, customer in customers.items()), ids=ids)
    assert merged[0] == earlier
    for job_id, customer in zip(merged, customers.values(), strict=True):
        expected = {limit.key for limit in runs.limits_of(debounced("k", customer), limits.TenantRules([], False))}
        assert await limit_keys(rows, job_id) == expected


async def test_a_submission_waits_for_no_lock_of_a_limit_at_which_others_wait(rows: Rows, another: Open) -> None:
    """Runs of another tenant, template or key, and one with its key that has ended."""
    ended = replace(debounced("k", "ended"), scheduled_at=None)
    await admit(rows, await create(rows, ended))
    await finish(rows)
    neighbours = [ended, debounced("k", "x", tenant="u"), debounced("k", "y", name="z"), debounced("other", "z")]
    for new in neighbours[1:]:
        await create(rows, new)
    own = await create(rows, debounced("k", "alice"))
    names = await concurrency.limits_of(rows.connection, [new.id for new in neighbours])
    assert len(names) == len(neighbours)
    await wait_for_no_lock(rows)
    other = (await another()).connection
    async with other.transaction():
        await rooms_of(other, sorted(names), None)
        assert await merge(rows, debounced("k", "bob")) == [own.id]
    assert await held(rows) == {own.id, *(new.id for new in neighbours[1:])}


async def failed_with_a_key(rows: Rows) -> NewRun:
    await create(rows, failed := new_run(pipeline(), dedupe_key="k"))
    await fail(rows)
    return failed


async def test_a_submission_is_written_though_a_failed_run_with_its_key_is_retried_meanwhile(
    rows: Rows, another: Open
) -> None:
    """The retry is refused, as one that comes after the submission."""
    failed = await failed_with_a_key(rows)
    other, new = (await another()).connection, debounced("k", "alice")

    async def retry() -> CreatedRun | None:
        async with other.transaction():
            return await runs.revive(other, failed)

    async with rows.connection.transaction():
        assert await merge(rows, new) == [None]
        retrying = asyncio.create_task(retry())
        waiting = asyncio.create_task(until_waiting(rows.connection))
        await asyncio.wait([retrying, waiting], return_when=asyncio.FIRST_COMPLETED)
        await cancel_and_wait(waiting)
        await runs.create_together(rows.connection, [new])
    with pytest.raises(Duplicate):
        await retrying
    assert (await states(rows))[failed.id] == "failed"


async def test_a_submission_finds_the_run_with_its_key_that_is_being_retried(rows: Rows, another: Open) -> None:
    """The run has started before, so it loses the key, and the submission becomes a run of its own."""
    failed = await failed_with_a_key(rows)
    other, new = (await another()).connection, debounced("k", "alice")

    async def submit() -> None:
        async with other.transaction():
            assert await merge(Rows(other), new) == [None]
            await runs.create_together(other, [new])

    async with rows.connection.transaction():
        assert await runs.revive(rows.connection, failed) is not None
        submitting = asyncio.create_task(submit())
        await until_waiting(rows.connection)
    await submitting
    assert (await states(rows)).keys() == {failed.id, new.id}
    unfinished = await runs.unfinished_by_key(rows.connection, "t", "m", ["k"])
    assert unfinished["k"]["id"] == new.id


async def test_a_retry_waits_for_no_submission_with_another_key(rows: Rows, another: Open) -> None:
    failed = await failed_with_a_key(rows)
    other = (await another()).connection
    await wait_for_no_lock(rows)
    neighbours = [debounced("k", "x", tenant="u"), debounced("k", "y", name="z"), debounced("other", "z")]
    async with other.transaction():
        for new in neighbours:
            key = Debounced(new_id(), new.template_version.pipeline.name, cast("str", new.dedupe_key), {}, 0.0)
            await debounce.lock_keys(other, new.tenant_id, [key])
        async with rows.connection.transaction():
            assert await runs.revive(rows.connection, failed) is not None


async def test_a_retry_locks_the_keys_of_its_own_runs_alone(rows: Rows, another: Open) -> None:
    """Not those of the tenant's other runs, nor those of another tenant's runs, whose ids a client may name."""
    foreign = debounced("k", "alice", tenant="u")
    for new in (foreign, debounced("other", "bob")):
        await create(rows, new)
    other = (await another()).connection
    await wait_for_no_lock(rows)
    async with other.transaction():
        submissions = [Debounced(new_id(), "m", key, {}, 0.0) for key in ("k", "other")]
        await debounce.lock_keys(other, "t", submissions)
        async with rows.connection.transaction():
            await debounce.lock_keys_of_jobs(rows.connection, "t", [foreign.id])


async def test_a_run_that_has_no_limit_to_wait_at_keeps_its_place_when_a_limit_was_declared_since(rows: Rows) -> None:
    """It would wait at the limit without being held, and take a place there."""
    free = replace(debounced("k", "alice"), template_version=template_version_of(pipeline()))
    own = await create(rows, free)
    await limits.declare(rows.connection, [pipeline()], ConcurrencyLimit("t", "template:m", at_most=0))
    assert await merge(rows, replace(free, params={"customer": "bob"})) == [own.id]
    job = await rows.job(own.id)
    assert (job["params"], job["held"]) == ({"customer": "bob"}, False)
    assert await limit_keys(rows, own.id) == set()


# --- what a run has that says nothing else


@pytest.mark.parametrize("reported_to", ["nobody", "a webhook", "a pipeline that follows"])
async def test_the_end_of_a_run_is_reported_to_those_who_ask_for_it(rows: Rows, reported_to: str) -> None:
    """Also that of a retry. A webhook of another tenant, and a disabled one, ask for nothing."""
    await subscribe(rows, "u")
    await subscribe(rows, "t", enabled=reported_to == "a webhook")
    of = pipeline()
    of.on_failure = ONE if reported_to == "a pipeline that follows" else None
    one = await create(rows, new_run(of))
    together = new_run(of)
    await runs.create_together(rows.connection, [together])
    for job_id in (one.id, together.id):
        assert (await rows.job(job_id))["notify"] == (reported_to != "nobody")
    await fail(rows)
    await rows.connection.execute("UPDATE job SET notify = false")  # the first end is reported
    async with rows.connection.transaction():
        assert await runs.revive(rows.connection, together) is not None
    assert (await rows.job(together.id))["notify"] == (reported_to != "nobody")


async def test_a_run_has_the_priority_of_any_other_job(rows: Rows) -> None:
    await rows.submit(ONE)
    await create(rows, new_run(pipeline()))
    assert {row["priority"] for row in await rows.connection.fetch("SELECT priority FROM job")} == {1}
