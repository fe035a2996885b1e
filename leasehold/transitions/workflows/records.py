"""What a workflow's worker writes to the journal: a `Call` for each call of the context since the last write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from leasehold.domain.lease import Lease


@dataclass(frozen=True, slots=True)
class Call:
    """One row of the journal, new or with its result. `branch` and `number`: its place.

    `kind`: run | sleep | signal | start | result | call | patch. `state`: open | done | failed | timed_out | cancelled
    (the workflow waited here when it saw the cancel of its run).
    `delay`: seconds from now until the wait ends by itself. `child`: the task or run that it starts or awaits.
    `signal`: the id of the signal that it consumes. A run also has `step`, `queue`, `max_attempts`, `handler`,
    `timeout_seconds`, `cancelable` and `argument`: those of the task that the statement writes.
    """

    branch: str
    number: int
    kind: str
    name: str
    state: str = "open"
    value: Any = None
    delay: float | None = None
    child: UUID | None = None
    signal: int | None = None
    step: str | None = None
    queue: str | None = None
    max_attempts: int | None = None
    handler: str | None = None
    timeout_seconds: int | None = None
    cancelable: bool = True
    argument: Any = None

    def record(self) -> dict[str, Any]:
        """The call as JSON, without the fields that are None: a gather writes thousands of these."""
        return {name: value for name in _FIELDS if (value := getattr(self, name)) is not None}


_FIELDS = tuple(Call.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The outcome of a Recording. `kept`: the lease was valid, and the calls are committed. `cancelling`: the run is
    being cancelled. `kept` is False, and nothing was written, if the lease is lost, or if the run is being cancelled
    and the workflow had not seen it.
    """

    kept: bool
    cancelling: bool


@dataclass(frozen=True, slots=True)
class Recording:
    """Calls to be recorded while the workflow goes on. `cancelling`: the workflow has seen the cancel of its run."""

    lease: Lease
    calls: tuple[Call, ...]
    cancelling: bool = False


def calls_column(calls_of: list[tuple[Call, ...]]) -> list[dict[str, Any]]:
    """The parameter $4 of the statements that write to the journal. Each element is a mapping, because PostgreSQL takes
    a list of lists for an array of two dimensions.
    """
    return [{"of": [call.record() for call in calls]} for calls in calls_of]
