"""Writes runs in batches. While PostgreSQL writes one batch, `Submissions` collects the runs of further requests for
the next batch.

POST /v1/runs calls `Submissions.create` for simple runs only, such as a run without an idempotency key and without a
delay (runs/creating.py has the full list).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from leasehold.api.process import deadline
from leasehold.broker.announcer import Announcer
from leasehold.db.batcher import Batcher
from leasehold.db.database import Connection, connect
from leasehold.settings import Settings
from leasehold.transitions import runs
from leasehold.transitions.runs import NewRun


class Submissions:
    """Writes the runs of all requests. If a write is refused or fails, its request gets the error. `Submissions` tries
    only once, because the client may repeat the request.
    """

    def __init__(self, settings: Settings, announcer: Announcer) -> None:
        self._announcer = announcer
        self._batcher = Batcher(
            partial(connect, settings, "api submissions"),
            self._create,
            name="submissions",
            patience=0.0,  # after a failed try the request gets the error: there is no second try
        )

    async def create(self, new_run: NewRun) -> bool:
        """Write the run as pending, commit, and publish its hint (the message that tells workers of it). Returns False,
        and writes nothing, if a concurrency limit applies to the run.

        Raises Invalid, or one of TRY_AGAIN (runtime/transient.py) if PostgreSQL does not answer.
        """
        # The wait counts against the time that the request may wait for PostgreSQL in total.
        async with deadline.current().waiting():
            return await self._batcher.ask(new_run)

    async def _create(self, connection: Connection, new_runs: Sequence[NewRun], _repeated: bool) -> Sequence[bool]:  # noqa: FBT001 - as Batcher calls it
        are_written, hints = await runs.create_unlimited(connection, new_runs)
        self._announcer.announce(hints)
        return are_written

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Submissions]:
        self._batcher.start()
        try:
            yield self
        finally:
            await self._batcher.close()
