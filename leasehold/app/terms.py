"""The options of `@app.task(...)`: their types, and their defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypedDict

from leasehold.app.arguments import Arguments
from leasehold.app.failed import Failed
from leasehold.app.retry import Retry
from leasehold.app.run_limits import Batch, Limit, Unique
from leasehold.domain.pipeline import Pipeline

#: The types of options, each with a value as somebody would write it. None is of every type.
_TYPES: dict[str, tuple[type, str]] = {
    "name": (str, '"send_receipt"'),
    "queue": (str, '"mail"'),
    "retry": (Retry, "Retry(times=3)"),
    "timeout": (timedelta, "timedelta(seconds=60)"),
    "cancel_grace": (timedelta, "timedelta(seconds=60)"),
    "debounce": (timedelta, "timedelta(seconds=60)"),
    "limit": (Limit, "Limit(at_most=3)"),
    "unique": (Unique, "Unique()"),
    "version": (int, "2"),
}
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


def wrong_type(terms: Any) -> str | None:
    """What is wrong with the first option whose value has another type than it must have. None: nothing. `terms`: of a
    task or a workflow.
    """
    for name, (type_, example) in _TYPES.items():
        value = getattr(terms, name, None)
        if value is not None and not isinstance(value, type_):
            return f"{name} is a {type_.__name__}, such as {name}={example}, and not {value!r}"
    return None
