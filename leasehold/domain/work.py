"""`Work`: the attempt, as an isolated handler (a handler in a sandboxed child process) receives it. A Work has plain
files and parameters, and no connections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Any, Protocol

from leasehold.domain.errors import Cancelled
from leasehold.domain.result_limits import ResultLimits


def percent_of(value: float) -> float:
    """A step's progress in percent: `value`, limited to the range 0 to 100. NaN (0/0 in a handler's arithmetic) counts
    as 0.
    """
    number = float(value)
    return 0.0 if isnan(number) else min(max(number, 0.0), 100.0)


class Supervisor(Protocol):
    """The channel between a step's child process and the worker that started it. `progress` and `emit` send reports to
    the worker. `cancelled`: whether a cancel of the job was requested.
    """

    def progress(self, percent: float, summary: str) -> None: ...
    def emit(self, chunk: Any) -> None: ...
    def cancelled(self) -> bool: ...


class NoSupervisor:
    """The supervisor of a step that no worker runs, for example in a test. It drops reports and never cancels."""

    def progress(self, percent: float, summary: str) -> None: ...
    def emit(self, chunk: Any) -> None: ...
    def cancelled(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Work:
    """One attempt at one isolated step, inside its child process.

    `files`: the files that the step reads, by output or input name. The worker has downloaded and verified them.
    `directory`: empty, and used by this attempt alone. The handler writes its outputs there.
    `params`: an instance of the pipeline's params model.
    `item`: the item that this part works on, if another step fanned out into this step (verdicts.FanOut).
    `supervisor`: the channel to the worker.
    `result_limits`: the limits of the result of an app's task. None: no worker runs this attempt.
    """

    pipeline: str
    step: str
    params: Any
    files: Mapping[str, Path]
    directory: Path
    item: Any = None
    supervisor: Supervisor = field(default_factory=NoSupervisor, repr=False, compare=False)
    result_limits: ResultLimits | None = None

    def progress(self, percent: float, summary: str = "") -> None:
        """Report how far this step is, 0 to 100. Call this often if you like, because surplus reports are dropped."""
        self.supervisor.progress(percent, summary)

    def emit(self, chunk: Any) -> None:
        """Append a chunk (a text, or another JSON value) to the job's stream. Chunks beyond a limit are dropped."""
        self.supervisor.emit(chunk)

    def checkpoint(self) -> None:
        """Raises Cancelled once a cancel of the job was requested. Do not catch this error to clean up, because the
        worker deletes the attempt's files.
        """
        if self.supervisor.cancelled():
            raise Cancelled
