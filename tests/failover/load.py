"""Jobs that are submitted one after another, the worker that does them, and what must be true of them at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID

from leasehold.db.database import connected
from leasehold.runtime.transient import until_answered
from leasehold.settings import Settings
from leasehold.transitions import jobs
from leasehold.worker.worker import Worker
from tests.failover.work import napping

#: How long a submission is repeated, or the end of all jobs is awaited.
SECONDS = 60.0
_POLL_SECONDS = 0.05


class Cluster(Protocol):
    def settings(self, **more: Any) -> Settings: ...


def worker_of(cluster: Cluster, tmp_path: Path) -> Worker:
    return Worker(
        cluster.settings(
            pipelines="tests.failover.work:pipelines",
            object_store="none",
            work_dir=str(tmp_path),
            poll_seconds=0.1,
            database_host_timeout=0.5,
        )
    )


class Submissions:
    """Submits until it is stopped. What is acknowledged must be there afterwards; a submission without an answer is
    repeated with its id.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.acknowledged: set[UUID] = set()
        self._settings = cluster.settings(database_host_timeout=0.5)
        self._stopping = False
        self._running = asyncio.create_task(self._submit())

    async def reach(self, count: int) -> None:
        while len(self.acknowledged) < count:
            if self._running.done():
                await self._running
            await asyncio.sleep(_POLL_SECONDS)

    async def stop(self) -> None:
        self._stopping = True
        await self._running

    async def _submit(self) -> None:
        while not self._stopping:
            job = jobs.NewJob(napping, "t")

            async def write(job: jobs.NewJob = job) -> None:
                async with connected(self._settings, "test") as connection:
                    # An earlier try may have written it. Only a commit says that it stays: a standby, or a primary that
                    # has given up waiting for one, may show a row that the promoted server never had.
                    if not await connection.fetchval(
                        "UPDATE job SET params = params WHERE id = $1 RETURNING 1", job.id
                    ):
                        await jobs.submit(connection, [job])

            await until_answered(write, within=SECONDS)
            self.acknowledged.add(job.id)


async def all_ended(cluster: Cluster) -> None:
    async with asyncio.timeout(SECONDS), connected(cluster.settings(), "test") as connection:
        while await connection.fetchval("SELECT count(*) FROM job WHERE finished_at IS NULL"):
            await asyncio.sleep(_POLL_SECONDS)


async def nothing_was_charged(cluster: Cluster, submitted: Iterable[UUID]) -> None:
    """Every job has succeeded, each step by one commit, and no attempt counts as lost."""
    async with connected(cluster.settings(), "test") as connection:
        statuses = {row["id"]: row["status"] for row in await connection.fetch("SELECT id, status FROM job")}
        lost, unknown = set(submitted) - statuses.keys(), statuses.keys() - set(submitted)
        assert (lost, unknown) == (set(), set())
        assert set(statuses.values()) == {"succeeded"}
        assert await connection.fetch("SELECT * FROM failure") == []
        assert await connection.fetch("SELECT id FROM task WHERE losses + errors + crashes > 0") == []
        settled = "SELECT count(*) FROM history WHERE task_status = 'succeeded' GROUP BY task_id"
        assert {row["count"] for row in await connection.fetch(settled)} == {1}
