"""A task that no living worker has code for waits unharmed, and the explanation of its job says who is missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx2
import pytest

from leasehold import App, Context
from leasehold.app.calls import Call
from leasehold.db.database import Connection, connect
from leasehold.domain.ids import id_of_instant
from leasehold.settings import Settings
from leasehold.transitions import unknown_tasks, workers
from leasehold.worker.worker import Worker

SECONDS = 60.0


#: What its users deploy.
SHOP = App("shop")
#: An older release of it: there is no `add` yet.
OLDER_SHOP = App("shop")


@SHOP.task
async def add(number: int) -> int:
    return number + 1


@SHOP.workflow
async def order(ctx: Context, number: int) -> int:
    return await ctx.run(add, number)


@OLDER_SHOP.task
async def adds(number: int) -> int:
    return number


@pytest.fixture(autouse=True)
async def _submitting(settings: Settings) -> AsyncIterator[None]:
    SHOP.use(settings.model_copy(update={"tenant": "acme"}))
    yield
    await asyncio.to_thread(SHOP.close)


@asynccontextmanager
async def working(settings: Settings, folder: Path, app: App, **changes: Any) -> AsyncIterator[Worker]:
    quick = {"work_dir": str(folder), "poll_seconds": 0.05, "renew_seconds": 1.0} | changes
    async with Worker(settings.model_copy(update=quick), app.pipelines()) as worker:
        yield worker


async def reasons(client: httpx2.AsyncClient, job: UUID) -> list[dict[str, Any]]:
    answer = await client.get(f"/v1/jobs/{job}/explain")
    assert answer.status_code == 200, answer.text
    said: list[dict[str, Any]] = answer.json()["reasons"]
    return said


def call_made(at: datetime, number: int) -> Call[int]:
    """A call whose id is older than one that `submit` accepts."""
    return replace(add.call(number), id=id_of_instant(at))


async def put_off(rows: Connection, job: UUID) -> dict[str, Any]:
    """The first task of the job that waits: a worker without its code has claimed it."""
    async with asyncio.timeout(SECONDS):
        while not (row := await rows.fetchrow("SELECT * FROM task WHERE job_id = $1 AND status = 'waiting'", job)):
            await asyncio.sleep(0.02)
    return dict(row)


async def test_a_task_that_the_workers_of_its_queue_do_not_know_is_explained_and_done_by_one_that_does(
    client: httpx2.AsyncClient, rows: Connection, settings: Settings, tmp_path: Path
) -> None:
    async with working(settings, tmp_path / "older", OLDER_SHOP):
        job = (await add.asubmit(1)).id
        await put_off(rows, job)
        (unknown,) = await reasons(client, job)  # and it waits for no time
    assert (unknown["code"], unknown["task"], unknown["queue"]) == ("unknown_task", "shop.add", "default")
    assert unknown["message"] == (
        "No worker serves shop.add: no worker of the queue default has its code. No worker with the code of shop.add "
        "has been seen. The workers of this queue have similar tasks: shop.adds."
    )
    assert unknown["nearest"] == ["shop.adds"]

    async with working(settings, tmp_path / "newer", SHOP), asyncio.timeout(SECONDS):
        while not await rows.fetchval("SELECT finished_at IS NOT NULL FROM job WHERE id = $1", job):
            await asyncio.sleep(0.02)
    assert [reason["code"] for reason in await reasons(client, job)] == ["ended"]


async def test_being_put_off_by_workers_without_its_code_costs_a_task_no_attempt_and_ends_it_never(
    rows: Connection, settings: Settings, tmp_path: Path
) -> None:
    """More often than the task may fail or lose its worker. Between two claims each worker leaves it alone."""
    async with working(settings, tmp_path, OLDER_SHOP):
        job = (await add.asubmit(1)).id
        for epoch in range(1, 10):
            task = await put_off(rows, job)
            assert (task["epoch"], task["attempt"], task["errors"], task["losses"]) == (epoch, 0, 0, 0)
            assert task["available_at"] - datetime.now(UTC) > timedelta(seconds=20)
            await rows.execute(
                "UPDATE task SET status = 'retry', available_at = clock_timestamp() WHERE id = $1", task["id"]
            )
    async with working(settings, tmp_path, SHOP):
        assert await (await add.asubmit(2)).aresult() == 3
        await rows.execute("UPDATE task SET available_at = clock_timestamp() WHERE job_id = $1", job)
        assert await add.find(job).aresult() == 2


@pytest.mark.parametrize(
    ("age", "is_served", "seconds"),
    [
        (timedelta(days=300), False, 86_400),
        (timedelta(hours=2), False, 7200),
        (timedelta(0), False, 30),
        (timedelta(hours=2), True, 30),
    ],
)
async def test_a_task_that_no_worker_knows_is_put_off_for_longer_the_older_its_job_is(
    rows: Connection, settings: Settings, tmp_path: Path, age: timedelta, is_served: bool, seconds: int
) -> None:
    """Else its history would grow by two events each 30 seconds for ever."""
    if is_served:
        await workers.register(
            rows, uuid4(), host="h", pid=1, version="1", queues=["default"], handlers=["shop.add.run"]
        )
    (run,) = await add.asubmit_many([call_made(datetime.now(UTC) - age, 1)])
    job = run.id
    async with working(settings, tmp_path, OLDER_SHOP):
        task = await put_off(rows, job)
    event = await rows.fetchrow("SELECT at FROM history WHERE job_id = $1 ORDER BY seq DESC LIMIT 1", job)
    assert event is not None
    delay = (task["available_at"] - event["at"]).total_seconds()
    assert seconds - 1 <= delay <= seconds + 30.0


async def test_a_worker_that_gets_the_code_wakes_the_tasks_that_no_worker_knew_and_no_others(
    rows: Connection, settings: Settings, tmp_path: Path
) -> None:
    """However far they were put off. A task that its own handler put off since then waits for its time."""
    old = datetime.now(UTC) - timedelta(days=2)
    async with working(settings, tmp_path / "older", OLDER_SHOP):
        runs = await add.asubmit_many([call_made(old + timedelta(seconds=n), n) for n in range(3)])
        for run in runs:
            await put_off(rows, run.id)
    assert await rows.fetchval("SELECT count(*) FROM unknown_task") == 3
    await rows.execute("UPDATE task SET epoch = epoch + 1 WHERE job_id = $1", runs[2].id)
    async with working(settings, tmp_path / "newer", SHOP):
        assert [await run.aresult() for run in runs[:2]] == [1, 2]
    assert await rows.fetchval("SELECT count(*) FROM unknown_task WHERE task_id IN (SELECT id FROM task"
                               " WHERE job_id <> $1)", runs[2].id) == 0  # fmt: skip
    snoozing = await put_off(rows, runs[2].id)
    assert snoozing["available_at"] - datetime.now(UTC) > timedelta(hours=20)


async def test_a_worker_with_the_code_takes_the_task_beside_workers_without_it_that_poll_more_often(
    rows: Connection, settings: Settings, tmp_path: Path
) -> None:
    """As in a rolling update. Its own polls come after an hour."""
    async with working(settings, tmp_path / "older", OLDER_SHOP):
        job = (await add.asubmit(1)).id
        await put_off(rows, job)
        async with working(settings, tmp_path / "newer", SHOP, poll_seconds=3600.0) as newer:
            (duty,) = (loop for name, loop in newer.parts.loops.items() if "unknown_tasks" in name)
            pause = 0.2
            async with asyncio.timeout(SECONDS):
                while not await rows.fetchval("SELECT finished_at IS NOT NULL FROM job WHERE id = $1", job):
                    turn = asyncio.create_task(duty())  # a turn begins at once, and not after half a minute
                    await asyncio.sleep(pause)
                    turn.cancel()
                    await asyncio.wait([turn])
                    pause = min(2 * pause, 5.0)  # on a busy machine PostgreSQL may not have answered by then
        assert await add.find(job).aresult() == 2
    claims = await rows.fetchval("SELECT count(*) FROM history WHERE job_id = $1 AND kind = 'claimed'", job)
    assert claims <= 10  # a poll of theirs may come first, now and then


async def test_a_worker_that_drains_or_serves_other_queues_wakes_no_unknown_task(
    rows: Connection, settings: Settings, tmp_path: Path
) -> None:
    async with working(settings, tmp_path, OLDER_SHOP):
        job = (await add.asubmit(1)).id
        task = await put_off(rows, job)
    draining, other = uuid4(), uuid4()
    for worker, queue in ((draining, "default"), (other, "mail")):
        await workers.register(rows, worker, host="h", pid=1, version="1", queues=[queue], handlers=["shop.add.run"])
    await workers.ask_to_drain(rows, draining)
    assert await unknown_tasks.wake_known(rows, draining, ["default"], ["shop.add.run"], 10) == ([], False)
    assert await unknown_tasks.wake_known(rows, other, ["mail"], ["shop.add.run"], 10) == ([], False)
    assert await unknown_tasks.wake_known(rows, other, ["default"], ["shop.adds.run"], 10) == ([], False)
    assert (await put_off(rows, job))["available_at"] == task["available_at"]


async def test_a_step_of_a_workflow_that_no_worker_of_its_queue_knows_is_named(
    client: httpx2.AsyncClient, rows: Connection
) -> None:
    """The step is of the workflow's job, and its code of another task."""
    job = (await order.asubmit(1)).id
    await workers.register(rows, uuid4(), host="h", pid=1, version="1", queues=["default"], handlers=["shop.add.run"])
    (reason,) = await reasons(client, job)
    assert (reason["code"], reason["task"]) == ("unknown_task", "shop.order")
    await rows.execute("UPDATE task SET handler = 'shop.add.run' WHERE job_id = $1", job)
    (reason,) = await reasons(client, job)
    assert reason["code"] == "behind_others"


