"""The progress of a bulk operation (a job that cancels, retries or deletes other jobs). The operation's step stores its
progress as a note, which the next attempt reads. The transaction that changes a batch of jobs also writes the note.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from pydantic import BaseModel, Field

from leasehold.transitions.operations import Refusal


class Count(BaseModel):
    """The number of jobs that matched when the operation began. `exact`: False if the number is an estimate."""

    n: int
    exact: bool


class Busy(BaseModel):
    """A job that the operation could not change, because another transaction held it. `tries`: how often the operation
    has tried.
    """

    job_id: UUID
    tenant_id: str
    tries: int = 0


class Left(BaseModel):
    """Jobs of one tenant that the operation has left to a worker that has the jobs' code. `handler`: the name
    (`pipeline.step`) of one handler of this code.
    """

    handler: str
    tenant_id: str
    job_ids: list[UUID]


class Canary(BaseModel):
    """The few jobs on which the operation acts first, as a trial. `until`: the Unix time by which these jobs must have
    ended. It is None until the operation has acted on all of them. It becomes None again if the trial has stopped the
    operation, and a person has retried the operation. `passed`: whether the operation may go on to the other jobs;
    None: not known yet.
    """

    job_ids: list[UUID] = Field(default_factory=list)
    until: float | None = None
    passed: bool | None = None


class Progress(BaseModel):
    """How far an operation has come. The operation walks over the jobs by descending id.

    `acted`, `refused`: how many jobs were changed, and how many could not be changed. `before`: the walk goes on with
    ids below this id; None: the walk has not begun or, if `walked`, is finished. `busy`: jobs that the operation must
    try again. `left`: jobs that a worker with the jobs' code must try. `codes`: the number of refusals by code.
    `next_at`: the Unix time at which the rate allows the next job. `longest_ms`: the longest time for which a batch
    held its locks.
    """

    total: Count | None = None
    acted: int = 0
    refused: int = 0
    codes: dict[str, int] = Field(default_factory=dict)
    before: UUID | None = None
    walked: bool = False
    busy: list[Busy] = Field(default_factory=list)
    left: list[Left] = Field(default_factory=list)
    canary: Canary = Field(default_factory=Canary)
    next_at: float = 0.0
    longest_ms: int = 0

    def note(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @property
    def done(self) -> int:
        return self.acted + self.refused

    @property
    def percent(self) -> float:
        """The percentage of jobs that are done, at most 99.9. It never says 100, because `total` may be too low an
        estimate. Only the operation's end means that all jobs are done.
        """
        if self.total is None or not self.total.n:
            return 0.0
        return min(100.0 * self.done / self.total.n, 99.9)

    def count(self, acted: Sequence[UUID], refusals: Sequence[Refusal]) -> None:
        """Add the outcome of a batch."""
        self.acted += len(acted)
        self.refused += len(refusals)
        self.codes = dict(Counter(self.codes) + Counter(refusal.code for refusal in refusals))


def progress_of(note: Mapping[str, Any]) -> Progress:
    return Progress.model_validate(note)
