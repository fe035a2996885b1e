"""Claims and completes tasks without a worker, so that a figure can time each statement by itself."""

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
    """Submit `jobs` jobs of one step that does nothing."""
    async with submitter(installation) as submitting:
        await submitting.fill(noop, jobs)


async def pending(connection: Connection, at_once: int) -> list[list[UUID]]:
    """The ids of the pending tasks, the oldest first, in batches of `at_once`."""
    rows = await connection.fetch("SELECT id FROM task WHERE status = 'pending' ORDER BY id")
    return [[row["id"] for row in rows[start : start + at_once]] for start in range(0, len(rows), at_once)]


async def complete(connection: Connection, batch: Sequence[Claimed]) -> None:
    await settlements.complete(connection, [Completion(claimed.lease, is_last=claimed.is_last) for claimed in batch])


def terms() -> LeaseTerms:
    """The lease terms of a worker that does not exist."""
    return LeaseTerms(new_id(), 30, 5, 5)
