"""The workflows of a chaos run. One runs tasks one after another and side by side, draws a value once, naps, and waits
for a signal. The other is cancelled while it waits, and takes back what it has drawn.

Their queue is their own: a worker of the release that is out does not serve it. The module is loaded only where the
platform has workflows, because processes of that release load the kinds of work, too (chaos/pipelines.py).
"""

from __future__ import annotations

import asyncio
import uuid
from datetime import timedelta

from leasehold import App, Cancelled, Context, Retry

#: The signal that the workflow waits for, and for how many seconds.
SIGNAL, SIGNAL_SECONDS = "go", 8.0
#: So long `takes_back` waits to be cancelled.
_CANCEL_SECONDS = 20.0
_QUEUE = "chaos-workflows"
_BRIEF = 0.05
_NAP_SECONDS = 0.3
#: More attempts than a chaos run can cost a task.
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
    except TimeoutError:  # its client's signal met the faults
        text += ", unasked"
    last = await ctx.run(plus_one, sum(both))
    return [text, drawn, str(last)]


def put_back(drawn: str) -> str:
    """The checker looks for this call (chaos/checks/cancels.py)."""
    return drawn


@app.workflow(queue=_QUEUE)
async def takes_back(ctx: Context, text: str) -> str:
    drawn = ""
    try:
        drawn = await ctx.call(_drawn)
        await ctx.gather(ctx.run(plus_one, 0), ctx.sleep(_NAP_SECONDS))
        await ctx.wait_for(SIGNAL, timeout=_CANCEL_SECONDS)
    except TimeoutError:  # its client's cancel met the faults
        return text
    except Cancelled:
        await ctx.call(put_back, drawn)
        raise
    return text
