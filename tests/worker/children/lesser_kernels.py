"""Registries that, as a child asks for them, first take fences away from it, as another kernel would."""

from __future__ import annotations

from leasehold.domain.registry import Pipelines
from leasehold.worker.sandbox import fences, landlock, seccomp
from tests import scripted


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
