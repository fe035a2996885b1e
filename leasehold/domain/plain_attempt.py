"""What the handler of an inline step is given that is a plain function: the attempt, whose methods block its thread.

A plain handler runs in a thread of the worker (`LEASEHOLD_WORKER_THREADS`). A thread cannot be interrupted: when the
time limit has passed, the job was asked to stop, or the lease is lost, the attempt ends without it, and another may
begin beside it. The handler hears of it at its next `checkpoint()`, or call of any other method here, by `Cancelled`;
what it returns is thrown away. So a long one calls `checkpoint()` between two pieces of work.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID


class PlainAttempt(Protocol):
    """As leasehold.domain.attempt.Attempt, which says what each of them means."""

    @property
    def job_id(self) -> UUID: ...

    @property
    def task_id(self) -> UUID: ...

    @property
    def tenant_id(self) -> str: ...

    @property
    def step(self) -> str: ...

    @property
    def number(self) -> int: ...

    @property
    def params(self) -> Any: ...

    @property
    def opened(self) -> Any: ...

    @property
    def directory(self) -> Path: ...

    @property
    def log(self) -> Any: ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, data: bytes, content_type: str) -> None: ...

    def write_file(self, name: str, path: Path, content_type: str) -> None: ...

    def value(self, step: str) -> Any: ...

    def note(self) -> dict[str, Any]: ...

    def remember(self, note: Mapping[str, Any]) -> None: ...

    def item(self) -> Any: ...

    def joined(self) -> list[Any] | None: ...

    def progress(self, percent: float, summary: str = "") -> None: ...

    def checkpoint(self) -> None: ...

    def heartbeat(self) -> None: ...
