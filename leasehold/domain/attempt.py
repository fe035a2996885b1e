"""The attempt that an inline handler receives: its parameters, its inputs, and methods that write outputs.

An inline handler runs in the worker process. An `async def` runs in the worker's event loop: use it for steps that
mostly wait. A plain function runs in a thread and receives a PlainAttempt (plain_attempt.py). A step that computes, or
that parses bytes from outside, is declared `isolated` and receives a Work instead (work.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID


class AttemptIdentity(Protocol):
    """The properties that every inline attempt has, async or plain."""

    @property
    def job_id(self) -> UUID: ...

    @property
    def task_id(self) -> UUID: ...

    @property
    def tenant_id(self) -> str: ...

    @property
    def step(self) -> str: ...

    @property
    def is_part(self) -> bool:
        """Whether this step belongs to a job of another pipeline, because a workflow (`ctx.run`) or a template uses the
        step's code. Other steps of such a job may have the same code, and only `task_id` distinguishes them. (This has
        nothing to do with the parts of a fan-out.)
        """

    @property
    def number(self) -> int:
        """The number of this attempt, from 1. An attempt that snoozed, fanned out or was released does not count, so
        the next attempt has the same number.
        """

    @property
    def errors(self) -> int:
        """How many attempts have ended with an error or a timeout. Attempts whose worker was lost do not count. After a
        replay (a new try of a step that failed for good), the count begins at 0 again.
        """

    @property
    def params(self) -> Any:
        """An instance of the pipeline's params model."""

    @property
    def opened(self) -> Any:
        """The object that the pipeline's opener gave this worker. None without an opener (Pipeline.opens)."""

    @property
    def directory(self) -> Path:
        """An empty directory of this attempt alone. The worker deletes it when the attempt has ended."""

    @property
    def log(self) -> Any:
        """A structlog logger bound to the job, the task and the step."""


class Attempt(AttemptIdentity, Protocol):
    """One attempt at one step, for an `async def` handler."""

    def connection(self) -> AbstractAsyncContextManager[Any]:
        """Lend a connection of the worker's pool, for a statement or two. The connection leads to a server that takes
        writes. Leave the block before you wait for anything else, because other attempts need the connection.
        """

    async def read(self, name: str) -> bytes:
        """Read an input of the job, or an output of a step that this step needs. Raises ObjectMissing."""

    async def write(self, name: str, data: bytes, content_type: str, *, own: bool = False) -> None:
        """Store an output under a key that is the same in each attempt. Readers see the output once the step is
        committed.

        `own`: no other step of the job replaces this output. For a step of a template, the key then also has the step's
        name, because several steps of a template may have the same code, or code that writes the same name.
        """

    async def write_file(self, name: str, path: Path, content_type: str) -> None:
        """Store a file as `write` stores bytes. Memory stays flat, however large the file is."""

    async def value(self, step: str) -> Any:
        """The value that another step of this job returned when it succeeded, or None."""

    async def note(self) -> dict[str, Any]:
        """The note that this step last kept, in a Snooze (which asks to run later) or by `remember`. It is {} if there
        is no note.
        """

    async def remember(self, note: Mapping[str, Any], connection: Any = None) -> None:
        """Commit the note now. Every later attempt of the step sees it, even if this attempt dies immediately.

        `connection`: lent by `connection()`, with a transaction open. The note commits with that transaction, and only
        while this attempt has its lease, so the changes of the transaction happen once. Call `remember` last in the
        transaction, because it locks the task. Raises LeaseLost if another claim has the task by now. Then let the
        transaction roll back. Raises Permanent `bad_connection` for a connection that cannot write the note, such as
        one from a pool of your own.
        """

    async def item(self) -> Any:
        """The item on which this part works. (A step can fan out: it returns a FanOut, and each item becomes a part.)
        None for a step that is not a part.
        """

    async def joined(self) -> list[Any] | None:
        """The results of the parts that this step fanned out into, in the items' order. None before the fan-out."""

    def progress(self, percent: float, summary: str = "") -> None:
        """Report how far this step is, 0 to 100. Call it as often as you like: the worker stores only some reports."""

    def emit(self, chunk: Any) -> bool:
        """Append a chunk (a text, or another JSON value) to the job's stream. Clients read the stream as it grows.

        Returns False if the attempt has emitted too much, so that its stream is cut. Raises TypeError for a value
        without a JSON form, and ValueError for a value with a NUL character.
        """

    def checkpoint(self) -> None:
        """Raises Cancelled once a cancel of the job was requested, and LeaseLost once another claim has the task."""

    async def heartbeat(self) -> None:
        """A checkpoint that also lets other attempts of this worker run. The worker renews the lease by itself."""
