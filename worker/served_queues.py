"""Computes which queues a worker serves, and which of these queues need child processes, because they have isolated
steps (steps that run in a child process). `Worker` computes this once, at its start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from leasehold.domain.pipeline import Pipeline, unpinned_queue
from leasehold.domain.registry import Pipelines
from leasehold.domain.scaling import served_queues
from leasehold.settings import Settings
from leasehold.worker.sandbox.children import number_of_children


@dataclass(frozen=True, slots=True)
class ServedQueues:
    """The queues of one worker. `every`: all queues that the worker serves. `isolated`: the queues among them that have
    an isolated step.

    `isolated_pipelines`: the pipelines with a step in one of the queues and with an isolated step. `inline_pipelines`:
    the pipelines with a step in one of the queues and with an inline step (one that runs in the worker's own process).
    A pipeline may be in both. `slots`: queue -> how many attempts run at once in the slot pool that serves the queue.
    The queues of one pool share its slots.
    """

    every: frozenset[str]
    isolated: frozenset[str]
    isolated_pipelines: tuple[str, ...]
    inline_pipelines: tuple[str, ...]
    slots: Mapping[str, int]

    @property
    def inline(self) -> frozenset[str]:
        return self.every - self.isolated

    @classmethod
    def chosen(cls, pipelines: Pipelines, settings: Settings) -> Self:
        """The queues that the settings name. If they name none, all queues that the pipelines declare. For each queue
        and each label of the worker, the worker also serves the queue `QUEUE@LABEL`. Only workers with that label serve
        such a queue.
        """
        declared_queues = {step.queue for pipeline in pipelines for step in pipeline.steps}
        every = served_queues(frozenset(settings.queues or declared_queues), settings.labels)
        unpinned_queues = {unpinned_queue(queue) for queue in every}  # without the labels
        served_pipelines = [
            pipeline for pipeline in pipelines if any(step.queue in unpinned_queues for step in pipeline.steps)
        ]
        isolated_queues = {step.queue for pipeline in served_pipelines for step in pipeline.steps if step.isolated}
        return cls(
            every=every,
            isolated=frozenset(queue for queue in every if unpinned_queue(queue) in isolated_queues),
            isolated_pipelines=_names(served_pipelines, isolated=True),
            inline_pipelines=_names(served_pipelines, isolated=False),
            slots={
                queue: _slots(settings, served_pipelines, isolated_queues, unpinned_queue(queue)) for queue in every
            },
        )


def _names(pipelines: Iterable[Pipeline], *, isolated: bool) -> tuple[str, ...]:
    """The names of the pipelines that have an isolated step (or an inline step, if `isolated` is False)."""
    return tuple(pipeline.name for pipeline in pipelines if any(step.isolated == isolated for step in pipeline.steps))


def _slots(settings: Settings, served: Iterable[Pipeline], isolated: Collection[str], queue: str) -> int:
    """The number of slots of the slot pool that serves `queue`. A queue in `isolated` has as many slots as the worker
    has child processes. Otherwise, a pipeline in `served` with this queue may have slots of its own (`Pipeline.slots`
    is the name of the setting with their number). All other queues use one pool with `worker_concurrency` slots.
    """
    if queue in isolated:
        return number_of_children(settings)
    for pipeline in served:
        if pipeline.slots is not None and any(step.queue == queue for step in pipeline.steps):
            return int(getattr(settings, pipeline.slots))
    return settings.worker_concurrency
