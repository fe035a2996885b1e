"""The step that a completion is about to claim, begun while what it reads is still being stored; and those after it
that read nothing else, beside it, for as many as there are idle children.

An isolated step is a function of its files and parameters, and changes nothing outside its directory. So it may run
before its lease is there: what it makes counts only for an attempt that holds the lease of that very step, with the
very same inputs; else it is thrown away. It saves a picture the time in which its child would wait for the store, and
on a worker with little to do that of its second step.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.verdicts import Done
from leasehold.transitions.claims import Claimed
from leasehold.worker.attempts.inputs import Source


def steps_after(pipeline: Pipeline, step: Step) -> list[Step]:
    """Those, in their order, that can be begun with nothing but what `step` read and made, and that nothing else stands
    before.
    """
    known, found = {step.name, *step.reads}, []
    one = _next(pipeline, step)
    while one is not None and set(one.reads) <= known:
        found.append(one)
        one = _next(pipeline, one)
    return found


def _next(pipeline: Pipeline, step: Step) -> Step | None:
    after = [other for other in pipeline.steps if step.name in other.needs]
    if len(after) != 1 or after[0].needs != (step.name,):
        return None
    (one,) = after
    may = one.isolated and one.queue == step.queue and one.skip_if is None and not one.external
    return one if may else None


@dataclass(slots=True)
class Speculation:
    """`begun_by`: the task that it comes after, or after whose next. `files`: what it reads, in its own `directory`.
    `sha256`: theirs, all of them once the task that made them has stored its outputs.
    """

    begun_by: UUID
    params: Mapping[str, Any]
    directory: Path
    files: Mapping[str, Path]
    sha256: dict[str, str]
    running: asyncio.Task[Done] = field(init=False)
    taken_by: UUID | None = field(default=None, init=False)
    _listener: Callable[[float, str], None] | None = field(default=None, init=False)

    def serves(self, claimed: Claimed, sources: list[Source]) -> bool:
        """Whether it is what this attempt would do."""
        return (
            claimed.lease.epoch == 1
            and claimed.handler is None
            and claimed.timeout_seconds is None
            and claimed.params == self.params
            and {source.name: source.sha256 for source in sources} == self.sha256
        )

    def take(self, claimed: Claimed, listener: Callable[[float, str], None]) -> None:
        """From now on it is this attempt's."""
        self.taken_by = claimed.lease.task_id
        self._listener = listener

    def progress(self, percent: float, summary: str) -> None:
        if self._listener is not None:
            self._listener(percent, summary)

    def begin(self, running: Coroutine[Any, Any, Done]) -> None:
        self.running = asyncio.create_task(running)
        self.running.add_done_callback(_look_at)

    def discard(self) -> None:
        """Nobody wants it: its child is killed."""
        self.running.cancel()
        self.running.add_done_callback(self._remove)

    def _remove(self, _running: asyncio.Task[Done]) -> None:
        asyncio.get_running_loop().run_in_executor(None, partial(shutil.rmtree, self.directory, ignore_errors=True))


def _look_at(running: asyncio.Task[Done]) -> None:
    """How it ended belongs to who takes it; if nobody does, nobody shall be told that nobody looked."""
    if not running.cancelled():
        running.exception()
