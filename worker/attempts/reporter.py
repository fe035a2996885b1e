"""Writes the progress of running steps into the database: the latest report of each step, at most twice a second."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import UUID

from leasehold.db.database import Pool
from leasehold.domain.lease import Lease
from leasehold.transitions.progress import Progress, report
from leasehold.transitions.quarantine import run_known_units

#: Seconds between two writes.
EVERY_SECONDS = 0.5
#: The name under which the table `quarantine` has the tasks whose reports PostgreSQL refused. The reporter still tries
#: to write later reports of such a task.
DUTY = "progress"


class Reporter:
    """Collects reports and writes them. Attempts call `report`, and a loop of the worker (runtime.periodic) calls
    `turn` every EVERY_SECONDS.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._latest: dict[UUID, Progress] = {}  # task id -> its latest report, not written yet
        self._reported = asyncio.Event()

    def report(self, lease: Lease, percent: float, summary: str) -> None:
        self._latest[lease.task_id] = Progress(lease, percent, summary)
        self._reported.set()

    async def turn(self) -> None:
        """Wait for a report, then write the latest report of each task. A report that PostgreSQL refuses is dropped,
        and the reports of the other tasks are written. If the whole write fails, for example during an outage, all
        these reports are dropped. That is no loss, because newer reports follow.
        """
        await self._reported.wait()
        self._reported.clear()
        latest, self._latest = self._latest, {}
        async with self._pool.acquire() as connection:

            async def write(batch: Sequence[Progress]) -> Sequence[None]:
                await report(connection, batch)
                return ()

            await run_known_units(
                connection, DUTY, list(latest.values()), write, lambda progress: progress.lease.task_id
            )
