"""Paces submissions, and appends to the file PEER_STAMPS how long each job waited for its handler. The drivers use it
for the figure `delays` (bench/peers/delays.py).
"""

import asyncio
import os
import time
from pathlib import Path


def record_wait(submitted_at):
    """Write how long the job waited. The job's handler calls this first."""
    waited = time.time() - submitted_at
    with Path(os.environ["PEER_STAMPS"]).open("a") as stamps:
        stamps.write(f"{waited}\n")


def paced(jobs, rate):
    """Yield the time just before each submission, at a steady pace."""
    began = time.monotonic()
    for number in range(jobs):
        time.sleep(max(0.0, began + number / rate - time.monotonic()))
        yield time.time()


async def paced_async(jobs, rate):
    began = time.monotonic()
    for number in range(jobs):
        await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
        yield time.time()
