"""The pipelines of the honest and the hostile tenants."""

from __future__ import annotations

from datetime import timedelta

from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines
from leasehold.pipelines import shipped

#: The honest tenant's pipeline.
quiet = Pipeline("quiet", module="bench.hostile.steps", steps=[Step("only")])
#: Its step holds an inline slot for 40 s.
sleeping = Pipeline("sleeping", module="bench.hostile.steps", steps=[Step("sleep")])
#: Its step uses all processor time and memory that a child process may have.
burning = Pipeline(
    "burning",
    module="bench.hostile.steps",
    steps=[Step("burn", queue="burning", isolated=True, max_attempts=1, timeout=timedelta(seconds=5))],
)


def benched() -> Pipelines:
    pipelines = shipped()
    for pipeline in (quiet, sleeping, burning):
        pipelines.add(pipeline)
    return pipelines