async def test_when_a_worker_with_its_code_was_last_there_outlives_the_worker(
    client: httpx2.AsyncClient, rows: Connection, settings: Settings, tmp_path: Path
) -> None:
    job = (await add.asubmit(1)).id
    (reason,) = await reasons(client, job)
    assert reason["code"] == "no_worker"
    assert "last_seen" not in reason
    assert reason["message"] == (
        "No worker serves the queue default. No worker with the code of shop.add has been seen."
    )
    async with working(settings, tmp_path, SHOP):
        await add.find(job).aresult()
    job = (await add.asubmit(1)).id
    (reason,) = await reasons(client, job)
    seen = datetime.fromisoformat(reason["last_seen"])
    assert datetime.now(UTC) - seen < timedelta(minutes=2)
    assert reason["message"] == (
        "No worker serves the queue default. A worker with the code of shop.add was last seen at"
        f" {seen.isoformat(timespec='seconds')}."
    )


async def test_workers_that_have_its_code_and_serve_other_queues_are_told_of(
    client: httpx2.AsyncClient, settings: Settings, tmp_path: Path
) -> None:
    async with working(settings, tmp_path, SHOP, worker_queues="mail"):
        job = (await add.asubmit(1)).id
        (reason,) = await reasons(client, job)
    assert reason["message"] == (
        "No worker serves the queue default. Workers that have the code of shop.add serve other queues."
    )


