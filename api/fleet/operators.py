"""/v1/queues, /v1/workers and /v1/limits: operators read and pause queues, read and drain workers, and set limits. A
worker that drains claims no more tasks, and exits when its attempts have ended.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from leasehold.api.auth.audit import record
from leasehold.api.auth.security import OPERATE, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.cursors import (
    InstantCursor,
    TextsCursor,
    cursor_of,
    cursor_of_texts,
    instant_and_id_of_cursor,
    texts_of_cursor,
)
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.http.openapi import problems
from leasehold.api.http.responses import json_response, publish_and_admit
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.db import run_reads
from leasehold.domain.concurrency_limit import EVERYBODY, ConcurrencyLimit
from leasehold.domain.errors import NotFound
from leasehold.domain.json_values import JsonNumber
from leasehold.limits.bounds import check_room
from leasehold.transitions import limits, queues, workers

router = APIRouter(tags=["operators"], prefix="/v1", route_class=AuthenticatedFirst)
Operator = Annotated[Caller, Depends(Require(OPERATE))]
#: _TEMPLATE: the pattern of the name of a template or a kind. _KEY: the pattern of the key of a limit.
_TEMPLATE = r"[a-z][a-z0-9_-]{0,62}(\.[a-z][a-z0-9_-]{0,62})?"
_KEY = rf"^(tenant|queue:[a-z][a-z0-9_-]{{0,62}}|template:{_TEMPLATE}|payload:{_TEMPLATE}:(/[^/\n]{{1,100}}){{1,5}})$"
#: The name of a queue. The bound of 200 characters is longer than any queue's name, and short enough for an index. The
#: name of a queue of external workers contains the name of its tenant, which may have slashes. Therefore the addresses
#: have `{queue:path}`.
QueueName = Annotated[str, Path(min_length=1, max_length=200)]
PageLimit = Annotated[int, Query(ge=1, le=1000)]
#: The problems that the lists document.
_PAGES = problems({HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_cursor`, `invalid_request`"})


class Pause(BaseModel):
    model_config = ConfigDict(extra="forbid")

    reason: str = Field("", max_length=500)


class Limit(BaseModel):
    """`key`: `queue:Q`, `template:T`, `tenant`, or `payload:T:/pointer`, which limits the jobs of each value at this
    place of the payload separately. T is a template, or a kind: `media`, `conversion`, `generation`.

    `tenant_id`: the tenant whose jobs the limit counts. With `*`, the limit counts the jobs of all tenants together.
    Exception: with `*` and the key `tenant`, it counts the jobs of each tenant separately.
    """

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "anyOf": [
                {"required": [name], "properties": {name: {"type": "integer"}}} for name in ("at_most", "per_minute")
            ]
        },
    )

    tenant_id: str = Field(EVERYBODY, min_length=1, max_length=100)
    key: str = Field(pattern=_KEY)
    at_most: Annotated[int, Field(ge=0, le=1_000_000), JsonNumber] | None = Field(None, description="Jobs at once.")
    per_minute: Annotated[int, Field(ge=0, le=1_000_000), JsonNumber] | None = Field(
        None, description="Jobs that start within any minute."
    )

    @model_validator(mode="after")
    def _bounds_something(self) -> Limit:
        if self.at_most is None and self.per_minute is None:
            raise ValueError("a limit needs at_most, per_minute or both")
        return self


@router.get(
    "/queues",
    operation_id="listQueues",
    summary="List queues, those of external workers last",
    description="Each queue has `queue`, `runnable` (tasks that wait for a worker now, counted up to a bound), "
    "`has_more` (there may be more than were counted), `oldest`, `workers` (those that take work, and have had a "
    "heartbeat within three renewals), `starts_per_minute` (attempts that the "
    "registered workers started within the last minute, as of their last heartbeats; null for queues of external "
    "workers) and `paused_because`.",
    responses=_PAGES,
)
@may_read_standby
async def list_queues(
    request: Request, _caller: Operator, cursor: TextsCursor = None, limit: PageLimit = run_reads.MAX_LISTED
) -> Response:
    services = services_of(request)
    silent_seconds = services.settings.silent_seconds_of_reads
    after, _ = texts_of_cursor(cursor) or (None, "")
    async with services.pool.acquire() as connection:
        rows = await run_reads.queues(connection, silent_seconds, after=after, limit=limit + 1)
    next_cursor = cursor_of_texts(rows[limit - 1]["queue"], "") if len(rows) > limit else None
    return json_response({"queues": [dict(row) for row in rows[:limit]], "next_cursor": next_cursor})


@router.post(
    "/queues/{queue:path}/pause",
    operation_id="pauseQueue",
    summary="Pause a queue",
    description="No task of the queue starts. Running tasks go on, and submissions are still accepted.",
    responses=problems({}),
)
async def pause_queue(request: Request, queue: QueueName, caller: Operator, body: Pause | None = None) -> Response:
    async with services_of(request).pool.acquire() as connection, connection.transaction():
        reason = body.reason if body is not None and body.reason else f"paused by {caller.client_id}"
        await queues.pause(connection, queue, reason)
        await record(connection, caller, "queue.paused", queue, tenant_id=EVERYBODY, reason=reason)
    return json_response({"queue": queue, "paused": True})


@router.post(
    "/queues/{queue:path}/resume", operation_id="resumeQueue", summary="Resume a queue", responses=problems({})
)
async def resume_queue(request: Request, queue: QueueName, caller: Operator) -> Response:
    services = services_of(request)
    async with services.pool.acquire() as connection, connection.transaction():
        hints = await queues.resume(connection, queue)  # messages that tell workers of the queue's tasks
        await record(connection, caller, "queue.resumed", queue, tenant_id=EVERYBODY)
    services.announcer.announce(hints)
    return json_response({"queue": queue, "paused": False})


@router.get(
    "/workers",
    operation_id="listWorkers",
    summary="List workers, the oldest first",
    description="Each worker has, among others, `leases` (the tasks that it has leased), `draining`, `seen_at` (its "
    "last heartbeat) and `silent` (no heartbeat within three renewals: mostly it has died, and its row is left).",
    responses=_PAGES,
)
@may_read_standby
async def list_workers(
    request: Request, _caller: Operator, cursor: InstantCursor = None, limit: PageLimit = run_reads.MAX_LISTED
) -> Response:
    services = services_of(request)
    silent_seconds = services.settings.silent_seconds_of_reads
    after = instant_and_id_of_cursor(cursor)
    async with services.pool.acquire() as connection:
        rows = await run_reads.workers(connection, silent_seconds, after=after, limit=limit + 1)
    last_row = rows[limit - 1] if len(rows) > limit else None
    next_cursor = None if last_row is None else cursor_of(last_row["started_at"], last_row["id"])
    return json_response({"workers": [dict(row) for row in rows[:limit]], "next_cursor": next_cursor})


@router.post(
    "/workers/{worker_id}/drain",
    operation_id="drainWorker",
    summary="Drain a worker",
    description="Within its renewal interval the worker stops claiming tasks, finishes or releases those it has, "
    "and exits.",
    status_code=202,
    responses=problems({HTTPStatus.NOT_FOUND: "`worker_not_found`"}),
)
async def drain_worker(request: Request, worker_id: UUID, caller: Operator) -> Response:
    async with services_of(request).pool.acquire() as connection, connection.transaction():
        if not await workers.ask_to_drain(connection, worker_id):
            raise NotFound("worker_not_found", "There is no such worker.")
        await record(connection, caller, "worker.drained", worker_id, tenant_id=EVERYBODY)
    return json_response({"id": worker_id, "draining": True}, HTTPStatus.ACCEPTED)


@router.get(
    "/limits",
    operation_id="listLimits",
    summary="List limits, by tenant and key",
    responses=_PAGES,
)
@may_read_standby
async def list_limits(
    request: Request, _caller: Operator, cursor: TextsCursor = None, limit: PageLimit = 1000
) -> Response:
    tenant_id, key = texts_of_cursor(cursor) or (None, None)  # of the last limit on the previous page
    async with services_of(request).pool.acquire() as connection:
        rows = await connection.fetch(
            # A row of `gate` is a limit. `declared`: an operator has set it.
            "SELECT tenant_id, key, at_most, per_minute FROM gate"
            " WHERE declared AND ($1::text IS NULL OR (tenant_id, key) > ($1, $2::text))"
            " ORDER BY tenant_id, key LIMIT $3",
            tenant_id,
            key,
            limit + 1,
        )
    last_row = rows[limit - 1] if len(rows) > limit else None
    next_cursor = None if last_row is None else cursor_of_texts(last_row["tenant_id"], last_row["key"])
    return json_response({"limits": [dict(row) for row in rows[:limit]], "next_cursor": next_cursor})


@router.put(
    "/limits",
    operation_id="setLimit",
    summary="Set a limit",
    responses=problems({
        HTTPStatus.CONFLICT: "`too_many_limits`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`limit_without_effect`: no job could ever count in it; `invalid_request`",
    }),
)  # fmt: skip
async def set_limit(request: Request, body: Limit, caller: Operator) -> Response:
    services = services_of(request)
    async with services.pool.acquire() as connection, connection.transaction():
        if not await limits.is_declared(connection, body.tenant_id, body.key):
            # A new limit needs room. Raises Conflict `too_many_limits`.
            await check_room(connection, "gate", body.tenant_id, services.settings.limits_per_tenant)
        limit = ConcurrencyLimit(body.tenant_id, body.key, body.at_most, body.per_minute)
        kind_pipelines = (pipeline for kind in services.kinds for pipeline in kind.pipelines)
        # `declare` gets the pipelines to check whether any job could count in the limit.
        limit_names = await limits.declare(connection, (*services.templates.pipelines, *kind_pipelines), limit)
        bounds = {"at_most": body.at_most, "per_minute": body.per_minute}
        await record(connection, caller, "limit.set", body.key, tenant_id=body.tenant_id, **bounds)
    await publish_and_admit(services, hints=[], limits=limit_names)
    return json_response(body.model_dump())


@router.delete(
    "/limits/{tenant_id:path}/{key:path}",
    operation_id="liftLimit",
    summary="Lift a limit",
    responses=problems({HTTPStatus.NOT_FOUND: "`limit_not_found`"}),
)
async def lift_limit(request: Request, tenant_id: str, key: str, caller: Operator) -> Response:
    services = services_of(request)
    # The route alone cannot tell where the key begins, because the tenant and the key may have slashes.
    tenant_id, key = _split(f"{tenant_id}/{key}")
    async with services.pool.acquire() as connection, connection.transaction():
        limit_ids = await limits.withdraw(connection, tenant_id, key)
        if not limit_ids:
            raise NotFound("limit_not_found", "There is no such limit.")
        await record(connection, caller, "limit.lifted", key, tenant_id=tenant_id)
    await publish_and_admit(services, hints=[], limits=limit_ids)
    return json_response({"tenant_id": tenant_id, "key": key})


def _split(address: str) -> tuple[str, str]:
    """The tenant and the key of `TENANT/KEY`. Both may have slashes. The key begins after the first slash that a
    well-formed key follows. Raises NotFound.
    """
    for found in re.finditer("/", address):
        tenant_id, key = address[: found.start()], address[found.end() :]
        if tenant_id and re.fullmatch(_KEY, key):
            return tenant_id, key
    raise NotFound("limit_not_found", "There is no such limit.")
