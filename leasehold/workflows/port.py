"""`Port`: what a driver needs of the worker that runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from uuid import UUID

from leasehold.transitions.workflows.reading import Journal
from leasehold.transitions.workflows.records import Call
from leasehold.workflows.pending import StartCall


class Port(Protocol):
    """One attempt's access to the journal. Each method raises LeaseLost when the lease is lost."""

    async def read(self, places: Sequence[tuple[str, int]] | None) -> Journal:
        """The journal, or only the rows at these places."""

    async def record(self, calls: Sequence[Call], *, cancelling: bool) -> bool:
        """Commit the calls now. `cancelling`: the workflow has seen that its run is being cancelled. False: the run is
        being cancelled, and nothing was written, because the workflow had not seen it.
        """

    async def start(self, call: StartCall[Any], record: Call) -> bool:
        """Write the run and its row of the journal: both or none. False: the workflow is being cancelled, and the run
        is not a detached one.
        """

    async def fetch(self, task_id: UUID, output: str) -> bytes:
        """An output of a step that has succeeded."""

    async def call(self, function: Callable[[], Any]) -> Any:
        """Call a function of the workflow's author: in the loop if it gives a coroutine, else in a thread."""

    def cancelled(self) -> bool:
        """Whether a cancel of the run was requested."""

    def check(self) -> None:
        """Raises LeaseLost once the lease is not trusted any more."""
