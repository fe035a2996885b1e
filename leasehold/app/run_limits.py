"""Limits of a task's runs: how many run at once, and which submissions are the same run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from leasehold.domain.errors import DeclarationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """At most `at_most` runs of a task run at once, and at most `per_minute` start each minute; further runs wait. Each
    tenant has the limit for itself. `by`: a JSON pointer into the arguments; each value there has the limit for itself.
    """

    at_most: int | None = None
    per_minute: int | None = None
    by: str | None = None

    def __post_init__(self) -> None:
        if self.at_most is None and self.per_minute is None:
            raise DeclarationError("a Limit needs at_most, per_minute or both")
        if any(bound is not None and bound < 1 for bound in (self.at_most, self.per_minute)):
            raise DeclarationError("a Limit of nothing would hold every run: at_most and per_minute are at least 1")
        if self.by is not None and not self.by.startswith("/"):
            raise DeclarationError(f"Limit.by is a JSON pointer such as /customer, not {self.by!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unique:
    """One run for equal arguments: within 24 hours a second submission returns the first one's run. `by`: the names of
    the arguments that are compared; empty: all of them.
    """

    by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        by: object = self.by
        if isinstance(by, str):
            raise DeclarationError(f"Unique.by is a tuple of names such as ({by!r},), not a string")

    def key(self, params: Mapping[str, Any]) -> str:
        """The key of a submission: two submissions with one key are one run."""
        values = {name: params[name] for name in self.by} if self.by else dict(params)
        return f"unique:{hashlib.sha256(orjson.dumps(values, option=orjson.OPT_SORT_KEYS)).hexdigest()[:40]}"
