"""Reads and writes the journals of running workflows, for workflows.py. A journal has a row for each call of a
workflow. Requests that wait at the same time are sent in one round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import UUID

from leasehold.broker.outbox import Announcement
from leasehold.db.batcher import Batcher
from leasehold.db.database import Connection, connect
from leasehold.domain.lease import differ_in_a_task
from leasehold.settings import Settings
from leasehold.transitions.workflows import reading, recording
from leasehold.transitions.workflows.reading import Journal, Reading
from leasehold.transitions.workflows.records import Recorded, Recording


class Journals:
    """Every workflow attempt of the worker awaits `read` and `record`. All requests use one connection, and at most
    `at_most` of them share a round trip. While the database is away, the requests wait without a limit of time.
    `announce`: called after each commit with the hints (messages that a task is due) that the commit wrote.
    """

    def __init__(self, settings: Settings, announce: Callable[[Sequence[Announcement]], None], at_most: int) -> None:
        self.announce = announce
        self._batcher: Batcher[Recording | Reading, Recorded | Journal | None] = Batcher(
            lambda: connect(settings, "journal"),
            self._carry_out,
            name="journal",
            at_most=at_most,
            patience=float("inf"),
            sets_aside=True,  # a request that takes too long delays no other request
        )
        self.start, self.close = self._batcher.start, self._batcher.close

    async def record(self, request: Recording) -> Recorded:
        """Commit the calls of a workflow that goes on."""
        answer = await self._batcher.ask(request)
        assert isinstance(answer, Recorded)
        return answer

    async def read(self, request: Reading) -> Journal | None:
        """The rows that the request names, or the whole journal. Returns None if the lease is not valid. Of a long
        journal, this method returns only the beginning, and sets `is_cut`, because a long read here would delay all
        other requests. The caller then reads the journal on another connection.
        """
        answer = await self._batcher.ask(request)
        assert not isinstance(answer, Recorded)
        return answer

    async def _carry_out(
        self,
        connection: Connection,
        batch: Sequence[Recording | Reading],
        _repeated: bool,  # noqa: FBT001 - the Batcher's signature
    ) -> list[Recorded | Journal | None]:
        # Carry out all recordings together, then all readings together. The answers have the order of the batch. But if
        # the batch has two leases of one task, carry out each request by itself.
        if differ_in_a_task(item.lease for item in batch):
            return [answer for one in batch for answer in await self._carry_out(connection, [one], _repeated)]
        recordings = [item for item in batch if isinstance(item, Recording)]
        readings = [item for item in batch if isinstance(item, Reading)]
        recorded: dict[UUID, Recorded] = {}
        if recordings:
            recorded, hints = await recording.record(connection, recordings)
            self.announce(hints)
        journals = iter(await reading.read_each(connection, readings))
        return [recorded[item.lease.task_id] if isinstance(item, Recording) else next(journals) for item in batch]
