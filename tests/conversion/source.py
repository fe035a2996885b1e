"""The registry of these tests' children: the conversion pipeline alone."""

from __future__ import annotations

from leasehold.domain.registry import Pipelines
from leasehold.pipelines.conversion.pipeline import conversion


def pipelines() -> Pipelines:
    return Pipelines(conversion)
