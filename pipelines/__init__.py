"""The kinds of work that ship with the platform: one folder each, and this one list."""

from __future__ import annotations

from leasehold.registry import Pipelines
from pipelines.demo.pipeline import demo_long_task, noop
from pipelines.media.pipeline import media
from pipelines.webhooks.pipeline import webhooks


def shipped() -> Pipelines:
    """Ours, and those of installed packages."""
    pipelines = Pipelines(media, noop, demo_long_task, webhooks)
    pipelines.add_installed()
    return pipelines
