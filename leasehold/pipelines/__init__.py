"""The kinds of work that ship with the platform: one folder each, and this one list."""

from __future__ import annotations

from importlib.util import find_spec

from leasehold.domain.registry import Pipelines
from leasehold.pipelines.conversion.pipeline import conversion
from leasehold.pipelines.demo.pipeline import demo_long_task, noop
from leasehold.pipelines.generation.pipeline import generation, withdrawal
from leasehold.pipelines.media.pipeline import media
from leasehold.pipelines.webhooks.pipeline import webhooks


def shipped() -> Pipelines:
    """Ours, and those of installed packages."""
    pipelines = Pipelines(media, webhooks, generation, withdrawal)
    if find_spec("onnxruntime") is not None:  # else a worker could not load the handlers: the extra `conversion`
        pipelines.add(conversion)
    pipelines.add_installed()
    return pipelines


def with_demonstrations() -> Pipelines:
    """As `shipped`, and what only shows or measures the platform: for `leasehold dev`, the demo and benchmarks. Whoever
    may start runs could hold slots with them for hours.
    """
    pipelines = shipped()
    pipelines.add(noop)
    pipelines.add(demo_long_task)
    return pipelines
