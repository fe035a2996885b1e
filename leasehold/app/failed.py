"""`Failed`: the argument of a task that runs when a run of another task has failed (the option `on_failure`)."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from pydantic import BaseModel


class Failed(BaseModel):
    """A run that failed for good, or expired. `arguments`: the JSON of its parameters."""

    run_id: UUID
    task: str
    code: str
    message: str
    arguments: dict[str, Any]
