"""An inline and an isolated pipeline; in a zygote the registry comes late, or with handlers that do not load."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from pydantic import BaseModel

from leasehold.domain.attempt import Attempt
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines
from leasehold.domain.verdicts import Done
from leasehold.domain.work import Work

#: Seconds that loading takes, and that the inline step takes.
LATE = 2.0
LONG = 2.0
#: The name of a file in the folder of the workers' directories: `when_allowed` waits for it.
MAY_LOAD = "may-load"


class Params(BaseModel):
    long: bool = False


inline = Pipeline("late_inline", params=Params, module=__name__, steps=[Step("act", queue="late-inline")])
isolated = Pipeline("late_isolated", module=__name__, steps=[Step("act", queue="late-isolated", isolated=True)])


def pipelines() -> Pipelines:
    return Pipelines(inline, isolated)


def late() -> Pipelines:
    time.sleep(LATE)
    return pipelines()


def when_allowed() -> Pipelines:
    """For a test of what happens before: however slow the machine is, the handlers load only when the test says so."""
    work_dir = Path(sys.argv[sys.argv.index("--work-dir") + 1])
    while not (work_dir.parents[1] / MAY_LOAD).exists():
        time.sleep(0.02)
    return pipelines()


def unfit() -> Pipelines:
    """Also when the test says so: an attempt must run by then."""
    when_allowed()
    raise ImportError("a library is missing")


@inline.handles("act")
async def act_inline(attempt: Attempt) -> Done:
    if attempt.params.long:
        await asyncio.sleep(LONG)
    return Done()


@isolated.handles("act")
def act_isolated(work: Work) -> Done:
    return Done()
