"""An inline and an isolated pipeline, and registries that first take fences away, as another kernel would."""

from __future__ import annotations

from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines
from leasehold.worker.sandbox import fences, landlock, seccomp

inline = Pipeline("partly_inline", module="tests.security.partly_steps", steps=[Step("act", queue="partly-inline")])
isolated = Pipeline(
    "partly_isolated",
    module="tests.security.partly_steps",
    steps=[Step("act", queue="partly-isolated", isolated=True)],
)


def pipelines() -> Pipelines:
    return Pipelines(inline, isolated)


def without_landlock() -> Pipelines:
    landlock.version = lambda: 0
    return pipelines()


def without_filter() -> Pipelines:
    seccomp.MACHINES.clear()
    return pipelines()


def without_any() -> Pipelines:
    fences._leave_network = list
    seccomp.MACHINES.clear()
    return without_landlock()
