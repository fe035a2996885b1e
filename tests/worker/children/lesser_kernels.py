"""Registries that, as a child asks for them, first take fences away from it, as another kernel would."""

from __future__ import annotations

import sys

from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines
from leasehold.domain.work import Work
from leasehold.worker.sandbox import fences, landlock, seccomp
from tests import scripted

beside = Pipeline("beside", module=__name__, steps=[Step("act", isolated=True)])


@beside.handles("act")
def act(_work: Work) -> None: ...


def without_landlock() -> Pipelines:
    landlock.version = lambda: 0
    return scripted.pipelines()


def without_filter() -> Pipelines:
    seccomp.MACHINES.clear()
    return scripted.pipelines()


def without_any() -> Pipelines:
    fences._leave_network = list
    seccomp.MACHINES.clear()
    return without_landlock()


def with_network_for_one() -> Pipelines:
    """Neither filter nor Landlock. The kernel gives a network namespace to the zygote of `beside` alone: say, it has
    reached its bound on namespaces then.
    """
    without_any()
    if sys.argv[-1] == "beside":  # what the zygote runs
        fences._leave_network = lambda: ["netns"]
    return Pipelines(scripted.scripted, beside)
