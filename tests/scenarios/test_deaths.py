"""Processes are killed at the worst points: no work is lost, and none is done twice."""

from __future__ import annotations

import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from leasehold.pipelines.demo.pipeline import demo_long_task
from leasehold.settings import Settings
from leasehold.transitions import jobs
from tests.pictures import encoded, noisy
from tests.scenarios.fleet import Fleet, open_fleet
from tests.scenarios.test_media import objects
from tests.support.broker_node import BrokerNode
from tests.support.bucket import Bucket
from tests.worker.stubborn_steps import stubborn

PICTURE = encoded(noisy(1600, 1200), "JPEG", quality=85)
WORKER_POINTS = [
    "after_hint",
    "after_claim",
    "after_download",
    "mid_process",
    "mid_upload",
    "after_upload",
    "after_commit",
]


@pytest.mark.parametrize("point", WORKER_POINTS)
async def test_a_worker_killed_at_any_point_loses_nothing_and_doubles_nothing(
    fleet: Fleet, s3: Bucket, point: str
) -> None:
    await fleet.api_here()
    victim = await fleet.worker(failpoints=f"{point}:kill")
    accepted = await fleet.send(PICTURE)
    assert await victim.wait() == -signal.SIGKILL
    await fleet.worker()
    await fleet.finished(accepted["media_id"])
    await fleet.at_rest()
    job_id = UUID(accepted["job_id"])
    await fleet.assert_done_once(job_id)
    assert set(await objects(s3, f"media/{accepted['media_id']}/")) == {
        "original.jpg", "resize.jpg", "compress.jpg", "final.webp",
    }  # fmt: skip
    # The death of a worker is no fault of the picture, so it costs no attempt.
    assert await fleet.rows.connection.fetchval("SELECT sum(errors + crashes) FROM task WHERE job_id = $1", job_id) == 0


async def test_another_worker_takes_over_without_waiting_for_the_lease(fleet: Fleet) -> None:
    """The lease lasts ten minutes here. Only the end of the dead worker's presence can free its task so soon."""
    await fleet.api_here()
    victim = await fleet.worker(failpoints="mid_process:kill", lease_seconds=600, renew_seconds=200)
    await fleet.worker(lease_seconds=600, renew_seconds=200)
    accepted = [await fleet.send(PICTURE) for _ in range(4)]
    assert await victim.wait() == -signal.SIGKILL
    for answer in accepted:
        await fleet.finished(answer["media_id"])
        await fleet.assert_done_once(UUID(answer["job_id"]))


async def test_without_presence_the_lease_decides(fleet: Fleet) -> None:
    terms: dict[str, Any] = {"presence": "false", "lease_seconds": 3, "renew_seconds": 1, "trust_margin_seconds": 1}
    await fleet.api_here()
    victim = await fleet.worker(failpoints="mid_process:kill", **terms)
    accepted = await fleet.send(PICTURE)
    assert await victim.wait() == -signal.SIGKILL
    await fleet.worker(**terms)
    await fleet.finished(accepted["media_id"])
    await fleet.assert_done_once(UUID(accepted["job_id"]))


async def test_a_zombie_that_wakes_after_its_task_was_finished_elsewhere_changes_nothing(
    fleet: Fleet, s3: Bucket
) -> None:
    terms: dict[str, Any] = {"presence": "false", "lease_seconds": 3, "renew_seconds": 1, "trust_margin_seconds": 1}
    await fleet.api_here()
    zombie = await fleet.worker(failpoints="after_upload:stop", **terms)
    accepted = await fleet.send(PICTURE)
    job_id = UUID(accepted["job_id"])
    await fleet.reaches(job_id, "resize", "running")
    await fleet.worker(**terms)
    await fleet.finished(accepted["media_id"])
    before = await objects(s3, f"media/{accepted['media_id']}/")
    events = await fleet.rows.events(job_id)
    zombie.signal(signal.SIGCONT)
    await zombie.says("lease lost")
    zombie.signal(signal.SIGTERM)
    assert await zombie.wait() == 0
    assert await fleet.rows.events(job_id) == events
    assert await objects(s3, f"media/{accepted['media_id']}/") == before
    await fleet.assert_done_once(job_id)


async def test_a_worker_told_to_stop_finishes_what_it_runs(fleet: Fleet) -> None:
    await fleet.api_here()
    worker = await fleet.worker()
    accepted = await fleet.send(PICTURE)
    job_id = UUID(accepted["job_id"])
    await fleet.reaches(job_id, "resize", "running")
    worker.signal(signal.SIGTERM)
    assert await worker.wait() == 0
    events = Counter(event["kind"] for event in await fleet.rows.events(job_id))
    assert events["lost"] == events["released"] == 0
    assert await fleet.rows.connection.fetchval("SELECT count(*) FROM worker") == 0
    await fleet.worker()
    await fleet.finished(accepted["media_id"])


async def test_a_worker_told_to_stop_ends_although_a_handler_catches_its_cancel(fleet: Fleet) -> None:
    worker = await fleet.worker(pipelines="tests.worker.stubborn_steps:pipelines", drain_seconds=0)
    new = jobs.NewJob(stubborn, "t")
    await jobs.submit(fleet.rows.connection, [new])
    await worker.says("the stubborn handler has begun")
    worker.signal(signal.SIGTERM)
    assert await worker.wait() == 0
    assert "a handler runs on: the process ends without it" in worker.log.read_text()
    assert await fleet.rows.connection.fetchval("SELECT status FROM task WHERE job_id = $1", new.id) == "pending"


