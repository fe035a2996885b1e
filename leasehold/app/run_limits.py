"""Options of `@app.task`. `Limit`: how many runs may run at once, and how many may start each minute. `Batch`: one call
for several runs. `Unique`: which submissions give the same run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import orjson

from leasehold.app.source_location import PlaceOfCaller
from leasehold.domain.errors import DeclarationError
from leasehold.domain.option_types import check_time, check_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """At most `at_most` runs of a task run at once, and at most `per_minute` start each minute. Further runs wait. The
    limit counts the runs of each tenant separately. `by`: a JSON pointer into the arguments. If it is given, runs with
    different values at this place are also counted separately. A call of the task by a workflow (`ctx.run`) counts as a
    run.
    """

    at_most: int | None = None
    per_minute: int | None = None
    by: str | None = None

    def __post_init__(self) -> None:
        with PlaceOfCaller():
            self._check()

    def _check(self) -> None:
        """Raises DeclarationError."""
        for name, bound in (("at_most", self.at_most), ("per_minute", self.per_minute)):
            if bound is not None:
                check_whole(f"Limit.{name}", bound)
        if self.at_most is None and self.per_minute is None:
            raise DeclarationError("a Limit needs at_most, per_minute or both")
        if any(bound is not None and bound < 1 for bound in (self.at_most, self.per_minute)):
            raise DeclarationError("at_most and per_minute must be at least 1: a limit of 0 would hold every run")
        by: object = self.by  # type checkers know its type, but nothing checks what a program gives
        if by is not None and not (isinstance(by, str) and by.startswith("/")):
            raise DeclarationError(f"Limit.by is a JSON pointer such as /customer, not {by!r}")


#: For at most this time after a submission, another submission with the same key (`Unique.key`) gives the same run. The
#: platform stores the key for this time (leasehold.db.idempotency.KEEP).
KEY_LASTS = timedelta(hours=24)
#: The largest `size` of a Batch, and its longest `wait`.
MAX_BATCH = 10_000
MAX_BATCH_WAIT = timedelta(minutes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One call of the function serves up to `size` runs of one tenant. A run waits in its worker for other runs, for at
    most `wait`. Each waiting run uses a slot (room for one attempt), so a batch is never larger than the number of the
    worker's slots.
    """

    size: int
    wait: timedelta = timedelta(milliseconds=50)

    def __post_init__(self) -> None:
        with PlaceOfCaller():
            check_whole("Batch.size", self.size)
            check_time("Batch.wait", self.wait)
            if not 1 <= self.size <= MAX_BATCH:
                raise DeclarationError(f"Batch.size is 1 to {MAX_BATCH}, not {self.size}")
            if not timedelta(0) <= self.wait <= MAX_BATCH_WAIT:
                raise DeclarationError(f"Batch.wait is 0 to {MAX_BATCH_WAIT.total_seconds():g} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unique:
    """Submissions with equal arguments give one run, because a further submission returns the run of the first. `by`:
    the names of the arguments that are compared. If it is empty, all arguments are compared. `within`: for how long
    after the first submission a further submission returns the first run, at most 24 hours.
    """

    by: tuple[str, ...] = ()
    within: timedelta = KEY_LASTS

    def __post_init__(self) -> None:
        with PlaceOfCaller():
            self._check()

    def _check(self) -> None:
        """Raises DeclarationError."""
        by: object = self.by  # type checkers know a tuple, but nothing checks the caller's types
        if isinstance(by, str):
            raise DeclarationError(f"Unique.by is a tuple of names such as ({by!r},), not a string")
        if not isinstance(by, tuple | list) or not all(isinstance(name, str) for name in by):
            raise DeclarationError(f"Unique.by is a tuple of names such as ('customer',), not {by!r}")
        check_time("Unique.within", self.within)
        if not timedelta(0) < self.within <= KEY_LASTS:
            hours = KEY_LASTS.total_seconds() / 3600
            raise DeclarationError(f"Unique.within is more than 0 and at most {hours:g} hours")

    def key(self, params: Mapping[str, Any]) -> str:
        """The key of a submission. Submissions with the same key give the same run."""
        values = {name: params[name] for name in self.by} if self.by else dict(params)
        # Use 40 characters (160 bits) of the hash. They suffice to keep keys from colliding, and the key stays short.
        return f"unique:{hashlib.sha256(orjson.dumps(values, option=orjson.OPT_SORT_KEYS)).hexdigest()[:40]}"