async def test_a_worker_of_an_older_release_of_the_platform_may_know_every_task(
    client: httpx2.AsyncClient, rows: Connection
) -> None:
    job = (await add.asubmit(1)).id
    await workers.register(rows, uuid4(), host="h", pid=1, version="0", queues=["default"])
    (reason,) = await reasons(client, job)
    assert reason["code"] == "behind_others"
    many = [f"shop.t{number}.run" for number in range(workers.MAX_HANDLERS + 1)]
    crowded = uuid4()
    await workers.register(rows, crowded, host="h", pid=1, version="1", queues=["default"], handlers=many)
    assert await rows.fetchval("SELECT handlers FROM worker WHERE id = $1", crowded) is None


async def test_a_worker_that_died_or_drains_does_not_serve(
    client: httpx2.AsyncClient, rows: Connection, settings: Settings
) -> None:
    job = (await add.asubmit(1)).id
    worker, session = uuid4(), await connect(settings, "worker")
    key = await workers.register(
        rows, worker, host="h", pid=1, version="1", queues=["default"], handlers=["shop.add.run"]
    )
    assert await workers.appear(session, worker, key)
    (reason,) = await reasons(client, job)
    assert reason["code"] == "behind_others"
    await rows.execute("UPDATE worker SET draining = true")
    assert (await reasons(client, job))[0]["code"] == "no_worker"
    await rows.execute("UPDATE worker SET draining = false")
    await session.close()
    async with asyncio.timeout(SECONDS):  # PostgreSQL drops the lock when the session has ended
        while (await reasons(client, job))[0]["code"] != "no_worker":
            await asyncio.sleep(0.02)
    assert "last_seen" in (await reasons(client, job))[0]


