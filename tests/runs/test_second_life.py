"""A retry is a second life: what holds for a new run holds for one that goes on after its failure."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from leasehold.db.database import Connection, connected
from leasehold.evaluation.templates import Templates
from leasehold.pipelines.webhooks.pipeline import webhooks as deliveries
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.transitions import concurrency, external, sweeps, webhooks
from tests.api.conftest import Running, client_of
from tests.api.media_api import problem
from tests.factories import Rows, assert_history
from tests.runs.conftest import SCOPES, Client
from tests.runs.work import pipelines
from tests.support.lock_waits import until_waiting


@pytest.fixture
def runs_settings(runs_settings: Settings) -> Settings:
    return runs_settings.model_copy(update={"pipelines": "tests.runs.work:pipelines_and_webhooks"})


async def template(client: Client, **more: Any) -> None:
    body = {"type": "outside", "steps": [{"id": "a", "queue": "q"}, {"id": "b", "queue": "q"}]}
    assert (await client.post("/v1/templates", **(body | more))).status_code == 201


async def settle(client: Client, verb: str, run: str | None = None, **body: Any) -> str:
    """Of the next task, which is one of `run`'s: its step."""
    (task,) = (await client.post("/v1/external/claim", worker_id="w", queues=["q"], wait=5)).json()["tasks"]
    assert run in (None, task["run_id"])
    held = {"worker_id": "w", "epoch": task["epoch"]}
    answer = await client.post(f"/v1/external/tasks/{task['task_id']}/{verb}", **held, **body)
    assert answer.status_code == 200, answer.text
    return str(task["step"])


async def nothing_to_do(client: Client) -> bool:
    return not (await client.post("/v1/external/claim", worker_id="w", queues=["q"])).json()["tasks"]


async def failed(client: Client, **body: Any) -> str:
    run = await client.start("outside", **body)
    await settle(client, "fail", run, retryable=False)
    await client.until(run, "failed")
    return run


async def retry(client: Client, run: str, **body: Any) -> None:
    answer = await client.post(f"/v1/runs/{run}/retry", **body)
    assert answer.status_code == 202, answer.text


async def let_in_after(rows: Connection, run: str) -> None:
    """As a worker or the sweeper does when a run has ended."""
    await concurrency.admit(rows, await concurrency.limits_of(rows, [UUID(run)]))


async def seconds_left(rows: Connection, run: str) -> float:
    return float(
        await rows.fetchval(
            "SELECT extract(epoch FROM deadline_at - clock_timestamp())::float8 FROM job WHERE id = $1", UUID(run)
        )
    )


async def test_its_deadline_starts_anew_however_late_and_often_it_is_retried(client: Client, rows: Connection) -> None:
    await template(client, timeout_seconds=600)
    run = await failed(client)
    await rows.execute(
        "UPDATE job SET created_at = created_at - interval '1 day', deadline_at = deadline_at - interval '1 day'"
    )
    for _ in range(2):
        await retry(client, run)
        assert 500 < await seconds_left(rows, run) <= 600
        await sweeps.expire_jobs(rows)
        assert await settle(client, "fail", run, retryable=False) == "a"
        await client.until(run, "failed")
    await retry(client, run)
    assert await settle(client, "complete", run) == "a"
    assert await settle(client, "complete", run) == "b"
    await client.until(run, "succeeded")
    await assert_history(Rows(rows), UUID(run))


async def test_a_run_that_was_to_start_later_has_no_more_time_than_that(client: Client, rows: Connection) -> None:
    await template(client, timeout_seconds=600)
    run = await failed(client)
    await rows.execute("UPDATE run SET scheduled_at = clock_timestamp() + interval '1 hour'")
    await rows.execute("UPDATE job SET deadline_at = clock_timestamp() + interval '1 hour 600 seconds'")
    await retry(client, run)
    assert 500 < await seconds_left(rows, run) <= 601


async def test_a_run_of_an_older_version_of_the_code_has_its_second_life_with_the_code_of_now(
    client: Client, rows: Connection
) -> None:
    run = await client.start(payload={"number": 7})
    await rows.execute("UPDATE run SET version = 0")  # as if the code had raised its version since
    task_id = await rows.fetchval("SELECT id FROM task WHERE step = 'first'")
    wait = await external.backoff(rows, Templates(pipelines()), "acme", task_id)
    assert wait <= timedelta(milliseconds=10)  # the step's own ladder; the default begins with a minute
    answer = await client.post(f"/v1/runs/{run}/rerun")
    assert answer.status_code == 202, answer.text
    again = await client.look(answer.json()["id"])
    assert (again["version"], again["payload"]["number"]) == (1, 7)


