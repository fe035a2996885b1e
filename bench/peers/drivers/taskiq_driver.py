"""Drives Taskiq: RabbitMQ by aio-pika, results in PostgreSQL, ACK once the result is saved."""

import asyncio
import os
import sys

from stamps import paced_async, record_wait
from taskiq_aio_pika import AioPikaBroker
from taskiq_pg.asyncpg import AsyncpgResultBackend

PROCESSES = os.environ["PEER_PROCESSES"]

broker = AioPikaBroker(os.environ["PEER_AMQP_URL"], qos=100).with_result_backend(
    AsyncpgResultBackend(dsn=os.environ["PEER_DATABASE_URL"], keep_results=True)
)


@broker.task(task_name="noop")
async def noop():
    return None


@broker.task(task_name="stamped")
async def stamped(submitted_at):
    record_wait(submitted_at)


async def submit(jobs):
    await broker.startup()
    limit = asyncio.Semaphore(100)

    async def one():
        async with limit:
            await noop.kiq()

    await asyncio.gather(*(one() for _ in range(jobs)))
    await broker.shutdown()


async def pace(jobs, rate):
    await broker.startup()
    async for now in paced_async(jobs, rate):
        await stamped.kiq(now)
    await broker.shutdown()


if __name__ == "__main__":
    if sys.argv[1] in ("prepare", "submit"):
        asyncio.run(submit(int(sys.argv[2]) if sys.argv[1] == "submit" else 0))
    elif sys.argv[1] == "pace":
        asyncio.run(pace(int(sys.argv[2]), float(sys.argv[3])))
    else:
        os.chdir(os.path.dirname(os.path.abspath(__file__)))
        os.execv(sys.executable, [sys.executable, "-m", "taskiq", "worker", "taskiq_driver:broker",
                                  "--workers", PROCESSES, "--ack-type", "when_saved",
                                  "--log-level", "ERROR"])  # fmt: skip
