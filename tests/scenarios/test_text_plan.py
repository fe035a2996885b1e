"""Sections 12.4 to 12.6 of the testing plan for media: each test has the number of its section in its name.

test_media.py has sections 12.1 to 12.3: one picture, `complete-upload` repeated at once, and a repeated message.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import aio_pika
import pytest
from pydantic import SecretStr

from leasehold.broker import make_broker
from leasehold.broker.amqp.topology import Topology
from leasehold.broker.announcer import Announcer
from leasehold.db.database import Connection
from leasehold.embedded.rabbitmq import RabbitMQ
from leasehold.embedded.rabbitmq_install import install_rabbitmq
from leasehold.pipelines.demo.pipeline import noop
from leasehold.settings import Settings
from leasehold.transitions import jobs
from leasehold.transitions.jobs import NewJob
from tests.pictures import encoded, noisy
from tests.scenarios.fleet import Fleet, open_fleet
from tests.scenarios.long_step import long_step
from tests.support.broker_room import BROKER_ROOM

#: Workers that practically never poll: so a lost hint is not replaced by a poll. A worker that left a busy RabbitMQ
#: would poll when it is back, and a hint without a confirm would be sent again.
HINTS_ONLY: dict[str, Any] = {"poll_seconds": 3600, **BROKER_ROOM}
#: Seconds between two checks of RabbitMQ for deliveries older than the consumer timeout. Its default is a minute.
CHECK_SECONDS = 1
CONSUMER_TIMEOUT = 10
#: Seconds of the long step: longer than the lease (12 s), and the consumer timeouts of a delivery and a redelivery.
LONG_STEP = 30


async def test_12_4_a_worker_that_crashes_in_the_middle_of_a_step_is_replaced(fleet: Fleet) -> None:
    await fleet.api_here()
    victim = await fleet.worker(failpoints="mid_process:kill")
    accepted = await fleet.send(encoded(noisy(1200, 900), "JPEG", quality=85))
    assert await victim.wait() == -signal.SIGKILL
    await fleet.worker()
    await fleet.finished(accepted["media_id"])
    await fleet.assert_done_once(UUID(accepted["job_id"]))


async def submit(fleet: Fleet, made: Sequence[NewJob]) -> None:
    """Write the jobs, and wait until the broker has confirmed their hints."""

    async def on_connection(work: Callable[[Connection], Awaitable[None]]) -> None:
        await work(fleet.rows.connection)

    broker = make_broker(fleet.settings.model_copy(update=BROKER_ROOM))
    await broker.open()
    hints = await jobs.submit(fleet.rows.connection, made)
    async with asyncio.timeout(120):
        while not broker.connected or await Announcer(broker, on_connection).publish(hints) != len(hints):
            await asyncio.sleep(0.05)
    await broker.close()


@pytest.mark.parametrize(("module", "loses"), [("tests.scenarios.ack_first", True), ("worker", False)])
async def test_12_5_acknowledging_first_loses_a_task_and_committing_first_does_not(
    fleet: Fleet, module: str, loses: bool
) -> None:
    victim = await fleet.start(module, failpoints="after_hint:kill", **HINTS_ONLY)
    await asyncio.wait_for(victim.says('"serving"'), 60)
    other = await fleet.worker(**HINTS_ONLY)
    # A worker polls once when its queues are declared. That is over when its self-check ends.
    await asyncio.wait_for(other.says("self-check"), 60)
    made = [NewJob(noop, "t") for _ in range(6)]
    await submit(fleet, made)
    assert await victim.wait() == -signal.SIGKILL

    async def unfinished() -> int:
        states = [(await fleet.rows.job(job.id))["status"] for job in made]
        return len(made) - states.count("succeeded")

    async def none_is_left() -> bool:
        return await unfinished() == 0

    if not loses:
        await fleet.until(none_is_left)
    later = NewJob(noop, "t")
    await submit(fleet, [later])  # when this job is done, the worker has received all earlier hints

    async def later_is_done() -> bool:
        return bool((await fleet.rows.job(later.id))["status"] == "succeeded")

    await fleet.until(later_is_done)
    assert (await unfinished() > 0) is loses


@pytest.fixture
async def impatient_broker(run_directory: Path) -> AsyncIterator[RabbitMQ]:
    """A node that requeues deliveries that are not acknowledged in time."""
    limit = f"consumer_timeout = {CONSUMER_TIMEOUT * 1000}"
    # Not below `tmp_path`: each pytest that starts closes the directory of all their paths to the node's user.
    node = RabbitMQ(run_directory / "impatient-rabbitmq", await install_rabbitmq(), settings=(limit,))
    node.configure()
    interval = f"[{{rabbit, [{{channel_tick_interval, {CHECK_SECONDS * 1000}}}]}}].\n"
    (node.directory / "advanced.config").write_text(interval)  # rabbitmq.conf has no such option
    await node.start()
    yield node
    await node.kill()


async def until_consumed(settings: Settings, queue: str, *, by: int) -> None:
    """Wait until RabbitMQ has this number of consumers of the queue's normal band."""
    name = Topology(settings.amqp_queue_prefix, settings.amqp_queue_type).name_of(queue, 1)
    assert settings.amqp_url is not None
    async with await aio_pika.connect(settings.amqp_url.get_secret_value()) as connection, asyncio.timeout(60):
        channel = await connection.channel()
        while (await channel.declare_queue(name, passive=True)).declaration_result.consumer_count != by:
            await asyncio.sleep(0.1)


@pytest.mark.timeout(200)
async def test_12_6_a_step_longer_than_the_lease_and_the_consumer_timeout_finishes_once(
    settings: Settings, impatient_broker: RabbitMQ, tmp_path: Path
) -> None:
    fleet = await open_fleet(settings.model_copy(update={"amqp_url": SecretStr(impatient_broker.url)}), tmp_path)
    try:
        terms = {
            "pipelines": "tests.scenarios.long_step:pipelines",
            **HINTS_ONLY,  # the worker acknowledges the hint of a polled task at once
            "lease_seconds": 12,  # a busy machine may keep a renewal from its processor for seconds
            "renew_seconds": 2,
            "trust_margin_seconds": 1,
        }
        workers = [await fleet.worker(**terms) for _ in range(2)]
        for worker in workers:
            await asyncio.wait_for(worker.says("self-check"), 60)
        job = NewJob(long_step, "t", params={"seconds": LONG_STEP})
        await submit(fleet, [job])
        async with asyncio.timeout(LONG_STEP + 90):
            while (await fleet.rows.job(job.id))["status"] != "succeeded":
                assert all(worker.process.returncode is None for worker in workers)
                await asyncio.sleep(0.5)
        claims = Counter(event["step"] for event in await fleet.rows.events(job.id) if event["kind"] == "claimed")
        assert claims == {"only": 1}
        assert not [event for event in await fleet.rows.events(job.id) if event["kind"] in ("taken_over", "lost")]
        taken_back = [worker for worker in workers if "the queue is not consumed" in worker.log.read_text()]
        assert taken_back, "the broker never lost its patience: nothing was shown"
    finally:
        await fleet.close()
        await fleet.rows.connection.close()
