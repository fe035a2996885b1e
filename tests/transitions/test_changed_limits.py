"""Operators declare and withdraw concurrency limits: each change reaches the limits that follow the changed one, and no
other, whoever owns them and however similar their keys are.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from leasehold.domain.concurrency_limit import EVERYBODY, ConcurrencyLimit
from leasehold.domain.errors import Invalid
from leasehold.domain.json_digest import json_digest
from leasehold.domain.pipeline import Pipeline, RunTerms, Step
from leasehold.transitions import concurrency, limits
from leasehold.transitions.concurrency import ConcurrencyLimitName
from leasehold.transitions.concurrency.room import rooms_of
from leasehold.transitions.jobs import NewJob
from tests.factories import ONE, Rows
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open
from tests.transitions.test_limits_beside_others import bounds
from tests.transitions.test_retried_jobs import subscribe

PLATFORMS = Pipeline("platforms", module="tests.factories", steps=[Step("only")], terms=RunTerms(unlimited=True))
GENERAL = (EVERYBODY, "tenant")


def of_value(key: str, value: object = 1) -> str:
    return f"{key}={json_digest(value)}"


X, Y, ODD = (f"payload:one:{pointer}" for pointer in ("/x", "/y", "/x=y"))
#: Each declared limit, and those that follow it: nobody declared them, jobs brought them.
FOLLOWERS: dict[ConcurrencyLimitName, list[ConcurrencyLimitName]] = {
    GENERAL: [("t", "tenant"), ("v", "tenant")],
    ("u", "tenant"): [],
    (EVERYBODY, "queue:default"): [],
    ("t", "queue:default"): [],
    ("t", "template:one"): [],
    ("u", "template:one"): [],
    (EVERYBODY, X): [(EVERYBODY, of_value(X, 1)), (EVERYBODY, of_value(X, 2))],
    ("t", X): [("t", of_value(X))],
    ("u", X): [("u", of_value(X))],
    ("t", Y): [("t", of_value(Y))],
    ("t", ODD): [("t", of_value(ODD))],
}
DECLARED = list(FOLLOWERS)


async def everything(rows: Rows) -> dict[ConcurrencyLimitName, tuple[Any, ...]]:
    found = await rows.connection.fetch("SELECT tenant_id, key, at_most, per_minute, declared FROM gate")
    return {(row["tenant_id"], row["key"]): (row["at_most"], row["per_minute"], row["declared"]) for row in found}


async def declare_all(rows: Rows) -> dict[ConcurrencyLimitName, tuple[Any, ...]]:
    """The declared limits with their followers, each with bounds of its own, and one that a pipeline's code brought."""
    expected: dict[ConcurrencyLimitName, tuple[Any, ...]] = {("t", "code:one"): (99, None, False)}
    for at_most, (declared, followers) in enumerate(FOLLOWERS.items(), 1):
        expected |= dict.fromkeys(followers, (at_most, at_most, False)) | {declared: (at_most, at_most, True)}
    for (tenant, key), row in expected.items():
        await rows.connection.execute(
            "INSERT INTO gate (tenant_id, key, at_most, per_minute, declared) VALUES ($1, $2, $3, $4, $5)",
            tenant, key, *row,
        )  # fmt: skip
    return expected


@pytest.mark.parametrize("name", DECLARED, ids="/".join)
async def test_new_bounds_are_those_of_the_limit_and_of_its_followers_alone(
    rows: Rows, name: ConcurrencyLimitName
) -> None:
    before = await declare_all(rows)
    changed = await limits.declare(rows.connection, [ONE], ConcurrencyLimit(*name, 50, 60))
    assert set(changed) == {name, *FOLLOWERS[name]}
    assert await everything(rows) == before | {name: (50, 60, True)} | dict.fromkeys(FOLLOWERS[name], (50, 60, False))


@pytest.mark.parametrize("name", DECLARED, ids="/".join)
async def test_a_limit_is_lifted_with_its_followers_alone(rows: Rows, name: ConcurrencyLimitName) -> None:
    """A tenant whose own limit is lifted has everybody's instead."""
    before = await declare_all(rows)
    assert set(await limits.withdraw(rows.connection, *name)) == {name, *FOLLOWERS[name]}
    left = before[GENERAL][:2] if name == ("u", "tenant") else (None, None)
    assert await everything(rows) == before | dict.fromkeys([name, *FOLLOWERS[name]], (*left, False))


@pytest.mark.parametrize("name", [("t", "tenant"), ("t", of_value(X)), ("t", "code:one"), ("w", X)], ids="/".join)
async def test_a_limit_that_nobody_declared_is_not_lifted(rows: Rows, name: ConcurrencyLimitName) -> None:
    before = await declare_all(rows)
    assert not await limits.is_declared(rows.connection, *name)
    assert await limits.withdraw(rows.connection, *name) == []
    assert await everything(rows) == before


