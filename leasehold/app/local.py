"""The attempt of `task.local(...)`, which runs the function in the calling process, without a server."""

from __future__ import annotations

import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import UUID

from leasehold.domain.ids import new_id


class LocalAttempt:
    """An attempt without a worker. `number` is 1, because each local call is a new run. `errors` is 0: no attempt of
    the run has failed. `opened` (what the app's lifespan opened) is None: only a worker runs the lifespan. `reports`:
    (percent, summary) of each `progress`. `chunks`: what the function emitted.
    """

    number = 1
    errors = 0
    is_part = False
    opened = None

    def __init__(self, tenant: str) -> None:
        self.tenant_id = tenant
        self.job_id: UUID = new_id()
        self.task_id: UUID = new_id()
        self.reports: list[tuple[float, str]] = []
        self.chunks: list[Any] = []

    @property
    def log(self) -> Any:
        import structlog  # noqa: PLC0415 - declaring a task loads no logger

        return structlog.get_logger("leasehold.local")

    @cached_property
    def _folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="leasehold-", ignore_cleanup_errors=True)

    @property
    def directory(self) -> Path:
        return Path(self._folder.name)

    def progress(self, percent: float, summary: str = "") -> None:
        self.reports.append((float(percent), summary))

    def emit(self, chunk: Any) -> bool:
        self.chunks.append(chunk)
        return True

    def checkpoint(self) -> None:
        """Does nothing: nobody can cancel a local run."""

    def close(self) -> None:
        if "_folder" in self.__dict__:
            self._folder.cleanup()
