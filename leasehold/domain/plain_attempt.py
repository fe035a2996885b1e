"""The attempt that a plain inline handler receives: the methods of Attempt, each of which blocks the handler's thread.

A plain handler runs in one of the worker's threads (LEASEHOLD_WORKER_THREADS is their number), and a thread cannot be
interrupted. The worker ends the attempt once its time limit has passed, its job is cancelled or its lease is lost. But
the thread goes on, and another attempt may start meanwhile. The thread's next call of a method here raises Cancelled,
and the worker discards what the handler returns. So a long handler calls `checkpoint()` between two pieces of work.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from leasehold.domain.attempt import AttemptIdentity


class PlainAttempt(AttemptIdentity, Protocol):
    """One attempt at one step, for a handler that is a plain function. Each method does what the method of Attempt with
    the same name does.
    """

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, data: bytes, content_type: str, *, own: bool = False) -> None: ...

    def write_file(self, name: str, path: Path, content_type: str) -> None: ...

    def value(self, step: str) -> Any: ...

    def note(self) -> dict[str, Any]: ...

    def remember(self, note: Mapping[str, Any]) -> None: ...

    def item(self) -> Any: ...

    def joined(self) -> list[Any] | None: ...

    def progress(self, percent: float, summary: str = "") -> None: ...

    def emit(self, chunk: Any) -> bool: ...

    def checkpoint(self) -> None: ...

    def heartbeat(self) -> None: ...
