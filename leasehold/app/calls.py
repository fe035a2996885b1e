"""A call of a task, ready to be submitted: its checked arguments, and the options of the submission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, Literal, Protocol, TypedDict, TypeVar
from uuid import UUID

from leasehold.app.run_limits import KEY_LASTS, Unique
from leasehold.app.terms import TaskTerms
from leasehold.domain.errors import Invalid
from leasehold.domain.ids import id_of, id_of_new_run, new_id
from leasehold.domain.option_types import time_sentence
from leasehold.domain.pipeline import MAX_DELAY, Pipeline
from leasehold.domain.tags import check_given_tags

R = TypeVar("R")  # the type of the task's result
Priority = Literal["high", "normal", "low"]
PRIORITIES = ("high", "normal", "low")
#: The most characters of a key.
MAX_KEY = 200


class SubmitOptions(TypedDict, total=False):
    """The options of `submit`.

    `key`: within 24 hours a second submission of the task with the same key starts no run and returns the first run.
    The second submission must have the same arguments. Over HTTP it must have the same options, too. `delay`: how long
    after its submission the run starts. `tags`: up to 8 names with values to find the run by. `priority`: high, normal
    or low. `id`: the id that the run gets. It is a UUIDv7 that you made at most 24 hours ago, or its text. A repeated
    submission with the same id starts no second run.
    """

    key: str | None
    delay: timedelta | None
    tags: Mapping[str, str] | None
    priority: Priority
    id: UUID | str | None


#: The names of the options of `submit`.
OPTIONS = frozenset(SubmitOptions.__annotations__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one submission, checked: the fields of SubmitOptions, and two fields that only leasehold.celery
    sets. Raises Invalid for a wrong value. `start_at`: the time at which the run starts, in place of `delay`.
    `celery_id`: a further id by which the run can be found (domain/celery_ids.py). A repeated submission with the same
    `celery_id` starts no second run.
    """

    key: str | None = None
    delay: timedelta | None = None
    tags: Mapping[str, str] | None = None
    priority: Priority = "normal"
    id: UUID | str | None = None
    start_at: datetime | None = None
    celery_id: str | None = None

    def __post_init__(self) -> None:
        # Check the types here, because the annotations only help type checkers, and a program may give any value.
        key: object = self.key
        if key is not None and not (
            isinstance(key, str) and 1 <= len(key) <= MAX_KEY and key.isascii() and key.isprintable()
        ):
            raise Invalid("invalid_key", f"A key has 1 to {MAX_KEY} printable ASCII characters.")
        delay: object = self.delay
        if delay is not None and not isinstance(delay, timedelta):
            raise Invalid("invalid_delay", f"{time_sentence('delay', delay)}.")
        if self.delay is not None and not timedelta(0) <= self.delay <= MAX_DELAY:
            raise Invalid("invalid_delay", f"A delay is 0 to {MAX_DELAY.days} days long.")
        if self.start_at is not None and self.start_at - datetime.now(UTC) > MAX_DELAY:
            raise Invalid("invalid_delay", f"A run starts in {MAX_DELAY.days} days at the latest.")
        if self.priority not in PRIORITIES:
            raise Invalid("invalid_priority", f"A priority is one of {', '.join(PRIORITIES)}.")
        if self.id is not None:
            object.__setattr__(self, "id", id_of_new_run(self.id))
        if self.tags is not None:
            check_given_tags(self.tags)


class Callee(Protocol):
    """What a call needs of its task. `terms`: the options of `@app.task(...)`. `pipeline`: the pipeline of its runs."""

    name: str
    terms: TaskTerms
    pipeline: Pipeline

    def find(self, run_id: UUID | str) -> Any:
        """The handle of the task's run with this id."""


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """What `task.call(...)` returns, for `submit_many` and for a workflow. `params`: the checked arguments. `id`: the
    id of the run, unless `options.id` names another id.
    """

    task: Callee
    params: Mapping[str, Any]
    options: Options = field(default_factory=Options)
    id: UUID = field(default_factory=new_id)

    def __post_init__(self) -> None:
        if self.options.delay is not None and self.task.terms.debounce is not None:
            raise Invalid("invalid_delay", f"{self.task.name} has a debounce, which is the delay of its runs.")

    @property
    def run_id(self) -> UUID:
        """The id that the run will have, unless an earlier submission had the same key."""
        return self.id if self.options.id is None else id_of(self.options.id)

    @property
    def key(self) -> str | None:
        """The key of the submission: the key that the caller gave. If the caller gave no key, and the task has the
        option `unique`, the key is made of the arguments. If the task does not have this option, the key is None.
        """
        unique = self.task.terms.unique
        if self.options.key is not None or unique is None:
            return self.options.key
        return unique.key(self.params)

    @property
    def key_lasts(self) -> timedelta:
        """For how long after this submission a further submission with the same key gives the same run."""
        unique = self.task.terms.unique
        return KEY_LASTS if self.has_key_of_caller or unique is None else unique.within

    @property
    def debounce_key(self) -> str | None:
        """Submissions with the same debounce key become one run. The key is None if the task has no `debounce`."""
        if self.task.terms.debounce is None:
            return None
        unique = self.task.terms.unique or Unique()  # by default, a key of all arguments
        return f"debounce:{self.options.key or unique.key(self.params)}"

    @property
    def has_key_of_caller(self) -> bool:
        """Whether the caller gave the key. If so, a repetition with this key must have the same arguments."""
        return self.options.key is not None

    @property
    def delay(self) -> timedelta | None:
        """How long after its submission the run starts: the delay of the call, or the debounce of the task. If the
        result is None or 0, the run does not wait.
        """
        return self.options.delay or self.task.terms.debounce

    def scheduled_at(self, now: datetime) -> datetime | None:
        """When the run starts, if it is submitted at `now`. None if the run starts immediately."""
        return now + self.delay if self.delay else self.options.start_at
