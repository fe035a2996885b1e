"""What a worker records about a task whose code it lacks, and how long it puts the task off. This happens during a
deployment, while workers of two releases run.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from uuid import UUID

from leasehold.domain.ids import instant_of

#: Seconds of the pause while a living worker has the code.
SHORTEST_PAUSE = 30.0
#: Seconds of the longest pause.
LONGEST_PAUSE = 86_400.0
#: The most characters of `joined_handlers`, because an index contains this text.
_MAX_CHARACTERS = 2000


def joined_handlers(handlers: Iterable[str]) -> str | None:
    """The handlers (each a `pipeline.step`) as one text, `a.b, c.d`. Only a worker that has all of them makes the task
    due at once. None: there are no handlers, or the text would be too long. Then no worker makes the task due before
    its pause has passed.
    """
    text = ", ".join(sorted(set(handlers)))
    return text if 0 < len(text) <= _MAX_CHARACTERS else None


def split_handlers(text: str) -> list[str]:
    """The handlers of a text that `joined_handlers` has made."""
    return text.split(", ")


def pause_without_code(job_id: UUID) -> float:
    """Seconds of the pause if no living worker may have the code. It grows with the age of the job, because each pause
    adds two events to the job's history. A worker with the code makes the task due at once
    (transitions/unknown_tasks.py). Workers of older releases do not do this.
    """
    return min(max(_age_of(job_id), SHORTEST_PAUSE), LONGEST_PAUSE)


def _age_of(job_id: UUID) -> float:
    """Seconds since the job's id was made. 0 for an id that has no time."""
    try:
        return (datetime.now(UTC) - instant_of(job_id)).total_seconds()
    except (ValueError, OverflowError):
        return 0.0
