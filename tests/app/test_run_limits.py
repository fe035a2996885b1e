"""`limit`, `unique` and `on_failure`: how many runs at once, which are the same, and what follows a failed one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from leasehold import App, DeclarationError, Failed, Limit, Retry, TaskFailed, Unique
from leasehold.actions.context import Target
from leasehold.actions.ending import Effects, delete
from leasehold.actions.retrying import revive, revive_together, template_of
from leasehold.app.run_limits import KEY_LASTS
from leasehold.db.database import Connection
from leasehold.db.idempotency import KEEP
from leasehold.pipelines import with_deliveries
from leasehold.pipelines.operations.context import open_operation_context
from leasehold.settings import Settings
from leasehold.transitions import operations, webhooks
from leasehold.transitions.time_travel import let_pass
from tests.app.conftest import Serve

SECONDS = 60.0
app = App("flow")
counts: dict[str, list[int]] = {"now": [], "most": []}
#: A run goes on once so many have run at once: on a busy machine the next begins when the first would have ended.
at_once = 0


class Order(BaseModel):
    id: int
    customer: str
    note: str = ""


@app.task(limit=Limit(at_most=2, by="/customer"))
async def charge(order: Order) -> str:
    counts["now"].append(order.id)
    counts["most"].append(len(counts["now"]))
    await asyncio.sleep(0.15)
    while max(counts["most"]) < at_once:
        await asyncio.sleep(0.01)
    counts["now"].remove(order.id)
    return order.customer


@app.task(unique=Unique(by=("id", "customer")))
async def confirm(order: Order) -> str:
    return order.note


@app.task(unique=Unique(within=timedelta(hours=1)))
async def hourly(n: int) -> int:
    return n


@app.task
async def report(failed: Failed) -> str:
    return f"{failed.task}: {failed.code}: {failed.message} {failed.arguments}"


@app.task(retry=Retry(times=1, delay=timedelta(0)), on_failure=report)
async def fail(n: int) -> None:
    raise ValueError(f"no {n}")


async def test_a_limit_holds_the_runs_of_each_value_apart(
    using: Callable[..., App], serve: Serve, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    using(app)
    counts["most"].clear()
    monkeypatch.setattr(sys.modules[__name__], "at_once", 2)
    async with serve(app), asyncio.timeout(SECONDS):
        for run in await charge.asubmit_many([Order(id=n, customer="a") for n in range(6)]):
            assert await run == "a"
        assert max(counts["most"]) == 2
        counts["most"].clear()
        monkeypatch.setattr(sys.modules[__name__], "at_once", 3)
        for run in await charge.asubmit_many([Order(id=n, customer=str(n)) for n in range(6)]):
            await run
        assert max(counts["most"]) > 2
    assert await connection.fetchval("SELECT count(*) FROM job WHERE gated") == 12


async def test_unique_runs_are_compared_by_the_named_arguments_alone(
    using: Callable[..., App], connection: Connection
) -> None:
    using(app)
    first = await confirm.asubmit(Order(id=1, customer="a", note="first"))
    assert await confirm.asubmit(Order(id=1, customer="a", note="second")) == first
    assert (await confirm.asubmit_many([Order(id=1, customer="a"), Order(id=1, customer="b")]))[0] == first
    assert await connection.fetchval("SELECT count(*) FROM job") == 2
    assert await confirm.asubmit(Order(id=1, customer="a"), key="mine") != first


@pytest.mark.parametrize(("minutes", "is_same"), [(59, True), (61, False)])
async def test_unique_runs_are_the_same_for_as_long_as_the_task_says_and_those_of_a_key_for_a_day(
    using: Callable[..., App], connection: Connection, minutes: int, is_same: bool
) -> None:
    using(app)
    first, keyed = await hourly.asubmit(1), await hourly.asubmit(1, key="mine")
    await let_pass(connection, timedelta(minutes=minutes))
    assert (await hourly.asubmit(1) == first) is is_same
    assert await hourly.asubmit(1, key="mine") == keyed
    await let_pass(connection, timedelta(hours=24))
    assert await hourly.asubmit(1, key="mine") != keyed


def test_a_key_counts_for_as_long_as_it_is_stored() -> None:
    assert Unique().within == KEY_LASTS == KEEP


async def test_a_run_follows_each_one_that_failed_for_good_and_no_other(
    using: Callable[..., App], serve: Serve, connection: Connection
) -> None:
    using(app)
    async with serve(app), asyncio.timeout(SECONDS):
        runs = await fail.asubmit_many([fail.call(n) for n in range(3)])
        for run in runs:
            with pytest.raises(TaskFailed):
                await run
        values = "SELECT value FROM result r JOIN task t ON t.id = r.task_id JOIN job j ON j.id = t.job_id"
        while len(found := await connection.fetch(f"{values} WHERE j.pipeline = 'flow.report'")) < 3:
            await asyncio.sleep(0.05)
    assert {row["value"]["value"] for row in found} == {
        f"flow.fail: handler_error: ValueError: no {n} {{'n': {n}}}" for n in range(3)
    }
    assert await connection.fetchval("SELECT count(*) FROM job WHERE pipeline = 'flow.report'") == 3
    assert await connection.fetchval("SELECT count(*) FROM run WHERE template = 'flow.report'") == 3


async def test_a_run_follows_each_failure_of_a_run_that_is_retried(
    using: Callable[..., App], serve: Serve, connection: Connection, settings: Settings
) -> None:
    """Also where no webhook is subscribed: a retry asks for the end again."""
    using(app)

    async def reports(number: int) -> None:
        while await connection.fetchval("SELECT count(*) FROM job WHERE pipeline = 'flow.report'") < number:
            await asyncio.sleep(0.05)

    async with serve(app), open_operation_context(settings, app.pipelines()) as context, asyncio.timeout(SECONDS):
        run = await fail.asubmit(1)
        await reports(1)
        ((tenant, at),) = await connection.fetch("SELECT tenant_id, clock_timestamp() FROM job WHERE id = $1", run.id)
        for number, together in enumerate((True, False), 2):
            async with connection.transaction():
                (row,), _ = await operations.lock(connection, "retry", [run.id], tenant, at + timedelta(hours=1))
                target = Target(row, context.actions.kinds.of("flow.fail", is_run=True), row["queue"])
                if together:
                    await revive_together(context.actions, connection, [target])
                else:
                    template_version = await template_of(context.actions, connection, target)
                    assert await revive(context.actions, connection, target, template_version) is not None
            await reports(number)


async def test_a_worker_without_the_code_leaves_the_end_of_a_failed_task_to_one_that_has_it(
    using: Callable[..., App], connection: Connection
) -> None:
    using(app)
    deliveries = with_deliveries()["webhook"]
    run = await fail.asubmit(1)
    failed = {"code": "x", "message": "y"}
    await connection.execute(
        "UPDATE job SET error = $2, status = 'failed', finished_at = clock_timestamp() WHERE id = $1", run.id, failed
    )
    assert await webhooks.dispatch(connection, deliveries, 60, pipelines=App("other").pipelines()) == ([], False)
    assert await connection.fetchval("SELECT notify FROM job WHERE id = $1", run.id)
    await webhooks.dispatch(connection, deliveries, 60, pipelines=app.pipelines())
    assert await connection.fetchval("SELECT params ->> 'run_id' FROM job WHERE pipeline = 'flow.report'") == str(
        run.id
    )
    assert not await connection.fetchval("SELECT notify FROM job WHERE id = $1", run.id)


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"unique": Unique(by=("nothing",))}, r"Unique\.by names \['nothing'\]"),
        ({"on_failure": confirm}, "must take one parameter, a leasehold.Failed"),
    ],
)
def test_what_does_not_fit_the_arguments_is_refused_at_import(terms: dict[str, Any], words: str) -> None:
    with pytest.raises(DeclarationError, match=rf"test_run_limits\.py:\d+: .*{words}"):
        App("shop").task(**terms)(one)


def one(order: Order, n: int) -> None: ...


def test_one_name_alone_is_refused_where_a_tuple_is_meant() -> None:
    with pytest.raises(DeclarationError, match=r"\('order',\)"):
        Unique(by="order")  # type: ignore[arg-type]  # what is refused


@pytest.mark.parametrize("within", [timedelta(0), timedelta(hours=24, microseconds=1)])
def test_runs_are_unique_for_no_longer_than_their_key_is_stored(within: timedelta) -> None:
    with pytest.raises(DeclarationError, match="more than 0 and at most 24 hours"):
        Unique(within=within)


@pytest.mark.parametrize("terms", [{}, {"at_most": 0}, {"per_minute": 0}, {"at_most": 1, "by": "customer"}])
def test_a_limit_that_holds_everything_or_nothing_is_refused(terms: dict[str, Any]) -> None:
    with pytest.raises(DeclarationError):
        Limit(**terms)


@pytest.mark.parametrize("act", ["delete", "retry"])
async def test_a_run_follows_a_failure_also_where_a_client_is_faster_than_the_worker_s_duty(
    using: Callable[..., App], connection: Connection, settings: Settings, act: str
) -> None:
    using(app)
    run = await fail.asubmit(1)
    await connection.execute("UPDATE task SET status = 'failed', finished_at = clock_timestamp()")
    await connection.execute(
        "UPDATE job SET error = $2, status = 'failed', finished_at = clock_timestamp() WHERE id = $1",
        run.id,
        {"code": "x", "message": "y"},
    )
    async with open_operation_context(settings, app.pipelines()) as context, connection.transaction():
        ((tenant, at),) = await connection.fetch("SELECT tenant_id, clock_timestamp() FROM job WHERE id = $1", run.id)
        (row,), _ = await operations.lock(connection, act, [run.id], tenant, at + timedelta(hours=1))
        target = Target(row, context.actions.kinds.of("flow.fail", is_run=True), row["queue"])
        if act == "delete":
            assert await delete(context.actions, connection, target, "tests", Effects()) is not None
        else:
            template_version = await template_of(context.actions, connection, target)
            assert await revive(context.actions, connection, target, template_version) is not None
    assert await connection.fetchval("SELECT count(*) FROM job WHERE pipeline = 'flow.report'") == 1
