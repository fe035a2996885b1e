"""Runs that clients submit at the same time are written together: a round trip for all that gathered meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from leasehold.broker.announcer import Announcer
from leasehold.db.batcher import Batcher
from leasehold.db.database import Connection, connect
from leasehold.settings import Settings
from leasehold.transitions import runs
from leasehold.transitions.runs import NewRun


class Submissions:
    """Whoever is refused or meets a lost connection is told so: nothing is repeated, since clients do that."""

    def __init__(self, settings: Settings, announcer: Announcer) -> None:
        self._announcer = announcer
        self._lane = Batcher(
            partial(connect, settings, "api submissions"), self._create, name="submissions", patience=0.0
        )

    async def create(self, new: NewRun) -> bool:
        """- -> pending, committed and announced. False, and nothing is written: a declared limit is for this run.

        Raises Invalid, or one of TRY_AGAIN.
        """
        return await self._lane.ask(new)

    async def _create(self, connection: Connection, new: Sequence[NewRun], _repeated: bool) -> Sequence[bool]:  # noqa: FBT001 - as Lane calls it
        written, hints = await runs.create_unlimited(connection, new)
        self._announcer.announce(hints)
        return written

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Submissions]:
        self._lane.start()
        try:
            yield self
        finally:
            await self._lane.close()
