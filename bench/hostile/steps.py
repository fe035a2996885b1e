"""The handlers of the pipelines of this bench (bench/hostile/pipelines.py)."""

from __future__ import annotations

import asyncio

from bench.hostile.pipelines import burning, quiet, sleeping
from leasehold.domain.attempt import Attempt
from leasehold.domain.verdicts import Done
from leasehold.domain.work import Work


@quiet.handles("only")
async def only(_attempt: Attempt) -> None: ...


@sleeping.handles("sleep")
async def sleep(_attempt: Attempt) -> None:
    await asyncio.sleep(40)


@burning.handles("burn")
def burn(_work: Work) -> Done:
    memory = []
    while True:
        memory.append(bytearray(1024 * 1024))
        sum(range(100_000))
