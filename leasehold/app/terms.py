"""The options of `@app.task(...)`: their types, and their defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, TypedDict

from leasehold.app.arguments import Arguments
from leasehold.app.failed import Failed
from leasehold.app.retry import Retry
from leasehold.app.run_limits import Batch, Limit, Unique
from leasehold.domain.pipeline import Pipeline

#: The name of the only step of a task's pipeline.
STEP = "run"


class Follower(Protocol):
    """The task that runs after a failure of another: a Task[[leasehold.Failed], Any]."""

    name: str
    arguments: Arguments
    pipeline: Pipeline

    def call(self, failed: Failed, /) -> object: ...


class TaskOptions(TypedDict, total=False):
    """What `@app.task(...)` takes, except `batch`; `App.task` says what each means."""

    name: str | None
    queue: str | None
    retry: Retry
    timeout: timedelta
    process: bool
    isolated: bool
    limit: Limit | None
    unique: Unique | None
    debounce: timedelta | None
    on_failure: Follower | None
    cancel_grace: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTerms:
    """The options of one task. Options that were left out have their defaults."""

    name: str | None = None
    queue: str | None = None
    retry: Retry = field(default_factory=Retry)
    timeout: timedelta = timedelta(minutes=5)
    process: bool = False
    isolated: bool = False
    limit: Limit | None = None
    unique: Unique | None = None
    debounce: timedelta | None = None
    batch: Batch | None = None
    on_failure: Follower | None = None
    cancel_grace: timedelta = timedelta(seconds=30)
