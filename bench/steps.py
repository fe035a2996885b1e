"""The handlers of the bench's pipelines (bench/pipelines.py)."""

from __future__ import annotations

import asyncio
import time

from bench.pipelines import napping, stamped, threestep, twostep
from leasehold.domain.attempt import Attempt
from leasehold.domain.verdicts import Done


@stamped.handles("only")
async def only(_attempt: Attempt) -> Done:
    """Record when the handler began. The submitter runs on the same machine, so it has the same clock."""
    return Done(value={"handler_at": time.time()})


@twostep.handles("first")
async def first(_attempt: Attempt) -> None: ...


@twostep.handles("second")
async def second(_attempt: Attempt) -> None: ...


@threestep.handles("first")
@threestep.handles("second")
@threestep.handles("third")
async def one_of_three(_attempt: Attempt) -> None: ...


@napping.handles("nap")
async def nap(_attempt: Attempt) -> None:
    await asyncio.sleep(0.05)
