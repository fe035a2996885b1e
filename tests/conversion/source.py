"""The registry of these tests' children: the conversion pipeline alone."""

from __future__ import annotations

from leasehold.registry import Pipelines
from pipelines.conversion.pipeline import conversion


def pipelines() -> Pipelines:
    return Pipelines(conversion)
