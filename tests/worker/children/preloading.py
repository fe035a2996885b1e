"""A pipeline whose libraries load after the zygote is ready."""

from __future__ import annotations

import sys

from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines
from leasehold.domain.verdicts import Done
from leasehold.domain.work import Work

STOPPING = "tests.worker.children.stopping_library"
BROKEN = "tests.worker.children.broken_library"

preloading = Pipeline(
    "preloading",
    module=__name__,
    steps=[Step("look", isolated=True)],
    preload=(BROKEN, "tests.no_such_library", STOPPING),
)


def pipelines() -> Pipelines:
    return Pipelines(preloading)


@preloading.handles("look")
def look(_work: Work) -> Done:
    return Done(value={"stopping": STOPPING in sys.modules, "broken": BROKEN in sys.modules})
