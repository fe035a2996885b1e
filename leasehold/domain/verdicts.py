"""The verdicts that a handler may return: Done, Snooze, FanOut. To report a failure, a handler raises errors.StepError.

A handler of the platform may also return LeftToOthers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class File:
    """A file that an isolated handler (one that runs in a sandboxed process) wrote into its directory. The worker
    stores the file under the step's prefix in the object store.
    """

    path: Path
    content_type: str


@dataclass(frozen=True, slots=True)
class Done:
    """The step is finished.

    `files`: {output name: file}; only isolated handlers return files. `value`: small JSON for readers of the job, such
    as a picture's dimensions. The value is committed with the step.
    """

    files: Mapping[str, File] = field(default_factory=dict)
    value: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Snooze:
    """The step is not finished. The worker gives the lease back, and the step runs again at `until`.

    `until`: an instant, or a delay from now. `note`: small JSON for the next attempt (`attempt.note()`).
    """

    until: datetime | timedelta
    note: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class LeftToOthers(Snooze):
    """A snooze because a step of the platform needs a handler that this worker does not have. `handler`: the handler's
    name, `pipeline.step`, or the names of several handlers (missing_code.py). A worker that has all of these handlers
    makes the step due at once. If there is no such worker, or if `handler` is None, the step runs again at `until`.
    """

    handler: str | None = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class FanOut:
    """The step is not finished. First another step, `step`, which is declared with `part=True`, runs once for each of
    `items`, all in parallel. Each item has a task of its own, which is called a part.

    After all parts have succeeded, the step that returned this FanOut runs again, and `attempt.joined()` returns the
    results of the parts. `items` has 1 to 1,000 entries.
    """

    step: str
    items: Sequence[Any]
