"""How long a worker puts off a task whose code it lacks: during a deployment, the worker may be of another release."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

from leasehold.domain.ids import instant_of

#: Seconds of the pause while a living worker has the code.
SHORTEST_PAUSE = 30.0
#: Seconds of the longest pause.
LONGEST_PAUSE = 86_400.0


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
