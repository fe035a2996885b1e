"""Drives Procrastinate: PostgreSQL alone."""

import os
import sys

import procrastinate
import uvloop
from stamps import paced_async, record_wait

app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=os.environ["PEER_DATABASE_URL"]))


@app.task(name="noop")
async def noop():
    return None


@app.task(name="stamped")
async def stamped(submitted_at):
    record_wait(submitted_at)


async def main():
    async with app.open_async():
        if sys.argv[1] == "prepare":
            await app.schema_manager.apply_schema_async()
        elif sys.argv[1] == "submit":
            jobs = int(sys.argv[2])
            for start in range(0, jobs, 500):
                await noop.batch_defer_async(*({} for _ in range(min(500, jobs - start))))
        elif sys.argv[1] == "pace":
            async for now in paced_async(int(sys.argv[2]), float(sys.argv[3])):
                await stamped.defer_async(submitted_at=now)
        else:
            await app.run_worker_async(concurrency=20, install_signal_handlers=True)


uvloop.run(main())
