"""The pipelines of these tests: each handler does what its payload says."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import timedelta
from typing import Any

from pydantic import BaseModel, ConfigDict

from leasehold.domain.attempt import Attempt
from leasehold.domain.errors import Permanent, Retryable
from leasehold.domain.pipeline import Pipeline, RunTerms, SkipIf, Step
from leasehold.domain.registry import Pipelines
from leasehold.domain.verdicts import Done, FanOut, File
from leasehold.domain.work import Work
from leasehold.pipelines.webhooks.pipeline import webhooks


class Does(BaseModel):
    model_config = ConfigDict(extra="forbid")

    do: str = "finish"
    number: int = 0
    dry_run: bool = False
    numbers: list[int] = []


_SOON = (timedelta(milliseconds=10),)

scripted = Pipeline(
    "scripted",
    module="tests.runs.work",
    params=Does,
    steps=[Step("first", max_attempts=2, retry_ladder=_SOON), Step("second", needs=("first",), retry_ladder=_SOON)],
    terms=RunTerms(grace=timedelta(seconds=1)),
)
spread = Pipeline(
    "spread",
    module="tests.runs.work",
    params=Does,
    steps=[Step("gather"), Step("piece", part=True), Step("after", needs=("gather",))],
)
shards = Pipeline(
    "shards",
    module="tests.runs.work",
    params=Does,
    steps=[
        Step("cut"),
        Step("shard", part=True, queue="heavy", isolated=True, writes="shard.txt"),
        Step("after", needs=("cut",)),
    ],
)
branches = Pipeline(
    "branches",
    module="tests.runs.work",
    params=Does,
    steps=[
        Step("top"),
        Step("left", needs=("top",), skip_if=SkipIf("/dry_run")),
        Step("right", needs=("top",)),
        Step("bottom", needs=("left", "right")),
    ],
)
isolated = Pipeline(
    "isolated",
    module="tests.runs.work",
    params=Does,
    steps=[Step("count", queue="heavy", isolated=True, retry_ladder=_SOON)],
    terms=RunTerms(grace=timedelta(seconds=1)),
)


@scripted.handles("first")
async def first(attempt: Attempt) -> dict[str, Any] | None:
    match attempt.params.do:
        case "fail once" if attempt.number == 1:
            raise Retryable("not this time")
        case "fail":
            raise Permanent("broken", f"part {attempt.params.number} is broken")
        case "fail always":
            raise Retryable("never", code="unlucky")
        case "raise":
            raise RuntimeError("what nobody foresaw")
        case "work":
            for tick in range(600):
                attempt.checkpoint()
                attempt.progress(tick / 6, f"tick {tick}")
                await asyncio.sleep(0.05)
        case "hang":
            await asyncio.sleep(600)
        case "odd answer":
            return 7  # type: ignore[return-value]  # what a careless handler does
        case "no json":
            return {"set": {1, 2}}
    return {"attempt": attempt.number, "number": attempt.params.number}


@scripted.handles("second")
async def second(attempt: Attempt) -> None:
    if attempt.params.do == "let a CancelledError out":
        raise asyncio.CancelledError


@spread.handles("gather")
async def gather(attempt: Attempt) -> FanOut | dict[str, Any]:
    joined = await attempt.joined()
    if joined is None:
        return FanOut("piece", list(range(attempt.params.number)))
    if attempt.params.do == "spread twice":
        return FanOut("piece", [1])
    return {"sum": sum(one["square"] for one in joined)}


@spread.handles("piece")
async def piece(attempt: Attempt) -> dict[str, Any]:
    item = await attempt.item()
    if attempt.params.do == "fail" and item == 1:
        raise Permanent("broken", "piece 1 is broken")
    if attempt.params.do == "fail pieces":
        raise Retryable("never", code="unlucky")
    return {"square": item * item}


@spread.handles("after")
async def after(_attempt: Attempt) -> None: ...


@shards.handles("cut")
async def cut(attempt: Attempt) -> FanOut | dict[str, Any]:
    joined = await attempt.joined()
    return FanOut("shard", [f"cut {attempt.number}"]) if joined is None else {"shards": joined}


@shards.handles("shard")
def shard(work: Work) -> Done:
    path = work.directory / "shard.txt"
    path.write_text(work.item)
    return Done({"shard.txt": File(path, "text/plain")}, {"item": work.item})


@shards.handles("after")
async def after_shards(attempt: Attempt) -> None:
    if attempt.number == 1:
        raise Permanent("broken", "the first time")


for _name in ("top", "left", "right", "bottom"):

    @branches.handles(_name)
    async def _(_attempt: Attempt) -> None: ...


@isolated.handles("count")
def count(work: Work) -> Done:
    if work.params.do == "exit":
        os._exit(3)
    if work.params.do == "eat memory":
        bytearray(64 * 1024**3)
    if work.params.do == "work":
        for tick in range(600):
            work.checkpoint()
            work.progress(tick / 6, f"tick {tick}")
            time.sleep(0.05)
    return Done(value={"counted": work.params.number})


def pipelines() -> Pipelines:
    return Pipelines(scripted, spread, shards, branches, isolated)


def pipelines_and_webhooks() -> Pipelines:
    return Pipelines(scripted, spread, shards, branches, isolated, webhooks)
