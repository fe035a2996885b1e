"""A run meets another of its scope, of its limit or of its schedule, in every state that the other may be in."""

from __future__ import annotations

from typing import cast
from uuid import uuid4

import pytest

from leasehold.db.database import Connection
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.errors import Conflict
from leasehold.domain.pipeline import Concurrency
from leasehold.domain.registry import Pipelines
from leasehold.evaluation.templates import Templates, TemplateVersion
from leasehold.schedules import firing as schedules
from leasehold.transitions import concurrency, limits, sweeps
from tests.crossings.expectations import ARRIVALS, FIRINGS, LIMITED, table
from tests.crossings.pair import Two, surprises
from tests.crossings.world import VERBS, Case, known, make, put_into, retry
from tests.factories import SELDOM

RULES, LIMIT, OVERLAPS = table(ARRIVALS), table(LIMITED), table(FIRINGS)
ENDED = ("succeeded", "failed", "cancelled", "expired")
#: How a run that others wait for may end, and from which state.
ENDS = {"complete": "running", "die": "running", "cancel": "pending", "expire": "running", "ack": "stopping",
        "grace": "stopping", "lose": "stopping"}  # fmt: skip


async def let_in(c: Connection, left: Case) -> None:
    """As the worker does that ended the run, or the sweeper a little later."""
    await concurrency.admit(c, await concurrency.limits_of(c, [left.run]), [left.run])


async def arrive(c: Connection, other: Case) -> str:
    """Another run of the same tenant, template and scope."""
    newcomer = Case(other.tenant, other.template)
    try:
        await make(c, newcomer)
    except Conflict as error:
        return "refused" if error.code == "same_scope_running" else error.code
    return await newcomer.state(c)


@pytest.mark.parametrize("rule", RULES)
async def test_a_newcomer_meets_a_run_of_its_scope(two: Two, rule: str) -> None:
    surprises = []
    for state, cell in RULES[rule].items():
        other = Case(template=known(cast("Concurrency", rule if rule == "allow" else f"{rule}_same_scope")))
        await put_into(two.first, other, state)
        await let_in(two.first, other)
        came = (await arrive(two.first, other), await other.state(two.first))
        if came != tuple(cell.split("/")):
            surprises.append((state, came, cell))
    assert not surprises


@pytest.mark.parametrize("rule", ["reject", "queue", "replace"])
async def test_a_failed_run_that_comes_back_meets_a_run_of_its_scope_as_a_newcomer_does(two: Two, rule: str) -> None:
    surprises = []
    for state, cell in RULES[rule].items():
        if state == "scheduled":
            continue
        template = known(cast("Concurrency", f"{rule}_same_scope"))
        back = Case(template=template)
        await put_into(two.first, back, "failed")
        await let_in(two.first, back)
        other = Case(back.tenant, template)
        await put_into(two.first, other, state)
        await let_in(two.first, other)
        done = await retry(two.first, back)
        became = await back.state(two.first) if done else "refused"
        came = (became, await other.state(two.first))
        if came != tuple(cell.split("/")):
            surprises.append((state, came, cell))
    assert not surprises


async def test_a_newcomer_meets_a_limit(two: Two) -> None:
    surprises = []
    for state, cell in LIMIT["limit"].items():
        other = Case()
        await limits.declare(two.first, [other.template.pipeline], ConcurrencyLimit(other.tenant, "tenant", at_most=1))
        await put_into(two.first, other, state)
        await let_in(two.first, other)
        came = (await arrive(two.first, other), await other.state(two.first))
        if came != tuple(cell.split("/")):
            surprises.append((state, came, cell))
    assert not surprises


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("rule", ["queue", "limit"])
async def test_who_waits_is_let_in_once_the_run_before_has_ended_however_it_ends(two: Two, rule: str, end: str) -> None:
    template = known("queue_same_scope") if rule == "queue" else known()
    before = Case(template=template)
    if rule == "limit":
        await limits.declare(two.first, [template.pipeline], ConcurrencyLimit(before.tenant, "tenant", at_most=1))
    await put_into(two.first, before, ENDS[end])
    waiting = [Case(before.tenant, template) for _ in range(2)]
    for one in waiting:
        await make(two.first, one)
    assert [await one.state(two.first) for one in waiting] == ["held", "held"]
    assert await VERBS[end](two.first, before)
    await let_in(two.first, before)
    assert [await one.state(two.first) for one in waiting] == ["pending", "held"]
    assert await VERBS["cancel"](two.first, waiting[0])
    assert await waiting[1].state(two.first) == "pending"


