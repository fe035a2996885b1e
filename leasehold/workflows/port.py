"""`Port`: the methods of the worker that a driver calls. A driver (driver.py) runs a workflow's code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from uuid import UUID

from leasehold.transitions.workflows.reading import Journal, StoredSignal
from leasehold.transitions.workflows.records import Call
from leasehold.workflows.pending import RunCall, StartCall


class Port(Protocol):
    """One attempt's access to the journal. When the lease is lost, `signal` returns None, and every other method that
    reads or writes rows raises LeaseLost.
    """

    async def read(self, places: Sequence[tuple[str, int]] | None) -> Journal:
        """The journal's rows at these places; None: all rows. A place is a call's branch and number in the branch."""

    async def signal(self, name: str, after: int) -> StoredSignal | None:
        """The oldest unconsumed signal of this name whose id is greater than `after`, if there is one."""

    async def record(self, calls: Sequence[Call], *, cancelling: bool) -> bool:
        """Commit the calls to the journal now. `cancelling`: whether the workflow has seen the cancel of its run, which
        means that Cancelled was raised in its code. If a cancel was requested and the workflow has not seen it, this
        method writes nothing, and returns False.
        """

    async def start(
        self, call: StartCall[Any] | RunCall[Any], record: Call, wait: Call | None = None, *, again: bool = False
    ) -> bool:
        """Write the run that `call` starts, and `record`, the call's row of the journal, in one transaction. If the
        workflow is being cancelled and the run is not detached, write nothing, and return False.

        `wait`: a second row of the journal, which waits for the end of the run. It is given for `ctx.run` of a task
        with a concurrency limit, because a run of its own does the work of this call. `again`: whether the journal has
        `record` already, and the run has failed. If so, retry the run instead of writing a new run, and write only
        `wait`.
        """

    async def fetch(self, child: UUID, output: str, *, is_run: bool) -> bytes:
        """The bytes of the output with the name `output`. Without `is_run`, `child` is a succeeded step, which has the
        output. With `is_run`, `child` is a succeeded run, and the output is of the run's own single step. (If the run
        is a workflow, the steps that it started do not count.)
        """

    async def call(self, function: Callable[[], Any]) -> Any:
        """Call a function of the user's code: a coroutine function in the event loop, any other in a thread."""

    def cancelled(self) -> bool:
        """Whether a cancel of the run was requested."""

    def is_last_attempt(self) -> bool:
        """Whether the run fails if this attempt fails."""

    def check(self) -> None:
        """Raises LeaseLost once the worker does not trust the lease any more, because the lease may have expired."""
