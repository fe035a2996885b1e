"""What the handler of an inline step is given: its parameters, its inputs, and a way to write outputs.

An inline handler is an `async def` that runs in the worker's own loop: for steps that mostly wait; or a plain function,
which runs in a thread with a PlainAttempt (plain_attempt.py). Steps that compute, or that parse bytes from outside, are
declared `isolated` (work.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID


class Attempt(Protocol):
    """One attempt at one step."""

    @property
    def job_id(self) -> UUID: ...

    @property
    def task_id(self) -> UUID: ...

    @property
    def tenant_id(self) -> str: ...

    @property
    def step(self) -> str: ...

    @property
    def number(self) -> int:
        """1 for the first attempt."""

    @property
    def params(self) -> Any:
        """An instance of the pipeline's params model."""

    @property
    def opened(self) -> Any:
        """What the pipeline's opener gave, once for this worker; None without one (leasehold.domain.pipeline.opens)."""

    @property
    def directory(self) -> Path:
        """An empty directory of this attempt's own, gone when it has ended."""

    def connection(self) -> AbstractAsyncContextManager[Any]:
        """Lend a connection of the pool, for a statement or two: give it back before you wait again."""

    async def read(self, name: str) -> bytes:
        """An input of the job, or an output of a step that this one needs. Raises ObjectMissing."""

    async def write(self, name: str, data: bytes, content_type: str) -> None:
        """Store an output under its deterministic key; it counts once the step is committed."""

    async def write_file(self, name: str, path: Path, content_type: str) -> None:
        """As `write`, from a file: memory stays flat however large it is."""

    async def value(self, step: str) -> Any:
        """The value that a step of this job succeeded with, or None."""

    async def note(self) -> dict[str, Any]:
        """What the last Snooze or `remember` of this step left, or {}."""

    async def remember(self, note: Mapping[str, Any]) -> None:
        """Write the note now: what the next attempt must know even if this one dies at any later moment.

        Raises LeaseLost when the task is another's meanwhile; a note that was written is seen by every later attempt.
        """

    async def item(self) -> Any:
        """Of a step that is a part: its item of the FanOut. Else None."""

    async def joined(self) -> list[Any] | None:
        """The results of the parts that this step spread into, in the items' order; None before it did."""

    @property
    def log(self) -> Any:
        """A structlog logger that knows the job, the task and the step."""

    def progress(self, percent: float, summary: str = "") -> None:
        """Say how far this step is, 0 to 100; as often as you like: only now and then is it written down."""

    def checkpoint(self) -> None:
        """Raises Cancelled once the job was asked to stop, and LeaseLost once the task is another worker's."""

    async def heartbeat(self) -> None:
        """A checkpoint that also gives other attempts of this worker a turn. Leases are renewed without it."""
