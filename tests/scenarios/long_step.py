"""A pipeline of one long step. The step's hint from the broker stays unacknowledged until the step ends."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from pydantic import BaseModel

from leasehold.domain.attempt import Attempt
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines


class Seconds(BaseModel):
    seconds: float


long_step = Pipeline(
    "long_step",
    module="tests.scenarios.long_step",
    params=Seconds,
    steps=[Step("only", timeout=timedelta(minutes=10))],
)


@long_step.handles("only")
async def only(attempt: Attempt) -> None:
    await asyncio.sleep(attempt.params.seconds)


def pipelines() -> Pipelines:
    return Pipelines(long_step)
