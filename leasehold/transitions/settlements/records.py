"""The records of settlements (a settlement writes how an attempt ended). The worker makes a `Completion`, `Failure`,
`Snoozing` or `FanningOut`, and each settlement returns a `Settled`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from uuid import UUID

from leasehold.broker.outbox import Announcement
from leasehold.domain.lease import Lease
from leasehold.transitions.claims import Claimed
from leasehold.transitions.endings import JobEnded


class Verdict(StrEnum):
    SETTLED = "settled"  # this write ended the attempt, or an earlier try of this write did
    #: This write changed nothing, because another claim, a cancel, or the end of an overdue lease took the task.
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Output:
    """An object that the step wrote to the store. The worker writes the object before PostgreSQL names it."""

    name: str
    key: str
    size: int  # bytes
    sha256: str
    content_type: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A step that succeeded, with its outputs and its value."""

    lease: Lease
    outputs: Sequence[Output] = ()
    value: Mapping[str, Any] | None = None
    claim_next: bool = False  # the worker has room to run the job's next step, if that step is in the same queue
    is_last: bool = False  # no other step needs this one, as far as the worker knows

    def claiming_next(self) -> Completion:
        """The same completion with `claim_next`, and without `is_last`, because no step can be claimed after a last
        step.
        """
        return Completion(self.lease, self.outputs, self.value, claim_next=True)  # a hot path: `replace` takes longer

    def of_last_step(self) -> Completion:
        """The same completion with `is_last`, and without `claim_next`."""
        return Completion(self.lease, self.outputs, self.value, is_last=True)


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that failed. `cause`: error | timeout | crash. `delay`: seconds until the next attempt, if one may
    follow.
    """

    lease: Lease
    cause: str
    code: str
    message: str
    retryable: bool
    delay: float


@dataclass(frozen=True, slots=True)
class Snoozing:
    """A step that is to run again after `delay` seconds. `note`: a note that the step's next attempt reads.

    `missing_handler`: the name (`pipeline.step`) of code that this worker lacks. Mostly this is the code of the step
    itself. If the step needs the code of several handlers, the text has all their names (missing_code.py). A worker
    that has all this code makes the step due earlier. `missing_handler` is None if no code is missing.

    `by_step`: the step's code ran, and asked to snooze. So the code has not killed its worker, and earlier losses of
    the task (attempts whose worker was lost) no longer count.
    """

    lease: Lease
    delay: float  # seconds
    note: Mapping[str, Any] | None = None
    outputs: Sequence[Output] = ()
    missing_handler: str | None = None
    by_step: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One of the tasks that a step fans out into. `handler`: the `pipeline.step` whose code runs the task."""

    step: str
    queue: str
    max_attempts: int
    handler: str
    value: Any


@dataclass(frozen=True, slots=True)
class FanningOut:
    """A step that runs again once all its `parts` (at least one) have succeeded."""

    lease: Lease
    parts: Sequence[Part]
    outputs: Sequence[Output] = ()


@dataclass(frozen=True, slots=True)
class Settled:
    """The verdict of each task, and the hints (messages that tell workers of due tasks) that the statement wrote. After
    the commit, the caller publishes the hints. If the caller does not, the relay (a duty of the workers) publishes them
    a second later.
    """

    verdicts: dict[UUID, Verdict]
    states: dict[UUID, str] = field(default_factory=dict)  # task id -> the task's state after the settlement
    announcements: list[Announcement] = field(default_factory=list)
    ended: list[JobEnded] = field(default_factory=list)
    dead_letters: set[UUID] = field(default_factory=set)  # failed tasks, except steps that a workflow started
    next_steps: dict[UUID, Claimed] = field(default_factory=dict)  # completed task -> the next step, claimed with it

    def add(self, later: Settled) -> None:
        """Add the outcome of a later statement, whose verdicts replace earlier ones."""
        self.verdicts.update(later.verdicts)
        self.states.update(later.states)
        self.announcements.extend(later.announcements)
        self.ended.extend(later.ended)
        self.dead_letters.update(later.dead_letters)
        self.next_steps.update(later.next_steps)
