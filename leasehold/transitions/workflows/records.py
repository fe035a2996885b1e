"""The records that a workflow's worker writes to the journal. A `Call` is a call that the workflow has made on its
context (`ctx.run`, `ctx.sleep`, ...) since the last write, or an earlier call that has got its result since then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from leasehold.domain.lease import Lease


@dataclass(frozen=True, slots=True)
class Call:
    """A row of the journal: a new row, or an open row that gets its result. `branch` and `number` are the row's place.
    `branch`: the name of the coroutine that makes the call, because a workflow may run several coroutines at the same
    time. `number` counts the calls of that coroutine.

    `kind`: run (starts a step of this run) | start (starts another run) | result (waits for a started run) | sleep |
    signal | call (a plain function) | patch (whether the workflow takes the old or the new way at a point where its
    code was changed). `ctx.run` of a task with a concurrency limit has two rows: a start and, at the place below it, a
    result. `name`: the name of the task, signal, function or patch that the call is about. `state`: open | done |
    failed | timed_out | cancelled. `cancelled` means that the workflow waited here when it saw the cancel of its run.
    `value`: the call's result or error, as JSON. `delay`: seconds from now until the wait ends by itself. `child`: the
    task or run that the call starts or awaits. `signal`: the id of the signal that the call consumes. A call of the
    kind `run` also has `step`, `queue`, `max_attempts`, `handler`, `timeout_seconds`, `cancelable` and `argument`, for
    the row of its step (journal_sql.py).
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
        """The call as JSON. Fields that are None are left out, because a gather may write thousands of calls."""
        return {name: value for name in _FIELDS if (value := getattr(self, name)) is not None}


#: The fields of a Call.
_FIELDS = tuple(Call.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The outcome of a Recording (see below). `committed`: the calls are written. `cancelling`: the run is being
    cancelled. The calls are not written in two cases: the lease is lost, or the run is being cancelled and the workflow
    has not seen the cancel yet.
    """

    committed: bool
    cancelling: bool


@dataclass(frozen=True, slots=True)
class Recording:
    """Calls to be written while the workflow goes on. `has_seen_cancel`: the error Cancelled was raised in the
    workflow's code, because its run is being cancelled.
    """

    lease: Lease
    calls: tuple[Call, ...]
    has_seen_cancel: bool = False


def calls_column(calls_by_lease: list[tuple[Call, ...]]) -> list[dict[str, Any]]:
    """The parameter $4 of the statements that write to the journal: for each lease, its calls. Each element is a
    mapping, because PostgreSQL would read a list of lists as an array of two dimensions.
    """
    return [{"of": [call.record() for call in calls]} for calls in calls_by_lease]
