"""The pipelines that the bench adds to the shipped pipelines."""

from __future__ import annotations

from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines
from leasehold.pipelines import with_demonstrations

stamped = Pipeline("stamped", module="bench.steps", steps=[Step("only")])
twostep = Pipeline("twostep", module="bench.steps", steps=[Step("first"), Step("second", needs=("first",))])
threestep = Pipeline(
    "threestep",
    module="bench.steps",
    steps=[Step("first"), Step("second", needs=("first",)), Step("third", needs=("second",))],
)
#: Its job holds a slot for 50 ms.
napping = Pipeline("napping", module="bench.steps", steps=[Step("nap")])
#: For external workers, over HTTP.
outside = Pipeline("outside", module="bench.steps", steps=[Step("ask", queue="outside", external=True)])


def benched() -> Pipelines:
    pipelines = with_demonstrations()
    for pipeline in (stamped, twostep, threestep, napping, outside):
        pipelines.add(pipeline)
    return pipelines
