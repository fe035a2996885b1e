"""Claims and completions without a worker, so that each statement can be timed by itself."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from bench.submitter import submitter
from bench.testbed import Installation
from leasehold.db.database import Connection
from leasehold.domain.ids import new_id
from leasehold.pipelines.demo.pipeline import noop
from leasehold.transitions import settlements
from leasehold.transitions.claims import Claimed, LeaseTerms
from leasehold.transitions.settlements import Completion


async def fill(installation: Installation, jobs: int) -> None:
    """Submit so many jobs of one step that does nothing."""
    async with submitter(installation) as submitting:
        await submitting.fill(noop, jobs)


async def pending(connection: Connection, at_once: int) -> list[list[UUID]]:
    """The tasks that can be claimed, the oldest first, in batches."""
    rows = await connection.fetch("SELECT id FROM task WHERE status = 'pending' ORDER BY id")
    return [[row["id"] for row in rows[start : start + at_once]] for start in range(0, len(rows), at_once)]


async def complete(connection: Connection, taken: Sequence[Claimed]) -> None:
    await settlements.complete(connection, [Completion(claimed.lease) for claimed in taken])


def terms() -> LeaseTerms:
    """Of a worker of their own."""
    return LeaseTerms(new_id(), 30, 5, 5)
