"""What the handler of an isolated step is given: plain files and parameters, nothing that reaches outside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from leasehold.domain.errors import Cancelled


class Supervisor(Protocol):
    """What a step's child process can say to, and hear from, the worker around it."""

    def progress(self, percent: float, summary: str) -> None: ...
    def cancelled(self) -> bool: ...


class Nobody:
    """Runs without a worker, such as in a test: nobody listens and nobody cancels."""

    def progress(self, percent: float, summary: str) -> None: ...
    def cancelled(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Work:
    """One attempt at one isolated step, inside its child process.

    `files`: what the step reads, already downloaded and checked, by output or input name. `directory`: empty and
    the attempt's own; outputs are written there. `params`: an instance of the pipeline's params model.
    """

    pipeline: str
    step: str
    params: Any
    files: Mapping[str, Path]
    directory: Path
    item: Any = None  # of a step that is a part: its item of the FanOut
    supervisor: Supervisor = field(default_factory=Nobody, repr=False, compare=False)

    def progress(self, percent: float, summary: str = "") -> None:
        """Say how far this step is, 0 to 100; as often as you like: only now and then is it passed on."""
        self.supervisor.progress(percent, summary)

    def checkpoint(self) -> None:
        """Raises Cancelled once the job was asked to stop: leave files as they are and let it through."""
        if self.supervisor.cancelled():
            raise Cancelled