async def test_the_handlers_of_workers_that_ended_are_remembered_once_and_forgotten_after_ninety_days(
    rows: Connection,
) -> None:
    async def names() -> dict[str, timedelta]:
        found = await rows.fetch("SELECT name, clock_timestamp() - seen_at AS age FROM known_handler")
        return {row["name"]: row["age"] for row in found}

    silent, ended = uuid4(), uuid4()
    for worker, handlers in ((silent, ["a.b", "a.c"]), (ended, ["a.c", "a.d"])):
        await workers.register(rows, worker, host="h", pid=1, version="1", queues=["q"], handlers=handlers)
    await rows.execute("UPDATE worker SET seen_at = seen_at - interval '1 day' WHERE id = $1", silent)
    await workers.unregister(rows, ended)
    await workers.forget_workers(rows, 3600.0)
    ages = await names()
    assert ages.keys() == {"a.b", "a.c", "a.d"}
    assert ages["a.b"] > timedelta(hours=23)
    assert ages["a.c"] < timedelta(hours=1)  # the later of the two
    await rows.execute("UPDATE known_handler SET seen_at = seen_at - interval '89 days 1 hour' WHERE name <> 'a.d'")
    await workers.forget_handlers(rows)
    assert (await names()).keys() == {"a.c", "a.d"}
    await rows.execute(
        "INSERT INTO known_handler SELECT 'x.s' || n, clock_timestamp() + n * interval '1 ms'"
        " FROM generate_series(1, 10000) AS n"
    )
    await workers.forget_handlers(rows)
    assert len(await names()) == 10_000
    assert not {"a.c", "a.d"} & (await names()).keys()


async def test_the_code_that_another_worker_lacked_is_named_and_not_that_of_the_step(
    client: httpx2.AsyncClient, rows: Connection
) -> None:
    """As of a chain of Celery's: each worker has the workflow that runs the calls, but not the task of each call."""

    async def register(*handlers: str) -> None:
        await workers.register(rows, uuid4(), host="h", pid=1, version="1", queues=["default"], handlers=handlers)

    job = (await order.asubmit(1)).id
    await rows.execute("UPDATE task SET status = 'waiting', available_at = now() + interval '1 hour'")
    needed = "shop.add.run, shop.pay.run"
    await rows.execute("INSERT INTO unknown_task SELECT id, epoch, queue, $1 FROM task", needed)
    (reason,) = await reasons(client, job)
    assert (reason["code"], reason["task"]) == ("no_worker", "shop.add, shop.pay")

    await register("shop.order.run", "shop.add.run")
    (reason,) = await reasons(client, job)
    assert (reason["code"], reason["task"]) == ("unknown_task", "shop.pay")
    assert reason["message"].startswith("No worker serves shop.pay: no worker of the queue default has its code.")

    await register("shop.order.run", "shop.pay.run")
    (reason,) = await reasons(client, job)
    assert (reason["code"], reason["task"], reason["message"]) == (
        "unknown_task", "shop.add, shop.pay",
        "No worker of the queue default has the code of all these tasks, which run needs: shop.add, shop.pay.",
    )  # fmt: skip

    await register("shop.pay.run", "shop.order.run", "shop.add.run")
    (reason,) = await reasons(client, job)
    assert reason["code"] == "behind_others"
