"""Two steps without files. The first takes as long as the parameters say."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel

from leasehold.domain.attempt import Attempt
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines
from leasehold.domain.verdicts import Done


class Nap(BaseModel):
    seconds: float = 0.0


napping = Pipeline(
    "napping", params=Nap, module="tests.failover.work", steps=[Step("nap"), Step("wake", needs=("nap",))]
)


@napping.handles("nap")
async def nap(attempt: Attempt) -> Done:
    await asyncio.sleep(attempt.params.seconds)
    return Done()


@napping.handles("wake")
async def wake(_attempt: Attempt) -> Done:
    return Done()


def pipelines() -> Pipelines:
    return Pipelines(napping)
