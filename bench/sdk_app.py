"""The app that `sdk` measures."""

from __future__ import annotations

from datetime import datetime, timedelta

from leasehold import App, Context
from leasehold.pipelines.demo.pipeline import noop

app = App("sdk")
app.add(noop)  # a pipeline without the SDK, to compare the task with


@app.task
async def nothing() -> None: ...


async def nothing_here() -> None: ...


@app.workflow
async def checkpoints(ctx: Context, *, calls: int) -> None:
    for _ in range(calls):
        await ctx.call(nothing_here)


@app.workflow
async def children(ctx: Context, *, steps: int) -> None:
    for _ in range(steps):
        await ctx.run(nothing)


@app.workflow
async def spread(ctx: Context, *, steps: int) -> None:
    await ctx.gather(*(ctx.run(nothing) for _ in range(steps)))


@app.workflow
async def long(ctx: Context, *, calls: int) -> None:
    for _ in range(calls):
        await ctx.call(nothing_here)
    await ctx.wait_for("go")


@app.workflow
async def sleeper(ctx: Context, *, at: datetime | None = None) -> None:
    """Sleeps until `at`; without `at`, for a month."""
    await ctx.sleep(timedelta(days=30) if at is None else at - ctx.now())
