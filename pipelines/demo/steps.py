from __future__ import annotations

from leasehold.attempt import Attempt
from leasehold.verdicts import Done
from pipelines.demo.pipeline import noop


@noop.handles("only")
async def only(_attempt: Attempt) -> Done:
    return Done()
