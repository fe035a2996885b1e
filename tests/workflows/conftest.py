"""A database and workers for workflows. Their module has the app: tests/workflows/shop.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from leasehold.app.workflow import Workflow
from leasehold.db.database import Connection, connect
from leasehold.domain.registry import Pipelines
from leasehold.settings import Settings
from leasehold.transitions import jobs
from leasehold.transitions.jobs import NewJob, submit
from leasehold.transitions.workflows import signals
from leasehold.worker.worker import Worker
from tests.factories import assert_histories
from tests.workflows.shop import app

SECONDS = 60.0


@dataclass
class Runs:
    """Submits workflows and reads what became of them."""

    connection: Connection

    async def submit(self, workflow: Workflow, *args: Any, **kwargs: Any) -> UUID:
        job = NewJob(workflow.pipeline, tenant_id="t", params=workflow.arguments.encoded(args, kwargs))
        await submit(self.connection, [job])
        return job.id

    async def until(self, run_id: UUID, condition: str, *args: Any, within: float = SECONDS) -> None:
        """Wait until `condition` (of the job `j`) holds. Raises TimeoutError after `within` seconds."""
        async with asyncio.timeout(within):
            while not await self.connection.fetchval(f"SELECT {condition} FROM job j WHERE j.id = $1", run_id, *args):
                await asyncio.sleep(0.02)

    async def ended(self, run_id: UUID, within: float = SECONDS) -> tuple[str, Any]:
        """The state in which the run ends, and its result or error. Raises TimeoutError after `within` seconds."""
        await self.until(run_id, "j.finished_at IS NOT NULL", within=within)
        row = await self.connection.fetchrow(
            "SELECT j.status, j.error, (SELECT r.value FROM task t JOIN result r ON r.task_id = t.id"
            " WHERE t.job_id = j.id AND NOT t.contained) AS value FROM job j WHERE j.id = $1",
            run_id,
        )
        assert row is not None
        return row["status"], row["error"] if row["value"] is None else row["value"].get("value", row["value"])

    async def waits(self, run_id: UUID) -> None:
        """Wait until the workflow holds no lease."""
        await self.until(
            run_id, "EXISTS (SELECT 1 FROM task t WHERE t.job_id = j.id AND NOT t.contained AND t.status = 'waiting')"
        )

    async def signal(self, run_id: UUID, name: str, payload: Any) -> None:
        async with self.connection.transaction():
            await signals.send(self.connection, run_id, "t", name, payload, at_most=1000)

    async def cancel(self, run_id: UUID) -> str | None:
        """The run's new state; None: nothing changed."""
        cancels = await jobs.request_cancel(self.connection, [run_id], "t", reason="r", by="b")
        return cancels.states.get(run_id)

    async def steps(self, run_id: UUID) -> dict[str, str]:
        rows = await self.connection.fetch(
            "SELECT step, status FROM task WHERE job_id = $1 AND contained ORDER BY step", run_id
        )
        return {row["step"]: row["status"] for row in rows}

    async def journal(self, run_id: UUID) -> list[tuple[str, int, str, str, str]]:
        rows = await self.connection.fetch(
            "SELECT branch, number, kind, name, state FROM journal WHERE job_id = $1 ORDER BY branch, number", run_id
        )
        return [tuple(row) for row in rows]


@pytest.fixture
async def runs(settings: Settings) -> AsyncIterator[Runs]:
    connection = await connect(settings, "test")
    yield Runs(connection)
    await assert_histories(connection)
    await connection.close()


Start = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def worker_of(settings: Settings, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts a worker of the app, with these settings changed."""
    workers: list[Worker] = []

    async def start(**changes: Any) -> Worker:
        number = len(workers)
        values = {"work_dir": str(tmp_path / str(number)), "poll_seconds": 0.1, "lease_seconds": 60.0, **changes}
        worker = Worker(settings.model_copy(update=values), Pipelines(*(task.pipeline for task in app.tasks.values())))
        await worker.__aenter__()
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        await worker.__aexit__()
