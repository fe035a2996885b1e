"""When a job was asked for, by who submits it, and how long it took from then to the first line of its handler."""

import asyncio
import os
import time
from pathlib import Path


def note(asked):
    waited = time.time() - asked
    with Path(os.environ["PEER_STAMPS"]).open("a") as stamps:
        stamps.write(f"{waited}\n")


def paced(jobs, rate):
    """Sleep, and give the time just before each submission."""
    began = time.monotonic()
    for number in range(jobs):
        time.sleep(max(0.0, began + number / rate - time.monotonic()))
        yield time.time()


async def paced_async(jobs, rate):
    began = time.monotonic()
    for number in range(jobs):
        await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
        yield time.time()
