"""The pages of queues, workers and concurrency limits (which bound the jobs under way). Only operators see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import ValidationError

from leasehold.api.auth.security import OPERATE
from leasehold.api.console.rendering import go_to, page
from leasehold.api.console.routes import Fields, form_error, whole_number
from leasehold.api.console.session import SignedIn
from leasehold.api.console.shared import Shared
from leasehold.api.console.state import state_of
from leasehold.api.fleet import operators as endpoints
from leasehold.api.http.cursors import TextsCursor, cursor_of_texts, texts_of_cursor
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.db import overview_reads, run_reads
from leasehold.db.job_reads import Row

router = APIRouter()
Operator = Annotated[Caller, Depends(SignedIn(OPERATE))]
#: Runnable tasks are counted up to _MAX_TASKS in each queue, and up to about _MAX_OF_ALL in all queues together.
_MAX_TASKS, _MAX_OF_ALL = 1000, 4000
#: The page of queues and the page of workers read their rows only once in this many seconds, for all requests.
_SHARED_SECONDS = 2.0
#: The page of a limit shows at most this many jobs that the limit has admitted, and at most this many jobs that wait.
_MAX_JOBS = 50
#: A page shows at most this many queues, or workers.
_MAX_QUEUES, _MAX_WORKERS = 200, 200


@router.get("/queues")
@may_read_standby
async def show_queues(request: Request, _caller: Operator) -> Response:
    services = services_of(request)
    silent_seconds = services.settings.silent_seconds_of_reads

    async def read() -> tuple[list[Row], list[Row]]:
        async with services.pool.acquire() as connection:
            queues = list(await run_reads.queues(connection, silent_seconds, _MAX_TASKS, _MAX_OF_ALL))
            shown_queues = [row["queue"] for row in queues[:_MAX_QUEUES]]
            return queues, list(await overview_reads.limits_of_queues(connection, shown_queues))

    shared_queues: Shared[tuple[list[Row], list[Row]]] = state_of(request).answers.named("queues", _SHARED_SECONDS)
    queues, limits = await shared_queues.get("all", read)
    return page(
        request,
        "queues.html",
        refresh_seconds=3,
        refresh_url=request.url.path,
        queues=queues,
        limits={limit["queue"]: limit for limit in limits},
        max_queues=_MAX_QUEUES,
        has_more=len(queues) >= run_reads.MAX_LISTED,
        max_jobs=overview_reads.MAX_AT_LIMIT,
    )


@router.post("/queues/{queue:path}/pause")
async def pause(request: Request, queue: endpoints.QueueName, caller: Operator, form: Fields) -> Response:
    await endpoints.pause_queue(request, queue, caller, endpoints.Pause(reason=form.get("reason", "")[:500]))
    state_of(request).answers.named("queues", _SHARED_SECONDS).forget()
    return go_to(request, "/queues", f"The queue {queue} is paused.")


@router.post("/queues/{queue:path}/resume")
async def resume(request: Request, queue: endpoints.QueueName, caller: Operator) -> Response:
    await endpoints.resume_queue(request, queue, caller)
    state_of(request).answers.named("queues", _SHARED_SECONDS).forget()
    return go_to(request, "/queues", f"The queue {queue} goes on.")


@router.get("/workers")
@may_read_standby
async def show_workers(request: Request, _caller: Operator) -> Response:
    services = services_of(request)
    silent_seconds = services.settings.silent_seconds_of_reads

    async def read() -> list[dict[str, Any]]:
        async with services.pool.acquire() as connection:
            rows = await run_reads.workers(connection, silent_seconds)
        return [dict(row) | _queues_and_labels(row["queues"]) for row in rows]

    shared_workers: Shared[list[dict[str, Any]]] = state_of(request).answers.named("workers", _SHARED_SECONDS)
    workers = await shared_workers.get("all", read)
    return page(
        request,
        "workers.html",
        refresh_seconds=3,
        refresh_url=request.url.path,
        workers=workers,
        max_workers=_MAX_WORKERS,
        has_more=len(workers) >= run_reads.MAX_LISTED,
    )


def _queues_and_labels(queue_names: Sequence[str]) -> dict[str, list[str]]:
    """A worker's queues, and its labels. A queue with a label (`QUEUE@LABEL`) adds only its label to the result."""
    labels = {queue.partition("@")[2] for queue in queue_names if "@" in queue}
    return {"queues": [queue for queue in queue_names if "@" not in queue], "labels": sorted(labels)}


@router.post("/workers/{worker_id}/drain")
async def drain(request: Request, worker_id: UUID, caller: Operator) -> Response:
    await endpoints.drain_worker(request, worker_id, caller)
    state_of(request).answers.named("workers", _SHARED_SECONDS).forget()
    return go_to(request, "/workers", "The worker finishes or releases what it has, and ends.")


@router.get("/limits")
@may_read_standby
async def show_limits(request: Request, _caller: Operator, cursor: TextsCursor = None) -> Response:
    async with services_of(request).pool.acquire() as connection:
        rows = await overview_reads.limits(connection, texts_of_cursor(cursor))
    # `limits` of overview_reads reads one row more than a page shows.
    limits = rows[: overview_reads.MAX_LIMITS]
    next_cursor = cursor_of_texts(limits[-1]["tenant_id"], limits[-1]["key"]) if len(rows) > len(limits) else None
    return page(
        request,
        "limits.html",
        refresh_seconds=5,
        refresh_url=f"{request.url.path}?{request.url.query}",
        limits=limits,
        cursor=cursor,
        next_cursor=next_cursor,
        max_jobs=overview_reads.MAX_AT_LIMIT,
    )


@router.get("/limits/jobs")
@may_read_standby
async def show_jobs_at_limit(
    request: Request,
    _caller: Operator,
    tenant: Annotated[str, Query(max_length=100)],
    key: Annotated[str, Query(max_length=1000)],
) -> Response:
    """Show the jobs that a limit has admitted, and the jobs that wait at it."""
    async with services_of(request).pool.acquire() as connection:
        inside_jobs, waiting_jobs = [
            await overview_reads.jobs_at_limit(connection, tenant, key, _MAX_JOBS + 1, admitted=is_inside)
            for is_inside in (True, False)
        ]
    return page(
        request,
        "limit_jobs.html",
        refresh_seconds=5,
        refresh_url=f"{request.url.path}?{request.url.query}",
        tenant=tenant,
        key=key,
        groups=[
            (name, jobs[:_MAX_JOBS], len(jobs) > _MAX_JOBS)
            for name, jobs in (("Inside", inside_jobs), ("Waiting", waiting_jobs))
        ],
        max_jobs=_MAX_JOBS,
    )


@router.post("/limits/set")
async def set_limit(request: Request, caller: Operator, form: Fields) -> Response:
    try:
        limit = endpoints.Limit(
            tenant_id=form.get("tenant", "").strip() or "*",
            key=form.get("key", "").strip(),
            at_most=whole_number(form, "at_most"),
            per_minute=whole_number(form, "per_minute"),
        )
    except ValidationError as error:
        raise form_error(error, "The limit") from None
    await endpoints.set_limit(request, limit, caller)
    return go_to(request, "/limits", f"The limit {limit.key} of {limit.tenant_id} is set.")


@router.post("/limits/lift")
async def lift_limit(request: Request, caller: Operator, form: Fields) -> Response:
    tenant_id, key = form.get("tenant", ""), form.get("key", "")
    await endpoints.lift_limit(request, tenant_id, key, caller)
    return go_to(request, "/limits", f"The limit {key} of {tenant_id} is lifted.")
