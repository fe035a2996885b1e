"""What the handler of an inline step is given: its parameters, its inputs, and a way to write outputs.

An inline handler is an `async def` that runs in the worker's own loop: for steps that mostly wait. Steps that
compute, or that parse bytes from outside, are declared `isolated` (see leasehold.work).
"""

from __future__ import annotations

from typing import Any, Protocol
from uuid import UUID


class Attempt(Protocol):
    """One attempt at one step."""

    @property
    def job_id(self) -> UUID: ...

    @property
    def task_id(self) -> UUID: ...

    @property
    def step(self) -> str: ...

    @property
    def number(self) -> int:
        """1 for the first attempt."""

    @property
    def params(self) -> Any:
        """An instance of the pipeline's params model."""

    async def read(self, name: str) -> bytes:
        """An input of the job, or an output of a step that this one needs. Raises ObjectMissing."""

    async def write(self, name: str, data: bytes, content_type: str) -> None:
        """Store an output under its deterministic key; it counts once the step is committed."""

    async def note(self) -> dict[str, Any]:
        """What the last Park of this step left, or {}."""