@pytest.mark.parametrize("joins", ["of its choice", "by hashes"])
async def test_new_bounds_do_not_deadlock_with_an_admission_at_two_of_the_followers(
    rows: Rows, another: Open, joins: str
) -> None:
    """Both lock the limits in the order of their names, whatever the order in which they were written, and however
    PostgreSQL joins the tables: by hashes it finds the limits as they were written.
    """
    if joins == "by hashes":
        await rows.connection.execute("SET plan_cache_mode = force_custom_plan")
        for way in ("hashjoin", "seqscan"):
            await rows.connection.execute(f"SET enable_{way} = on")
        for way in ("nestloop", "mergejoin", "indexscan", "bitmapscan"):
            await rows.connection.execute(f"SET enable_{way} = off")
    await limits.declare(rows.connection, [ONE], ConcurrencyLimit(*GENERAL, at_most=1))
    names = [(tenant, "tenant") for tenant in ("a", "b", "c")]
    for tenant, key in reversed(names):
        async with rows.connection.transaction():
            await rows.submit(ONE, tenant=tenant, limits=[ConcurrencyLimit(tenant, key, declared_as=GENERAL)])
    other = (await another()).connection
    async with other.transaction():
        await rooms_of(other, names[:1], None)
        declaring = asyncio.create_task(limits.declare(rows.connection, [ONE], ConcurrencyLimit(*GENERAL, at_most=2)))
        await until_waiting(other)
        await rooms_of(other, names, None)
    assert sorted(await declaring) == sorted([GENERAL, *names])
    assert await bounds(rows) == dict.fromkeys([GENERAL, *names], (2, None))


# --- which limits a new job has


async def test_a_tenant_s_rules_are_its_own_declared_limits_and_those_for_everybody(rows: Rows) -> None:
    await declare_all(rows)
    await subscribe(rows, "u")
    await subscribe(rows, "t", enabled=False)
    rules = await limits.tenant_rules(rows.connection, ["t", "u", "w"])
    assert {tenant: own.watched for tenant, own in rules.items()} == {"t": False, "u": True, "w": False}
    for tenant, own in rules.items():
        names = [(row["tenant_id"], row["key"]) for row in own.limits]
        assert sorted(names) == sorted(name for name in DECLARED if name[0] in (tenant, EVERYBODY))


async def test_the_platform_s_own_work_waits_at_no_limit_and_is_reported_to_no_webhook(rows: Rows) -> None:
    """Or the message about a job would wait behind the jobs, and be an occasion for a message itself."""
    for key in ("tenant", "queue:default"):
        await limits.declare(rows.connection, [ONE], ConcurrencyLimit("t", key, at_most=0))
    await subscribe(rows, "t")
    found = {}
    for pipeline in (ONE, PLATFORMS):
        new = NewJob(pipeline, "t")
        async with rows.connection.transaction():
            submitted = await limits.submit(rows.connection, new)
        job = await rows.job(new.id)
        found[pipeline.name] = (len(submitted.hints), sorted(submitted.limits), job["held"], job["notify"])
        assert sorted(await concurrency.limits_of(rows.connection, [new.id])) == sorted(submitted.limits)
    assert found == {
        "one": (0, [("t", "queue:default"), ("t", "tenant")], True, True),
        "platforms": (1, [], False, False),
    }


@pytest.mark.parametrize("subscriber", ["t", "u"])
async def test_the_end_of_a_job_is_reported_if_its_own_tenant_has_a_webhook(rows: Rows, subscriber: str) -> None:
    await subscribe(rows, subscriber)
    new = NewJob(ONE, "t")
    async with rows.connection.transaction():
        await limits.submit(rows.connection, new)
    assert (await rows.job(new.id))["notify"] == (subscriber == "t")


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_tenant_s_own_bound_goes_before_everybody_s_in_whatever_order_they_are_found(*, is_turned: bool) -> None:
    found = [{"tenant_id": tenant, "key": "tenant", "at_most": n, "per_minute": None} for n, tenant in enumerate("t*")]
    (limit,) = limits.applicable_limits(found[::-1] if is_turned else found, "t", ONE, {})
    assert limit == ConcurrencyLimit("t", "tenant", 0, declared_as=("t", "tenant"))


# --- limits without effect


async def test_a_template_with_other_queues_and_another_name_does_not_make_a_limit_effective(rows: Rows) -> None:
    await rows.connection.execute(
        "INSERT INTO template (tenant_id, type, version, declaration) VALUES ('t', 'mine', 1, $1)",
        {"type": "mine", "steps": [{"id": "a", "queue": "far"}]},
    )
    for key in ("queue:far", "template:mine", "payload:mine:/x"):
        await limits.declare(rows.connection, [], ConcurrencyLimit("t", key, at_most=1))
    for key in ("queue:near", "template:yours", "payload:yours:/x", "queue:mine", "template:far"):
        for tenant in ("t", EVERYBODY):
            with pytest.raises(Invalid) as refused:
                await limits.declare(rows.connection, [ONE], ConcurrencyLimit(tenant, key, at_most=1))
            assert refused.value.code == "limit_without_effect"
            assert "first" in str(refused.value)


async def test_whoever_limits_the_platform_s_own_work_is_told_that_no_limit_applies_to_it(rows: Rows) -> None:
    for key in ("template:platforms", "payload:platforms:/x", "queue:default"):
        with pytest.raises(Invalid, match="own work"):
            await limits.declare(rows.connection, [PLATFORMS], ConcurrencyLimit("t", key, at_most=1))
    both = [PLATFORMS, ONE]
    await limits.declare(rows.connection, both, ConcurrencyLimit("t", "queue:default", at_most=1))
