"""Speculative execution: while an attempt publishes its outputs, the worker already runs the next isolated steps.

So the next step does not wait for the uploads of the previous step. It starts before any attempt holds its lease. This
is safe, because an isolated step runs in a child process without network. Its result depends only on its files and
parameters, and the step changes nothing outside its directory. An attempt that holds the step's lease and has the same
inputs uses the result. Without such an attempt, the worker discards the result. If there is room for more runs, the
worker also runs steps after the next step. Such a step must read nothing that a step in between writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

from leasehold.domain.lease import Lease
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.verdicts import Done
from leasehold.telemetry.attempt_logs import Recorder, current
from leasehold.transitions.claims import Claimed
from leasehold.worker.attempts.directories import remove_later
from leasehold.worker.attempts.inputs import Source


def steps_after(pipeline: Pipeline, step: Step) -> list[Step]:
    """The steps after `step` that may start speculatively, in order. Each of them needs only the step before it, and
    reads only files that `step` read or wrote.
    """
    readable = {step.name, *step.reads}
    following: list[Step] = []
    candidate = _sole_dependent(pipeline, step)
    while candidate is not None and set(candidate.reads) <= readable:
        following.append(candidate)
        candidate = _sole_dependent(pipeline, candidate)
    return following


def _sole_dependent(pipeline: Pipeline, step: Step) -> Step | None:
    """The step that needs only `step`, if no other step needs `step`. Returns None if there is no such step, or if this
    worker must not run it speculatively.
    """
    dependents = [other for other in pipeline.steps if step.name in other.needs]
    if len(dependents) != 1 or dependents[0].needs != (step.name,):
        return None
    (dependent,) = dependents
    same_worker_may_run = dependent.isolated and dependent.queue == step.queue and not dependent.external
    return dependent if same_worker_may_run and dependent.skip_if is None else None


@dataclass(slots=True)
class Speculation:
    """One speculative execution.

    `bound_to`: the lease of an attempt. When this attempt ends, the worker discards the speculation. At first this is
    the attempt that started the speculation. While this worker goes on with the job, it is the attempt at the job's
    current step. From `take` on, it is the attempt that has taken the speculation.
    `files`: the inputs, in the speculation's own `directory`.
    `sha256`: the digests of the inputs. The digests are complete once the attempt that started the speculation has
    published its outputs (`complete_digests`).
    `running`: the asyncio task that runs the step.
    `owner_task`: the task whose attempt has taken the speculation; None before `take`.
    `recorder`: collects the lines that the handler logs, until an attempt takes the speculation.
    """

    bound_to: Lease
    params: Mapping[str, Any]
    directory: Path
    files: Mapping[str, Path]
    sha256: dict[str, str]
    running: asyncio.Task[Done] = field(init=False)
    owner_task: UUID | None = field(default=None, init=False)
    recorder: Recorder | None = None
    _on_progress: Callable[[float, str], None] | None = field(default=None, init=False)

    def fits(self, claimed: Claimed, sources: list[Source]) -> bool:
        """Whether this speculation does exactly the work of the attempt, with the same parameters and inputs."""
        # A speculation begins before the first claim of the step, so only the attempt of that claim (epoch 1) may use
        # it. It runs the code of the pipeline itself (no `handler`), with the time limit of the declared step (no
        # `timeout_seconds`). For a file that the client has uploaded, `source.sha256` is None. Then compare with the
        # digest of the bytes that the earlier step has read.
        return (
            claimed.lease.epoch == 1
            and claimed.handler is None
            and claimed.timeout_seconds is None
            and claimed.params == self.params
            and {source.name: source.sha256 or self.sha256.get(source.name) for source in sources} == self.sha256
        )

    def complete_digests(self, outputs: Mapping[str, str]) -> None:
        """Add the digests of those inputs that are among `outputs` (name -> sha256), the outputs of the attempt that
        started this speculation.
        """
        self.sha256 |= {name: sha256 for name, sha256 in outputs.items() if name in self.files}

    def take(self, claimed: Claimed, on_progress: Callable[[float, str], None]) -> None:
        """Give the speculation to the attempt. The attempt's log gets the lines that the speculation has logged so far.
        From now on, `on_progress` gets the speculation's progress.
        """
        recorder_of_attempt = current()
        if self.recorder is not None and recorder_of_attempt is not None:
            self.recorder.hand_over(recorder_of_attempt)
        self.owner_task, self.bound_to = claimed.lease.task_id, claimed.lease
        self._on_progress = on_progress

    def progress(self, percent: float, summary: str) -> None:
        if self._on_progress is not None:
            self._on_progress(percent, summary)

    def start(self, running: Coroutine[Any, Any, Done]) -> None:
        self.running = asyncio.create_task(running)
        self.running.add_done_callback(_mark_retrieved)

    def discard(self) -> None:
        """Kill the speculation's child, then remove its directory."""
        self.running.cancel()
        self.running.add_done_callback(lambda _running: remove_later(self.directory))


def _mark_retrieved(running: asyncio.Task[Done]) -> None:
    """Read the exception once. Otherwise asyncio warns of it if no attempt takes the speculation."""
    if not running.cancelled():
        running.exception()
