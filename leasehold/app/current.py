"""`current()` returns the attempt that runs the calling code. A task's function needs no parameter for it."""

from __future__ import annotations

import logging
from contextvars import ContextVar, Token
from pathlib import Path
from typing import Any
from uuid import UUID

from leasehold.domain.errors import LeaseholdError
from leasehold.domain.work import Work


class NotInTask(LeaseholdError):
    """`current()` was called outside of a task's attempt. Or an isolated task read a value that its sandbox does not
    have.
    """


class Current:
    """The attempt, as `current()` returns it.

    `attempt`: the platform's own object. Use it for methods that this class lacks. It is a Work in a task with
    `isolated=True`, a ProcessAttempt with `process=True`, a LocalAttempt in `task.local`, and otherwise a PlainAttempt,
    or for an `async def` an Attempt. For a Work, the properties `run_id`, `tenant` and `number` raise NotInTask,
    because the sandbox gets only the arguments.
    """

    def __init__(self, task: str, attempt: Any) -> None:
        self.task = task
        self.attempt = attempt

    @property
    def run_id(self) -> UUID:
        """The id of the run."""
        run_id: UUID = self._attempt_with("run_id").job_id
        return run_id

    @property
    def tenant(self) -> str:
        """The tenant of the run."""
        tenant: str = self._attempt_with("tenant").tenant_id
        return tenant

    @property
    def number(self) -> int:
        """The number of the attempt, from 1."""
        number: int = self._attempt_with("number").number
        return number

    @property
    def state(self) -> Any:
        """What the app's lifespan yielded in this worker. It is None without a lifespan, and in `task.local`. It is
        also None in a task with `process=True` or `isolated=True`, because the value cannot be sent to the task's
        process.
        """
        opened = None if isinstance(self.attempt, Work) else self.attempt.opened
        return None if opened is None else opened.state

    @property
    def log(self) -> Any:
        """A structlog logger whose lines name the run, the task and the attempt. In a task with `process=True` or
        `isolated=True`, it is a logger of `logging`, and the worker stores its lines with the run.
        """
        return logging.getLogger(self.task) if isinstance(self.attempt, Work) else self.attempt.log

    @property
    def directory(self) -> Path:
        """An empty directory of this attempt alone. It is deleted when the attempt has ended."""
        directory: Path = self.attempt.directory
        return directory

    def progress(self, percent: float, summary: str = "") -> None:
        """Report how far the task is, 0 to 100. Call it as often as you like, because only some reports are stored."""
        self.attempt.progress(percent, summary)

    def emit(self, chunk: Any) -> bool:
        """Append a chunk (a text, or another JSON value) to the run's stream. Clients follow the stream as it grows.
        Returns False if the attempt has emitted too much and the stream is cut. In a task with `process=True` or
        `isolated=True` it always returns True, because the worker sends no answer to the task's process.
        """
        return self.attempt.emit(chunk) is not False

    def checkpoint(self) -> None:
        """Raises Cancelled if a cancel of the run was requested, and LeaseLost if another worker may have the task."""
        self.attempt.checkpoint()

    def _attempt_with(self, member: str) -> Any:
        """The attempt, for a property of this class that needs more than a Work. Raises NotInTask if it is a Work."""
        if isinstance(self.attempt, Work):
            raise NotInTask(f"an isolated task does not know its {member}: give it what it needs as an argument")
        return self.attempt


_current: ContextVar[Current] = ContextVar("leasehold_current")


def current() -> Current:
    """The attempt that runs the calling code. Raises NotInTask if no attempt runs it."""
    try:
        return _current.get()
    except LookupError:
        raise NotInTask("current() works only in code that a task runs") from None


def enter(attempt: Current) -> Token[Current]:
    """From now on `current()` returns `attempt` in this context."""
    return _current.set(attempt)


def leave(token: Token[Current]) -> None:
    """Undo the `enter` that returned `token`."""
    _current.reset(token)
