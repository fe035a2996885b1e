"""Writes runs in batches: while one round trip is under way, the runs of other requests gather for the next.

POST /v1/runs calls `Submissions.create` for runs without an idempotency key that exclude no other run of their scope.
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
    """Writes the runs of all requests. If a write is refused or fails, its request gets the error, and the client may
    repeat the request: `Submissions` itself tries only once.
    """

    def __init__(self, settings: Settings, announcer: Announcer) -> None:
        self._announcer = announcer
        self._batcher = Batcher(
            partial(connect, settings, "api submissions"), self._create, name="submissions", patience=0.0
        )

    async def create(self, new: NewRun) -> bool:
        """Write the run as pending, commit, and publish its hint. False: a declared limit concerns the run, and
        nothing is written.

        Raises Invalid, or one of TRY_AGAIN.
        """
        async with deadline.current().waiting():
            return await self._batcher.ask(new)

    async def _create(self, connection: Connection, new: Sequence[NewRun], _repeated: bool) -> Sequence[bool]:  # noqa: FBT001 - as Batcher calls it
        written, hints = await runs.create_unlimited(connection, new)
        self._announcer.announce(hints)
        return written

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Submissions]:
        self._batcher.start()
        try:
            yield self
        finally:
            await self._batcher.close()
