"""Drives pgqueuer: PostgreSQL alone; completions are gathered in memory and written in batches."""

import os
import sys

import asyncpg
import uvloop
from pgqueuer import AsyncpgDriver, PgQueuer, Queries
from stamps import paced_async, record_wait


async def main():
    connection = await asyncpg.connect(os.environ["PEER_DATABASE_URL"])
    driver = AsyncpgDriver(connection)
    if sys.argv[1] == "prepare":
        await Queries(driver).install()
    elif sys.argv[1] == "submit":
        jobs = int(sys.argv[2])
        for start in range(0, jobs, 1000):
            count = min(1000, jobs - start)
            await Queries(driver).enqueue(["noop"] * count, [None] * count, [0] * count)
    elif sys.argv[1] == "pace":
        async for now in paced_async(int(sys.argv[2]), float(sys.argv[3])):
            await Queries(driver).enqueue("stamped", str(now).encode(), 0)
    else:
        queue = PgQueuer(driver)

        @queue.entrypoint("noop")
        async def noop(job):
            return None

        @queue.entrypoint("stamped")
        async def stamped(job):
            record_wait(float(job.payload))

        await queue.run(batch_size=100)


uvloop.run(main())
