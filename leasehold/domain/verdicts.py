"""What a handler may answer. Anything else it says by raising (see errors.StepError)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class File:
    """A file that an isolated handler made in its working directory, to be stored under the step's prefix."""

    path: Path
    content_type: str


@dataclass(frozen=True, slots=True)
class Done:
    """The step is finished.

    `files`: output name -> file (isolated handlers). `value`: small JSON for readers of the job, such as
    dimensions; it is committed with the step.
    """

    files: Mapping[str, File] = field(default_factory=dict)
    value: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Snooze:
    """Not finished: give the lease back and come again at `until` (an instant, or a delay from now)."""

    until: datetime | timedelta
    note: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class FanOut:
    """Not finished: run `step` (declared with `part=True`) once for each of `items`, all at once, then this step again.

    The second time `attempt.joined()` has the parts' results. At most 1,000 items; none is an error.
    """

    step: str
    items: Sequence[Any]
