"""What the workers of the proof serve: what is shipped, and steps that do as they are told."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from leasehold.domain.attempt import Attempt
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines
from leasehold.domain.verdicts import Done, Snooze
from leasehold.pipelines import shipped
from tests.scripted import scripted

#: A step that does not end, on a queue of its own; and one that snoozes once.
endless = Pipeline("endless", module="tests.telemetry.stack", steps=[Step("wait", queue="endless")])
snoozing = Pipeline("snoozing", module="tests.telemetry.stack", steps=[Step("poll")])


@endless.handles("wait")
async def wait(_attempt: Attempt) -> Done:
    await asyncio.Event().wait()
    return Done()


@snoozing.handles("poll")
async def poll(attempt: Attempt) -> Done | Snooze:
    return Done() if await attempt.note() else Snooze(timedelta(seconds=1), {"snoozed": True})


def pipelines() -> Pipelines:
    found = shipped()
    for pipeline in (scripted, endless, snoozing):
        found.add(pipeline)
    return found
