"""The workflows of a chaos run. `stages` runs tasks one after another and side by side, draws a random value once,
sleeps, and waits for a signal. `takes_back` is cancelled while it waits, and undoes its draw.

They have a queue of their own, which workers of the release do not serve. The release has no workflows: in its
processes chaos/pipelines.py does not import this module.
"""

from __future__ import annotations

import asyncio
import uuid
from datetime import timedelta

from leasehold import App, Cancelled, Context, Retry

#: The signal that `stages` waits for, and how long it waits.
SIGNAL, SIGNAL_SECONDS = "go", 8.0
#: How long `takes_back` waits for its cancel.
_CANCEL_SECONDS = 20.0
_QUEUE = "chaos-workflows"
_BRIEF = 0.05
_NAP_SECONDS = 0.3
#: More attempts than the faults of a run can use up.
_RETRY = Retry(times=30, delay=timedelta(seconds=0.5))

app = App("chaos")


@app.task(queue=_QUEUE, retry=_RETRY)
async def plus_one(number: int) -> int:
    await asyncio.sleep(_BRIEF)
    return number + 1


def _drawn() -> str:
    return uuid.uuid4().hex


@app.workflow(queue=_QUEUE)
async def stages(ctx: Context, text: str) -> list[str]:
    first = await ctx.run(plus_one, 0)
    drawn = await ctx.call(_drawn)
    await ctx.sleep(_NAP_SECONDS)
    both = await ctx.gather(ctx.run(plus_one, first), ctx.run(plus_one, first + 1))
    try:
        await ctx.wait_for(SIGNAL, timeout=SIGNAL_SECONDS)
    except TimeoutError:  # because of the faults, the client could not send its signal in time
        text += ", unasked"
    last = await ctx.run(plus_one, sum(both))
    return [text, drawn, str(last)]


def put_back(drawn: str) -> str:
    """Undo the draw. The checker counts these calls (chaos/checks/cancels.py)."""
    return drawn


@app.workflow(queue=_QUEUE)
async def takes_back(ctx: Context, text: str) -> str:
    drawn = ""
    try:
        drawn = await ctx.call(_drawn)
        await ctx.gather(ctx.run(plus_one, 0), ctx.sleep(_NAP_SECONDS))
        await ctx.wait_for(SIGNAL, timeout=_CANCEL_SECONDS)
    except TimeoutError:  # because of the faults, the client could not send its cancel in time
        return text
    except Cancelled:
        await ctx.call(put_back, drawn)
        raise
    return text
