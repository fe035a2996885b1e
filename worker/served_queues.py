"""Which queues a worker serves, and which of them need child processes. `Worker` computes it once, at its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from leasehold.domain.pipeline import pinned_queue, unpinned_queue
from leasehold.domain.registry import Pipelines
from leasehold.settings import Settings


@dataclass(frozen=True, slots=True)
class ServedQueues:
    """The queues of one worker. `every`: all queues that the settings choose. `isolated`: the queues among them that
    have an isolated step.

    `isolated_pipelines`: the pipelines with a step in one of the queues and with an isolated step. `inline_pipelines`:
    the same, with an inline step. A pipeline may be in both.
    """

    every: frozenset[str]
    isolated: frozenset[str]
    isolated_pipelines: tuple[str, ...]
    inline_pipelines: tuple[str, ...]

    @property
    def inline(self) -> frozenset[str]:
        return self.every - self.isolated

    @classmethod
    def chosen(cls, pipelines: Pipelines, settings: Settings) -> Self:
        """The queues that the settings name; if they name none, all queues that the pipelines declare. The queues that
        are pinned to a label of the worker are added.
        """
        declared = {step.queue for pipeline in pipelines for step in pipeline.steps}
        named = frozenset(settings.queues or declared)
        pinned = {pinned_queue(queue, label) for queue in named for label in settings.labels if "@" not in queue}
        every = named | pinned
        unpinned = {unpinned_queue(queue) for queue in every}
        served = [pipeline for pipeline in pipelines if any(step.queue in unpinned for step in pipeline.steps)]
        isolated_queues = {step.queue for pipeline in served for step in pipeline.steps if step.isolated}
        return cls(
            every=every,
            isolated=frozenset(queue for queue in every if unpinned_queue(queue) in isolated_queues),
            isolated_pipelines=tuple(p.name for p in served if any(step.isolated for step in p.steps)),
            inline_pipelines=tuple(p.name for p in served if not all(step.isolated for step in p.steps)),
        )