async def test_a_run_of_a_disabled_version_is_not_repeated(client: Client) -> None:
    await template(client)
    run = await client.start("outside")
    await client.http.patch("/v1/templates/outside/1", json={"enabled": False})
    problem(await client.post(f"/v1/runs/{run}/rerun"), 409, "template_disabled")


async def told(rows: Connection, run: str) -> list[str]:
    """What a webhook is told of the run's ends."""
    await webhooks.dispatch(rows, deliveries, 60)
    found = await rows.fetch(
        "SELECT params->'event'->>'type' AS type FROM job WHERE pipeline = 'webhook'"
        " AND params->'event'->'data'->>'id' = $1 ORDER BY id",
        run,
    )
    return [row["type"] for row in found]


@pytest.mark.parametrize("told_of_the_first", [True, False], ids=["told before", "not told yet"])
async def test_webhooks_are_told_of_each_end(client: Client, rows: Connection, *, told_of_the_first: bool) -> None:
    await template(client)
    await rows.execute(
        "INSERT INTO webhook (id, tenant_id, url, secrets, events) VALUES (gen_random_uuid(), 'acme',"
        " 'https://example.com', '{}', '{run.failed,run.succeeded}')"
    )
    run = await failed(client)
    if told_of_the_first:
        assert await told(rows, run) == ["run.failed"]
    await retry(client, run)
    await settle(client, "complete", run)
    await settle(client, "complete", run)
    assert await told(rows, run) == ["run.failed", "run.succeeded"]


@pytest.mark.parametrize("changes", ["retry", "delete"])
async def test_webhooks_are_told_of_an_end_though_another_held_the_run_for_a_moment(
    client: Client, running: Running, rows: Connection, settings: Settings, changes: str
) -> None:
    """Whoever held it changed nothing: a worker that died, or a retry that was refused."""
    await template(client)
    await rows.execute(
        "INSERT INTO webhook (id, tenant_id, url, secrets, events) VALUES (gen_random_uuid(), 'acme',"
        " 'https://example.com', '{}', '{run.failed}')"
    )
    run = await failed(client)
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=(*SCOPES, "jobs:delete"))
    async with connected(settings, "holder") as holder, client_of(running.url, key.text) as http:
        async with holder.transaction():
            await holder.execute("SELECT 1 FROM job WHERE id = $1 FOR UPDATE", UUID(run))
            if changes == "retry":
                change = asyncio.create_task(client.post(f"/v1/runs/{run}/retry"))
            else:
                change = asyncio.create_task(http.delete(f"/v1/jobs/{run}"))
            await until_waiting(rows)
        assert (await change).status_code in (200, 202, 204)
    assert await told(rows, run) == ["run.failed"]


async def test_it_waits_its_turn_among_runs_of_the_same_scope(client: Client, rows: Connection) -> None:
    await template(client, concurrency_policy="queue_same_scope")
    run = await failed(client, scope_id="s")
    other = await client.start("outside", scope_id="s")
    await let_in_after(rows, run)
    await retry(client, run)
    assert (await client.look(run))["held"]
    await settle(client, "complete", other)
    await settle(client, "complete", other)
    await let_in_after(rows, other)
    await settle(client, "complete", run)
    await settle(client, "complete", run)
    await client.until(run, "succeeded")
    await assert_history(Rows(rows), UUID(run))


async def test_from_a_later_step_it_waits_its_turn_too(client: Client, rows: Connection) -> None:
    await template(client, concurrency_policy="queue_same_scope")
    run = await client.start("outside", scope_id="s")
    assert await settle(client, "complete", run) == "a"
    assert await settle(client, "fail", run, retryable=False) == "b"
    other = await client.start("outside", scope_id="s")
    await let_in_after(rows, run)
    await retry(client, run)
    assert await settle(client, "fail", other, retryable=False) == "a"
    await let_in_after(rows, other)
    assert await settle(client, "complete", run) == "b"
    await client.until(run, "succeeded")
    await assert_history(Rows(rows), UUID(run))


async def test_a_held_second_life_can_be_cancelled(client: Client) -> None:
    await template(client, concurrency_policy="queue_same_scope")
    run = await failed(client, scope_id="s")
    await client.start("outside", scope_id="s")
    await retry(client, run)
    assert (await client.post(f"/v1/runs/{run}/cancel")).status_code == 202
    await client.until(run, "cancelled")


