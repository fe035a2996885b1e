"""/v1/scaling/{pool}: how much a pool of workers has to do, and how many workers it should have.

An autoscaler (KEDA, the autoscaler of a cloud, a cron job) calls this endpoint. A worker names its pool by
`LEASEHOLD_WORKER_POOL`, and the API's setting `LEASEHOLD_POOLS` declares the pools. A worker has slots. Each slot is
room for one attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from leasehold.api.auth.security import OPERATE, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.openapi import problems
from leasehold.api.http.responses import json_response
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.db import scaling_reads
from leasehold.db.job_reads import Row
from leasehold.domain.errors import NotFound
from leasehold.domain.scaling import QueueLoad, served_queues, wanted_workers
from leasehold.settings import POOL_NAME, WorkerPool

router = APIRouter(tags=["operators"], prefix="/v1", route_class=AuthenticatedFirst)


class VersionLoad(BaseModel):
    """The workers of one version. `wanted` is 0 for every version except the newest (the version of the worker that
    started last), because workers of older versions drain.
    """

    model_config = ConfigDict(extra="forbid")

    version: str
    workers: int = Field(ge=0)
    draining: int = Field(ge=0)
    running: int = Field(ge=0)
    wanted: int = Field(ge=0)


class Scaling(BaseModel):
    """`due`: tasks that could start now, counted up to 10,000 a queue. `oldest`: the seconds for which the oldest of
    them has waited. `slots`: the sum over all workers that do not drain; for each worker, the queue with the most slots
    counts. `attempt_seconds`: about how long the attempts that run now will take; null: none runs. `wanted`: the number
    of workers that the pool should have.
    """

    model_config = ConfigDict(extra="forbid")

    pool: str
    queues: list[str]
    due: int = Field(ge=0)
    running: int = Field(ge=0)
    oldest: float = Field(ge=0)
    slots: int = Field(ge=0)
    workers: int = Field(ge=0)
    attempt_seconds: float | None = Field(ge=0)
    target_wait_seconds: float = Field(gt=0)
    wanted: int = Field(ge=0)
    versions: list[VersionLoad]


@router.get(
    "/scaling/{pool}",
    operation_id="getScaling",
    summary="Get what a pool of workers should scale to",
    description="Reads at most 10,000 due tasks of each queue, of at most 2,000 pairs of a priority and a tenant, and "
    "at most 10,000 leases. The answer depends on the present size of the pool, so that it does not swing.",
    response_model=Scaling,
    responses=problems({HTTPStatus.NOT_FOUND: "`pool_not_found`"}),
)
async def get_scaling(
    request: Request,
    pool: Annotated[str, Path(max_length=40, pattern=POOL_NAME)],
    _caller: Annotated[Caller, Depends(Require(OPERATE))],
) -> Response:
    services = services_of(request)
    worker_pool = services.settings.pool(pool)
    if worker_pool is None:
        raise NotFound("pool_not_found", "LEASEHOLD_POOLS declares no such pool.")
    queues = sorted(served_queues(frozenset(worker_pool.queues) or _all_queues(services), worker_pool.labels))
    async with services.pool.acquire() as connection:
        due_rows = await scaling_reads.due_tasks(connection, queues)
        running_rows = await scaling_reads.running_attempts(connection, queues)
        workers = await scaling_reads.workers(connection, pool, services.settings.silent_seconds)
    return json_response(_answer(pool, worker_pool, queues, due_rows, running_rows, workers))


def _all_queues(services: Services) -> frozenset[str]:
    # The queues that the pipelines of this installation declare. A pool that declares no queues serves all of these.
    kind_pipelines = (pipeline for kind in services.kinds for pipeline in kind.pipelines)
    pipelines = (*services.templates.pipelines, *kind_pipelines)
    return frozenset(step.queue for pipeline in pipelines for step in pipeline.steps)


def _answer(
    pool: str,
    worker_pool: WorkerPool,
    queues: Sequence[str],
    due_rows: Sequence[Row],
    running_rows: Sequence[Row],
    workers: Sequence[Row],
) -> dict[str, Any]:
    """Build the answer. `due_rows`: a row for each queue. `running_rows`: a row for each queue and each version of the
    workers. `workers`: a row for each worker; the worker that started last is the first.
    """
    active_workers = [row for row in workers if not row["draining"]]
    loads = _loads(queues, due_rows, running_rows, active_workers)
    # The newest version is the version of the worker that started last. Only its workers count as present below,
    # because workers of older versions are to drain.
    newest_version = active_workers[0]["version"] if active_workers else None
    newest_workers = sum(row["version"] == newest_version for row in active_workers)
    bounds = {"least": worker_pool.least, "most": worker_pool.most}
    wanted = wanted_workers(loads, target_wait=worker_pool.target_wait_seconds, present=newest_workers, **bounds)
    total_running = sum(row["running"] for row in running_rows)
    # `attempt_seconds` of a row is a mean, so each row is weighted by its number of running attempts.
    total_seconds = sum(row["running"] * row["attempt_seconds"] for row in running_rows)
    versions = {row["version"]: None for row in workers}  # the newest first
    return {
        "pool": pool,
        "queues": list(queues),
        "due": sum(load.due for load in loads.values()),
        "running": total_running,
        "oldest": max((load.oldest for load in loads.values()), default=0.0),
        "slots": sum(max(row["slots"] or [0], default=0) for row in active_workers),
        "workers": len(active_workers),
        "attempt_seconds": total_seconds / total_running if total_running else None,
        "target_wait_seconds": worker_pool.target_wait_seconds,
        "wanted": wanted,
        "versions": [
            {
                "version": version,
                "workers": sum(row["version"] == version for row in active_workers),
                "draining": sum(row["version"] == version and row["draining"] for row in workers),
                "running": sum(row["running"] for row in running_rows if row["version"] == version),
                "wanted": wanted if version == newest_version else 0,
            }
            for version in versions
        ],
    }


def _loads(
    queues: Sequence[str], due_rows: Sequence[Row], running_rows: Sequence[Row], workers: Sequence[Row]
) -> Mapping[str, QueueLoad]:
    """The load of each queue. Its `slots`: the largest number of slots that one worker has for this queue."""
    due_by_queue = {row["queue"]: row for row in due_rows}
    slots: dict[str, int] = {}
    for row in workers:
        for queue, slot_count in zip(row["queues"], row["slots"] or [], strict=False):
            slots[queue] = max(slots.get(queue, 0), slot_count)
    loads = {}
    for queue in queues:
        queue_rows = [row for row in running_rows if row["queue"] == queue]
        count = sum(row["running"] for row in queue_rows)
        loads[queue] = QueueLoad(
            due=due_by_queue[queue]["due"] if queue in due_by_queue else 0,
            running=count,
            oldest=due_by_queue[queue]["oldest"] if queue in due_by_queue else 0.0,
            attempt_seconds=sum(row["running"] * row["attempt_seconds"] for row in queue_rows) / count
            if count
            else None,
            slots=slots.get(queue),
        )
    return loads
