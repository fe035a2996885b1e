"""A pipeline that does nothing, to measure the platform itself: its one step costs only what the platform costs."""

from __future__ import annotations

from leasehold.pipeline import Pipeline, Step

noop = Pipeline("noop", module="pipelines.demo.steps", steps=[Step("only")])
