"""Signals over HTTP: checked against the model of the wait, consumed once in order, refused when the run has ended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from leasehold.db.database import Connection, connect
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.worker.worker import Worker
from tests.api.conftest import client_of, serving
from tests.api.media_api import problem
from tests.runs.conftest import SCOPES, Client
from tests.workflows import shop

LIMIT = 3


@pytest.fixture
async def known(settings: Settings, tmp_path: Path) -> Settings:
    changes = {
        "pipelines": "tests.workflows.shop:app", "work_dir": str(tmp_path), "poll_seconds": 0.1, "run_signals": LIMIT,
    }  # fmt: skip
    return settings.model_copy(update=changes)


@pytest.fixture
async def rows(known: Settings) -> AsyncIterator[Connection]:
    connection = await connect(known, "test")
    yield connection
    await connection.close()


@pytest.fixture
async def shopping(known: Settings, rows: Connection) -> AsyncIterator[Client]:
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=SCOPES)
    async with serving(known) as running, client_of(running.url, key.text) as http:
        yield Client(http)


async def test_signals_before_and_during_the_wait_are_consumed_in_order(
    shopping: Client, known: Settings, rows: Connection
) -> None:
    run = await shopping.start("shop.approved", payload={})
    at = f"/v1/runs/{run}/signals"
    early = await shopping.http.post(f"{at}/approved", json={"payload": {"by": "anna"}})
    assert (early.status_code, early.json()) == (202, {"id": run, "name": "approved"})
    async with Worker(known, shop.app.pipelines()):
        await shopping.until_step(run, "run", "waiting")
        wrong = await shopping.http.post(f"{at}/approved", json={"payload": {"by": 7}})
        assert "by" in problem(wrong, 422, "invalid_payload")["detail"]
        for _ in range(2):  # the same key: one signal
            sent = await shopping.http.post(
                f"{at}/approved", json={"payload": {"by": "bert"}}, headers={"Idempotency-Key": "once"}
            )
            assert sent.status_code == 202
        await shopping.until(run, "succeeded")
    value = await rows.fetchval("SELECT r.value FROM result r JOIN task t ON t.id = r.task_id WHERE t.step = 'run'")
    assert value == {"value": "anna, bert"}
    problem(await shopping.http.post(f"{at}/approved", json={"payload": {"by": "carl"}}), 409, "run_ended")


async def test_a_workflow_that_has_made_calls_is_retried_with_its_own_payload_only(
    shopping: Client, known: Settings, rows: Connection
) -> None:
    """The journal has the calls with their old arguments: the failed step ran again with the old one."""
    run = await shopping.start("shop.fails", payload={"code": "old"})
    async with Worker(known, shop.app.pipelines()):
        await shopping.until(run, "failed")
    task = await rows.fetchval("SELECT id FROM task WHERE NOT contained")
    for path in (f"/v1/runs/{run}/retry", f"/v1/dead-letters/{task}/replay"):
        for more in ({}, {"from_step": "run"}):
            problem(await shopping.post(path, payload={"code": "new"}, **more), 422, "workflow_has_begun")
    assert (await shopping.look(run))["payload"] == {"code": "old"}
    assert (await shopping.post(f"/v1/runs/{run}/retry", payload={"code": "old"})).status_code == 202


async def test_a_workflow_that_has_made_no_call_is_retried_with_another_payload(
    shopping: Client, known: Settings, rows: Connection
) -> None:
    run = await shopping.start("shop.fails", payload={"code": "old"})
    await rows.execute("UPDATE task SET status = 'failed', finished_at = now()")
    await rows.execute("UPDATE job SET status = 'failed', finished_at = now()")
    assert (await shopping.post(f"/v1/runs/{run}/retry", payload={"code": "new"})).status_code == 202
    assert (await shopping.look(run))["payload"] == {"code": "new"}


async def test_a_run_keeps_so_many_signals_that_it_never_waits_for(shopping: Client) -> None:
    run = await shopping.start("shop.approved", payload={})
    for number in range(LIMIT):
        assert (await shopping.http.post(f"/v1/runs/{run}/signals/s{number}")).status_code == 202
    refused = await shopping.http.post(f"/v1/runs/{run}/signals/more")
    problem(refused, 429, "too_many_signals")
    assert refused.headers["ratelimit-policy"] == f'"signals";q={LIMIT}'
