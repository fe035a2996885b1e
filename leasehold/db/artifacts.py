"""Reads what the steps of a job have committed, for a worker that begins an attempt: outputs (files in the store),
notes (each a value that a step keeps for its next attempt) and the values that steps returned.

The key of an output's object is always read from the output's row, never computed from the output's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from leasehold.db.database import Connection


@dataclass(frozen=True, slots=True)
class Artifact:
    """A committed output. `name` is unique within its step. `key`: its object's key in the store. `size`: in bytes."""

    step: str
    name: str
    key: str
    size: int
    sha256: str
    content_type: str


async def artifacts_of(connection: Connection, job_id: UUID, steps: Sequence[str]) -> list[Artifact]:
    """The outputs that these steps of the job have committed."""
    rows = await connection.fetch(
        "SELECT step, name, key, size, sha256, content_type FROM output"
        " WHERE job_id = $1 AND step = ANY($2::text[]) ORDER BY step, name",
        job_id,
        list(steps),
    )
    return [Artifact(**dict(row)) for row in rows]


async def note_of(connection: Connection, task_id: UUID) -> dict[str, Any]:
    """The note that the task last kept, in a Snooze (which asks to run later) or by `remember`. The result is empty if
    the task has no note.
    """
    return await connection.fetchval("SELECT value FROM note WHERE task_id = $1", task_id) or {}


async def value_of(connection: Connection, job_id: UUID, step: str) -> Any:
    """The value that the job's step returned when it succeeded, or None."""
    return await connection.fetchval(
        "SELECT r.value FROM task t JOIN result r ON r.task_id = t.id WHERE t.job_id = $1 AND t.step = $2",
        job_id,
        step,
    )
