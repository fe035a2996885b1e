"""The attempt for `task.local(...)`, a call that runs the function in the calling process, without a server."""

from __future__ import annotations

import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import UUID

import orjson
from pydantic_core import from_json, to_json

from leasehold.app.process_frames import json_of
from leasehold.app.terms import STEP, TaskTerms
from leasehold.domain.ids import new_id
from leasehold.domain.work import Work
from leasehold.telemetry.emissions import encoded_chunk


class LocalAttempt:
    """An attempt without a worker. `number` is 1, because each local call is a new run. `errors` is 0, because no
    attempt of the run has failed. `opened` (what the app's lifespan opened) is None, because only a worker runs the
    lifespan. `reports`: (percent, summary) of each call of `progress`. `chunks`: the chunks that the function emitted,
    as the run's stream would contain them.
    """

    number = 1
    errors = 0
    is_part = False  # the step belongs to the task's own pipeline, not to a workflow or a template
    opened = None

    def __init__(self, tenant: str, terms: TaskTerms | None = None) -> None:
        self.tenant_id = tenant
        self._terms = terms or TaskTerms()
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
        """Add the chunk to `chunks`. Raises TypeError or ValueError for a value that is no chunk, as `emit` in a worker
        does. The chunk of a `process` or `isolated` task is first converted to JSON and back, because in a worker its
        child process sends it as JSON.
        """
        if self._terms.process:
            chunk = orjson.loads(json_of(chunk))
        elif self._terms.isolated:
            chunk = from_json(to_json(chunk, inf_nan_mode="null"))
        self.chunks.append(orjson.loads(encoded_chunk(chunk))["chunk"])
        return True

    def checkpoint(self) -> None:
        """Does nothing, because nobody can cancel a local run."""

    def cancelled(self) -> bool:
        return False

    def given(self, task: str, params: Any) -> Any:
        """What the function gets as `current().attempt`. For an isolated task it is a Work, because the sandbox gets
        only the arguments. For any other task it is this attempt.
        """
        if not self._terms.isolated:
            return self
        return Work(task, STEP, params, files={}, directory=self.directory, supervisor=self)  # type: ignore[arg-type]  # its `emit` returns more

    def close(self) -> None:
        if "_folder" in self.__dict__:
            self._folder.cleanup()