async def test_it_replaces_what_it_would_have_replaced(client: Client) -> None:
    await template(client, concurrency_policy="replace_same_scope")
    run = await failed(client, scope_id="s")
    other = await client.start("outside", scope_id="s")
    await retry(client, run)
    await client.until(other, "cancelled")
    await settle(client, "complete", run)
    await settle(client, "complete", run)
    await client.until(run, "succeeded")


async def test_with_another_payload_it_takes_the_place_of_that_payload(client: Client) -> None:
    """Two runs of one scope ran together: the place was that of the payload before."""
    await template(client, concurrency_policy="reject_same_scope", dedupe_keys=["target"])
    run = await failed(client, payload={"target": 1})
    other = await client.start("outside", payload={"target": 2})
    said = problem(await client.post(f"/v1/runs/{run}/retry", payload={"target": 2}), 409, "same_scope_running")
    assert other in said["detail"]
    await retry(client, run, payload={"target": 3})
    problem(await client.submit("outside", payload={"target": 3}), 409, "same_scope_running")
    await client.start("outside", payload={"target": 1})


async def test_with_another_payload_it_skips_the_same_steps_or_is_refused(client: Client) -> None:
    """It went on with the steps of the payload before: the one that the new payload skips ran all the same."""
    skip = {"pointer": "/quick", "equals": True}
    steps: list[dict[str, Any]] = [
        {"id": "a", "queue": "q"}, {"id": "b", "queue": "q", "skip_if": skip}, {"id": "c", "queue": "q"}
    ]  # fmt: skip
    await template(client, steps=steps)
    for before in (True, False):
        run = await failed(client, payload={"quick": before})
        for body in ({"payload": {"quick": not before}}, {"payload": {"quick": not before}, "from_step": "a"}):
            problem(await client.post(f"/v1/runs/{run}/retry", **body), 422, "skips_other_steps")
        assert (await client.look(run))["payload"] == {"quick": before}
        await retry(client, run, payload={"quick": before, "number": 2})
        done = [await settle(client, "complete", run) for _ in range(2 if before else 3)]
        assert done == (["a", "c"] if before else ["a", "b", "c"])
        await client.until(run, "succeeded")


async def test_it_waits_at_declared_limits_again_also_right_after_its_failure(client: Client, rows: Connection) -> None:
    await template(client)
    limit = {"tenant_id": "acme", "key": "template:outside", "at_most": 1}
    assert (await client.http.put("/v1/limits", json=limit)).status_code == 200
    run = await failed(client)
    other = await client.start("outside")
    await retry(client, run)
    assert sorted([(await client.look(one))["held"] for one in (run, other)]) == [False, True]
    for _ in range(4):
        await settle(client, "complete")
        await concurrency.admit(rows, [("acme", "template:outside")])
    for one in (run, other):
        await client.until(one, "succeeded")


async def test_a_limit_that_was_declared_since_holds_for_it(client: Client) -> None:
    await template(client)
    run = await failed(client)
    limit = {"tenant_id": "acme", "key": "template:outside", "at_most": 0}
    assert (await client.http.put("/v1/limits", json=limit)).status_code == 200
    await retry(client, run)
    assert (await client.look(run))["held"]
    assert await nothing_to_do(client)


async def test_in_bulk_a_taken_place_is_told_of_its_run_and_the_rest_goes_on(client: Client) -> None:
    await template(client, concurrency_policy="reject_same_scope")
    runs = [await failed(client, scope_id=str(number)) for number in range(3)]
    other = await client.start("outside", scope_id="1")
    answer = await client.post("/v1/dead-letters/replay", template="outside")
    assert answer.status_code == 202, answer.text
    said = answer.json()
    assert sorted(said["replayed"]) == sorted([runs[0], runs[2]])
    (refused,) = said["refused"]
    assert (refused["run_id"], refused["code"]) == (runs[1], "same_scope_running")
    assert other in refused["detail"]
    assert (await client.look(runs[1]))["status"] == "failed"


async def test_in_bulk_runs_of_one_scope_go_on_one_at_a_time(client: Client) -> None:
    await template(client, concurrency_policy="reject_same_scope")
    runs = [await failed(client, scope_id="s") for _ in range(3)]
    said = (await client.post("/v1/dead-letters/replay", template="outside")).json()
    assert len(said["replayed"]) == 1
    assert {one["run_id"] for one in said["refused"]} == set(runs) - set(said["replayed"])
