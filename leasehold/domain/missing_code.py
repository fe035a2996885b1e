"""What a worker records about a task whose code the worker lacks, and how long the task then pauses. This happens
during a deployment, while workers of two releases run.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from uuid import UUID

from leasehold.domain.ids import instant_of

#: Seconds of the pause if some living worker has the code. This is also the least length of every other pause.
SHORTEST_PAUSE = 30.0
#: Seconds of the longest pause.
LONGEST_PAUSE = 86_400.0
#: The most characters of `joined_handlers`, because an index contains this text.
_MAX_CHARACTERS = 2000


def joined_handlers(handlers: Iterable[str]) -> str | None:
    """The task's handlers (each named `pipeline.step`) as one text, `a.b, c.d`. Only a worker that has all of these
    handlers ends the task's pause early. Returns None if there are no handlers, or if the text would be too long. Then
    no worker ends the pause early.
    """
    text = ", ".join(sorted(set(handlers)))
    return text if 0 < len(text) <= _MAX_CHARACTERS else None


def split_handlers(text: str) -> list[str]:
    """The handlers of a text that `joined_handlers` has made."""
    return text.split(", ")


def pause_without_code(job_id: UUID) -> float:
    """Seconds of the pause if perhaps no living worker has the code. An old job gets a long pause, because each pause
    adds two events to the job's history. A worker that has the code ends the pause early
    (transitions/unknown_tasks.py). Exception: a worker of an old release of the platform cannot end it.
    """
    return min(max(_age_of(job_id), SHORTEST_PAUSE), LONGEST_PAUSE)


def _age_of(job_id: UUID) -> float:
    """Seconds since the job's id was made, or 0 if the id has no time."""
    try:
        return (datetime.now(UTC) - instant_of(job_id)).total_seconds()
    except (ValueError, OverflowError):
        return 0.0