async def test_a_worker_with_no_time_to_finish_gives_its_leases_back(fleet: Fleet) -> None:
    await fleet.api_here()
    for _ in range(5):  # on a busy machine the step may end before the signal comes
        worker = await fleet.worker(drain_seconds=0)
        accepted = await fleet.send(PICTURE)
        job_id = UUID(accepted["job_id"])
        await fleet.reaches(job_id, "resize", "running")
        worker.signal(signal.SIGTERM)
        assert await worker.wait() == 0
        row = await fleet.rows.connection.fetchrow(
            "SELECT status, attempt FROM task WHERE job_id = $1 AND step = 'resize'", job_id
        )
        assert row is not None
        if row["status"] != "succeeded":
            break
    assert row is not None
    assert tuple(row) == ("pending", 0)  # and the attempt does not count
    await fleet.worker()
    await fleet.finished(accepted["media_id"])
    await fleet.assert_done_once(job_id)


async def test_workers_that_come_and_go_under_load_cost_no_task_an_attempt(fleet: Fleet) -> None:
    """What an autoscaler and every upgrade do: some of the work ends in time, and the rest is given back."""
    chance = random.Random(5)
    few: dict[str, Any] = {
        "worker_concurrency": 6,
        "worker_reserve": 0,
        "drain_seconds": 0.4,
        "worker_queues": "default",
    }
    rows = fleet.rows.connection

    async def load() -> None:
        lengths = [chance.choice((0.1, 1.5)) for _ in range(20)]
        await jobs.submit(rows, [jobs.NewJob(demo_long_task, "t", params={"seconds": one}) for one in lengths])

    async def done() -> bool:
        return not await rows.fetchval("SELECT count(*) FROM job WHERE finished_at IS NULL")

    async def was_given_back() -> bool:
        return bool(await rows.fetchval("SELECT max(epoch) > 1 FROM task"))

    await load()
    working = [await fleet.worker(**few)]
    for number in range(10):
        if number >= 3 and await was_given_back():
            break
        working.append(await fleet.worker(**few))
        leaving = working.pop(chance.randrange(2))
        await load()

        async def works(pid: int = leaving.pid) -> bool:
            held = await rows.fetchval(
                "SELECT count(*) FROM task t JOIN worker w ON w.id = t.lease_owner"
                " WHERE w.pid = $1 AND t.step = 'execute'",
                pid,
            )
            if held < 3 and await done():  # a busy machine may look too late
                await load()
            return bool(held >= 3)

        await fleet.until(works, leaving)
        leaving.signal(signal.SIGTERM)
        assert await leaving.wait() == 0

    await fleet.until(done, *working)
    spent = await rows.fetchrow(
        "SELECT max(attempt) AS attempt, max(losses) AS losses, max(errors) AS errors, max(epoch) AS epoch FROM task"
    )
    assert spent is not None
    assert (spent["attempt"], spent["losses"], spent["errors"]) == (1, 0, 0)
    assert spent["epoch"] > 1  # else nothing was ever given back, on a busy machine in ten times
    assert await rows.fetchval("SELECT count(*) FROM task WHERE status <> 'succeeded'") == 0


async def test_an_api_that_dies_after_it_committed_loses_no_job(fleet: Fleet) -> None:
    api = await fleet.api(failpoints="commit.completeUpload:kill")
    upload = await fleet.upload(PICTURE)
    with pytest.raises(Exception, match=r".*"):
        await fleet.call("POST", "/complete-upload", json=upload)
    assert await api.wait() == -signal.SIGKILL
    await fleet.api()
    await fleet.worker()
    await fleet.finished(upload["media_id"])
    again = await fleet.call("POST", "/complete-upload", json=upload)
    assert again.status_code == 202
    await fleet.assert_done_once(UUID(again.json()["job_id"]))


async def test_work_is_accepted_and_done_while_the_broker_is_down_and_fast_again_when_it_is_back(
    rabbitmq_node: BrokerNode, database_url: str, s3: Bucket, tmp_path: Path
) -> None:
    settings = Settings(
        database_url=database_url, amqp_url=rabbitmq_node.url, s3_endpoint=s3.endpoint, s3_bucket=s3.bucket,
        s3_access_key=s3.access_key, s3_secret_key=s3.secret_key, _env_file=None,
    )  # fmt: skip
    fleet = await open_fleet(settings, tmp_path)
    try:
        await fleet.api_here()
        worker = await fleet.worker()
        first = await fleet.send(PICTURE)
        await fleet.finished(first["media_id"])
        await rabbitmq_node.kill()
        while_down = [await fleet.send(PICTURE) for _ in range(3)]  # each answered 202
        for answer in while_down:
            await fleet.finished(answer["media_id"])
        await rabbitmq_node.start()
        await fleet.at_rest()  # the relay has published the hints that could not be sent
        after_return = await fleet.send(PICTURE)
        await fleet.finished(after_return["media_id"])
        for answer in (first, *while_down, after_return):
            await fleet.assert_done_once(UUID(answer["job_id"]))
        assert worker.process.returncode is None
    finally:
        await fleet.close()
        await fleet.rows.connection.close()
