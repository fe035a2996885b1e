"""What the bench adds to the shipped pipelines: a step that says when its handler started."""

from __future__ import annotations

from leasehold.pipeline import Pipeline, Step
from leasehold.registry import Pipelines
from pipelines import shipped

stamped = Pipeline("stamped", module="bench.steps", steps=[Step("only")])


def benched() -> Pipelines:
    pipelines = shipped()
    pipelines.add(stamped)
    return pipelines
