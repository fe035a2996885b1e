"""A cancel takes effect wherever the run is, and nothing of it is done afterwards."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest

from leasehold.db.database import Connection
from leasehold.settings import Settings
from leasehold.worker.worker import Worker
from tests.api.media_api import problem
from tests.factories import Rows, assert_history
from tests.runs.conftest import Client, step_of


async def test_a_run_that_has_not_started_is_cancelled_at_once(client: Client, rows: Connection) -> None:
    run = await client.start()
    answer = await client.post(f"/v1/runs/{run}/cancel", reason="a mistake")
    assert (answer.status_code, answer.json()["status"]) == (202, "cancelled")
    said = await client.look(run)
    assert said["cancel"] == {"reason": "a mistake", "by": said["cancel"]["by"]}
    assert said["created_at"] <= said["cancel_requested_at"] <= said["updated_at"]
    assert {step["status"] for step in said["progress"]["steps"]} == {"cancelled", "skipped"}
    problem(await client.post(f"/v1/runs/{run}/cancel"), 409, "resource_invalid_state")
    await assert_history(Rows(rows), UUID(run))


@pytest.mark.parametrize("template", ["scripted", "isolated"])
async def test_a_running_step_stops_at_its_next_checkpoint(
    client: Client, worker: Worker, rows: Connection, template: str
) -> None:
    queues = "('default', 'a test'), ('heavy', 'a test')"
    await rows.execute(f"INSERT INTO paused_queue (queue, reason) VALUES {queues}")
    run = await client.start(template, payload={"do": "work"})
    await rows.execute("UPDATE job SET grace_seconds = 60")  # one second is over soon on a busy machine
    await rows.execute("DELETE FROM paused_queue")
    step = "first" if template == "scripted" else "count"
    async with asyncio.timeout(60):
        while not step_of(await client.look(run), step).get("summary"):  # it works, and says so
            await asyncio.sleep(0.02)
    answer = await client.post(f"/v1/runs/{run}/cancel")
    assert answer.json()["status"] == "cancel_requested"
    assert (await client.post(f"/v1/runs/{run}/cancel")).status_code == 202  # asking again changes nothing
    said = await client.until(run, "cancelled")
    assert step_of(said, step)["status"] == "cancelled"
    await assert_history(Rows(rows), UUID(run))
    events = [row["data"] for row in await rows.fetch("SELECT data FROM history WHERE job_id = $1", UUID(run))]
    assert not any((data or {}).get("forced") for data in events)


async def test_a_step_without_checkpoints_is_stopped_after_the_grace(
    client: Client, worker: Worker, rows: Connection
) -> None:
    run = await client.start(payload={"do": "hang"})
    await client.until(run, "running")
    await client.post(f"/v1/runs/{run}/cancel")
    said = await client.until(run, "cancelled")
    assert step_of(said, "first")["status"] == "cancelled"
    await assert_history(Rows(rows), UUID(run))


async def test_a_cancel_whose_worker_is_lost_ends_all_the_same(
    client: Client, rows: Connection, runs_settings: Settings
) -> None:
    async with Worker(runs_settings):
        run = await client.start(payload={"do": "hang"})
        await client.until(run, "running")
        owner = await rows.fetchval("SELECT lease_owner FROM task WHERE job_id = $1 AND status = 'running'", UUID(run))
        # as if that worker had died: the lease belongs to nobody who lives
        await rows.execute(
            "UPDATE task SET lease_owner = gen_random_uuid(), lease_until = clock_timestamp() WHERE job_id = $1"
            " AND lease_owner = $2", UUID(run), owner,
        )  # fmt: skip
        await client.post(f"/v1/runs/{run}/cancel")
        said = await client.until(run, "cancelled")
    assert said["status"] == "cancelled"
    await assert_history(Rows(rows), UUID(run))


async def test_a_step_that_must_not_be_interrupted_ends_before_the_run_does(client: Client, worker: Worker) -> None:
    steps = [
        {"id": "delicate", "worker_type": "external", "queue": "q", "cancelable": False},
        {"id": "never", "worker_type": "external", "queue": "q"},
    ]
    await client.post("/v1/templates", type="delicate", steps=steps, cancel_policy={"grace_seconds": 0})
    run = await client.start("delicate")
    (task,) = (await client.post("/v1/external/claim", worker_id="w", queues=["q"])).json()["tasks"]
    await client.post(f"/v1/runs/{run}/cancel")
    held = {"worker_id": "w", "epoch": task["epoch"]}
    beat = await client.post(f"/v1/external/tasks/{task['task_id']}/heartbeat", **held)
    assert beat.json()["cancel_requested"] is False
    await asyncio.sleep(0.5)  # a few sweeps past the grace
    assert (await client.look(run))["status"] == "cancel_requested"
    assert (await client.post(f"/v1/external/tasks/{task['task_id']}/complete", **held)).status_code == 200
    said = await client.until(run, "cancelled")
    assert [step["status"] for step in said["progress"]["steps"]] == ["succeeded", "skipped"]


async def test_a_template_may_refuse_to_be_cancelled(client: Client) -> None:
    step = {"id": "only", "worker_type": "external"}
    await client.post("/v1/templates", type="steady", steps=[step], cancel_policy={"supported": False})
    run = await client.start("steady")
    problem(await client.post(f"/v1/runs/{run}/cancel"), 409, "cancel_not_supported")


async def test_cancelling_and_claiming_at_the_same_moment_agree(
    client: Client, worker: Worker, rows: Connection
) -> None:
    runs = [await client.start() for _ in range(30)]
    answers = await asyncio.gather(*(client.post(f"/v1/runs/{run}/cancel") for run in runs))
    for run, answer in zip(runs, answers, strict=True):
        assert answer.status_code in (202, 409)
        said = await client.until(run, "cancelled", "succeeded")
        if answer.status_code == 409:
            assert said["status"] == "succeeded"
        await assert_history(Rows(rows), UUID(run))