@pytest.mark.parametrize("verb", ["cancel", "expire"])
async def test_who_waits_and_goes_lets_nobody_in_twice(two: Two, verb: str) -> None:
    template = known("queue_same_scope")
    first, second, third = Case(template=template), Case(template=template), Case(template=template)
    second.tenant = third.tenant = first.tenant
    await put_into(two.first, first, "running")
    for one in (second, third):
        await make(two.first, one)
    assert await VERBS[verb](two.first, second)
    await concurrency.admit(two.first, await concurrency.limits_of(two.first, [third.run]))
    assert await third.state(two.first) == "held"
    row = await two.first.fetchrow("SELECT held FROM job WHERE id = $1", second.run)
    assert row is not None
    assert not row["held"]  # what has ended waits for nothing


async def test_cancels_that_may_not_end_yet_hold_up_no_others(two: Two) -> None:
    """However many steps of a neighbour's may not be interrupted, and however long ago they were asked to stop."""
    for _ in range(3):
        stubborn = Case()
        await put_into(two.first, stubborn, "stopping")
        await two.first.execute("UPDATE task SET cancelable = false WHERE job_id = $1", stubborn.run)
        await two.first.execute("UPDATE job SET cancel_by = cancel_by - interval '1 day' WHERE id = $1", stubborn.run)
    case = Case()
    await put_into(two.first, case, "stopping")
    assert await sweeps.end_cancels(two.first, [], 5, limit=2) == []
    assert len(await sweeps.end_cancels(two.first, [case.ours.owner], 5, limit=2)) == 1
    assert await case.state(two.first) == "cancelled"


async def fire(c: Connection, other: Case, overlap: str, *, of_schedule: bool) -> str:
    """What becomes of the tick of a schedule of the same template and scope as `other`."""
    schedule = uuid4()
    await c.execute(
        "INSERT INTO schedule (id, tenant_id, template, cron, timezone, payload_template, scope, scope_id,"
        " priority, overlap, catch_up, catch_up_seconds)"
        " VALUES ($1, $2, $3, $5, 'UTC', '{}', 'tenant', '', 1, $4, 'skip', 3600)",
        schedule, other.tenant, other.template.template.type, overlap, SELDOM,
    )  # fmt: skip
    if of_schedule:
        await c.execute("UPDATE run SET schedule_id = $2 WHERE job_id = $1", other.run, schedule)
    tick = await c.fetchval(
        "UPDATE schedule SET next_run_at = date_trunc('second', clock_timestamp()) WHERE id = $1 RETURNING next_run_at",
        schedule,
    )
    created_runs, _ = await schedules.fire_due(c, Templates(Pipelines(other.template.pipeline)), 60)
    for made in created_runs:
        await concurrency.admit(c, made.limits, made.departed)
    run = await c.fetchval("SELECT job_id FROM run WHERE schedule_id = $1 AND tick = $2", schedule, tick)
    row = await c.fetchrow("SELECT buffered_at, next_run_at FROM schedule WHERE id = $1", schedule)
    assert row is not None
    assert row["next_run_at"] > tick
    await c.execute("DELETE FROM schedule WHERE id = $1", schedule)
    return await other.state(c, run) if run else ("buffered" if row["buffered_at"] == tick else "none")


def ruled(rule: str) -> TemplateVersion:
    return known(cast("Concurrency", rule if rule == "allow" else f"{rule}_same_scope"))


async def test_a_schedule_fires_while_its_run_before_is_in_some_state(batchers: list[Two]) -> None:
    async def judge(two: Two, of: tuple[str, str, str]) -> object | None:
        policy, state, cell = of
        rule, overlap = policy.split("+")
        before = Case(template=ruled(rule))
        await put_into(two.first, before, state)
        await let_in(two.first, before)
        came = (await fire(two.first, before, overlap, of_schedule=True), await before.state(two.first))
        return None if came == tuple(cell.split("/")) else (policy, state, came, cell)

    cases = [(policy, state, cell) for policy, row in OVERLAPS.items() for state, cell in row.items()]
    cases += [(policy, state, f"pending/{state}") for policy in OVERLAPS for state in ENDED]
    assert await surprises(batchers, cases, judge) == []


async def test_a_schedule_meets_a_run_by_hand_of_its_scope_as_a_newcomer_does(batchers: list[Two]) -> None:
    """The overlap policy is about the schedule's own runs."""

    async def judge(two: Two, of: tuple[str, str, str, str]) -> object | None:
        rule, overlap, state, cell = of
        by_hand = Case(template=ruled(rule))
        await put_into(two.first, by_hand, state)
        await let_in(two.first, by_hand)
        came = (await fire(two.first, by_hand, overlap, of_schedule=False), await by_hand.state(two.first))
        return None if came == tuple(cell.replace("refused", "none").split("/")) else (of, came)

    overlaps = ("skip", "buffer_one", "cancel_other", "allow_all")
    cases = [
        (rule, overlap, state, cell)
        for rule, row in RULES.items()
        for overlap in overlaps
        for state, cell in row.items()
    ]
    assert await surprises(batchers, cases, judge) == []
