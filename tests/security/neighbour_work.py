"""What floods and newcomers run in `test_neighbours`."""

from __future__ import annotations

import asyncio
import time

from pydantic import BaseModel, ConfigDict

from leasehold.domain.attempt import Attempt
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines
from leasehold.domain.verdicts import Done
from leasehold.domain.work import Work


class Takes(BaseModel):
    model_config = ConfigDict(extra="forbid")

    seconds: float = 0.0


_STEPS = [f"s{number:02}" for number in range(60)]

inline = Pipeline("inline", module=__name__, params=Takes, steps=[Step("only")])
chain = Pipeline(
    "chain",
    module=__name__,
    params=Takes,
    steps=[Step(name, needs=(before,) if before else ()) for before, name in zip(["", *_STEPS], _STEPS, strict=False)],
)
heavy = Pipeline("heavy", module=__name__, params=Takes, steps=[Step("only", queue="heavy", isolated=True)])
heavy_chain = Pipeline(
    "heavy_chain",
    module=__name__,
    params=Takes,
    steps=[
        Step(name, needs=(before,) if before else (), queue="heavy", isolated=True)
        for before, name in zip(["", *_STEPS], _STEPS, strict=False)
    ],
)


@inline.handles("only")
async def only(attempt: Attempt) -> None:
    await asyncio.sleep(attempt.params.seconds)


for _name in _STEPS:

    @chain.handles(_name)
    async def _(attempt: Attempt) -> None:
        await asyncio.sleep(attempt.params.seconds)

    @heavy_chain.handles(_name)
    def _(work: Work) -> Done:
        time.sleep(work.params.seconds)
        return Done()


@heavy.handles("only")
def heavy_only(work: Work) -> Done:
    time.sleep(work.params.seconds)
    return Done()


def pipelines() -> Pipelines:
    return Pipelines(inline, chain, heavy, heavy_chain)
