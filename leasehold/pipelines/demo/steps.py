"""The handlers of the pipelines `noop` and `demo_long_task`."""

from __future__ import annotations

import asyncio
from typing import Any

from leasehold.domain.attempt import Attempt
from leasehold.domain.verdicts import Done
from leasehold.pipelines.demo.pipeline import demo_long_task, noop

_TICK = 0.1  # seconds between two checkpoints of `execute`; at each checkpoint it reports its progress


@noop.handles("only")
async def only(_attempt: Attempt) -> Done:
    return Done()


@demo_long_task.handles("prepare")
async def prepare(attempt: Attempt) -> None:
    attempt.progress(100, "prepared")


@demo_long_task.handles("execute")
async def execute(attempt: Attempt) -> dict[str, Any]:
    ticks = round(attempt.params.seconds / _TICK)
    for tick in range(ticks):
        attempt.checkpoint()
        attempt.progress(100 * tick / ticks, f"{tick} of {ticks}")
        await asyncio.sleep(_TICK)
    return {"ticks": ticks}


@demo_long_task.handles("finalize")
async def finalize(_attempt: Attempt) -> dict[str, Any]:
    return {"finished": True}
