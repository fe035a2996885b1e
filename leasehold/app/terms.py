"""The options of `@app.task(...)`: their types, and their defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, TypedDict

from leasehold.app.arguments import Arguments
from leasehold.app.failed import Failed
from leasehold.app.retry import Retry
from leasehold.app.run_limits import Batch, Limit, Unique
from leasehold.domain.errors import DeclarationError
from leasehold.domain.option_types import check_kind, check_text, check_time, is_whole
from leasehold.domain.pipeline import Pipeline

#: The name of the only step of a task's pipeline.
STEP = "run"


class Follower(Protocol):
    """What the options need of the task in `on_failure`, which runs after another task has failed. It is a
    Task[[leasehold.Failed], Any].
    """

    name: str
    arguments: Arguments
    pipeline: Pipeline

    def call(self, failed: Failed, /) -> object: ...


class TaskOptions(TypedDict, total=False):
    """The options of `@app.task(...)`, except `batch`. `App.task` explains each option."""

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

    def check_types(self) -> None:
        """Raises DeclarationError for an option of a wrong type. The error's message says what to write."""
        check_name_and_times(self.name, self.queue or "", self.timeout, self.cancel_grace)
        if self.debounce is not None:
            check_time("debounce", self.debounce)
        check_kind("retry", self.retry, Retry, f"Retry(times={self.retry if is_whole(self.retry) else 3})")
        for name in ("process", "isolated"):
            check_kind(name, getattr(self, name), bool, "True")
        for name, kind, argument in (("limit", Limit, "at_most="), ("unique", Unique, ""), ("batch", Batch, "size=")):
            value = getattr(self, name)
            # If the program gave a number, as in `limit=5`, the message repeats the number: write Limit(at_most=5).
            number = "" if not argument else value if is_whole(value) else 10
            if value is not None:
                check_kind(name, value, kind, f"{kind.__name__}({argument}{number})")
        if self.on_failure is not None and not isinstance(getattr(self.on_failure, "arguments", None), Arguments):
            raise DeclarationError(
                f"on_failure is a task, not {self.on_failure!r}: declare it with @app.task, and give what that returns"
            )


def check_name_and_times(name: str | None, queue: str, timeout: timedelta, cancel_grace: timedelta) -> None:
    """Check the types of the options that both tasks and workflows have. Raises DeclarationError, whose message says
    what to write.
    """
    if name is not None:
        check_text("name", name, "other_name")
    check_text("queue", queue, "default")
    check_time("timeout", timeout)
    check_time("cancel_grace", cancel_grace)
