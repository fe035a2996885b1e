"""/v1/unsettled lists the cases that wait for a person's decision. POST /v1/jobs/{job_id}/settle settles one order (a
step's request to a provider), and POST /v1/unsettled/settle settles many.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from time import monotonic
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response

from leasehold.api.auth.security import JOBS_OPERATE, JOBS_READ, OPERATE, RUNS_READ, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.cursors import IdCursor, cursor_of, id_of_cursor
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.http.openapi import REFUSED_FOR_NOW, problems
from leasehold.api.http.responses import json_response
from leasehold.api.jobs.access import find
from leasehold.api.jobs.schemas import BulkSettleRequest, SettleRequest, UnsettledPage
from leasehold.api.jobs.settling import settle
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.api.process.tenant_pool import BULK_SECONDS, NOT_TRIED, NotInTime, in_time
from leasehold.db import unsettled
from leasehold.db.database import Connection
from leasehold.domain.errors import RequestError, TooMany, Unavailable
from leasehold.kinds.job_kinds import UnknownOrders
from leasehold.security.egress import shown_host

router = APIRouter(tags=["jobs"], prefix="/v1", route_class=AuthenticatedFirst)
Reader = Annotated[Caller, Depends(Require(JOBS_READ))]
Operator = Annotated[Caller, Depends(Require(JOBS_OPERATE))]
#: The sorts of cases. The endpoint `listUnsettled` describes each of them.
What = Literal["orders", "approvals", "external", "webhooks", "schedules"]
#: The items of a page, newest first, and the id at which the page ended (the `before` of the next page). The id is None
#: if this is the last page.
_ItemsAndNext = tuple[list[dict[str, Any]], UUID | None]


@router.get(
    "/unsettled",
    operation_id="listUnsettled",
    summary="List what only a person can settle, newest first",
    description="`orders`: failed, expired and cancelled jobs that sent an order whose outcome is unknown, with what "
    "was sent, when and to whom. `approvals`: runs whose workflow waits for signals. `external`: steps that no "
    "external worker has claimed, or whose worker is silent, for `LEASEHOLD_EXTERNAL_SILENT_SECONDS`. `webhooks`: "
    "webhooks that the platform disabled. `schedules`: schedules that the platform paused; only a key with `runs:read` "
    "gets them. A page of `orders` searches 10,000 failed and expired jobs of each pipeline and 10,000 cancelled jobs, "
    "a page of `approvals` 10,000 unfinished jobs, and a page of `external` 10,000 unfinished jobs with external "
    "steps. So a page of these may have fewer items than `limit` although there is a next page: `next_cursor` tells.",
    response_model=UnsettledPage,
    responses=problems({HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_cursor`, `invalid_request`"}),
)
@may_read_standby
async def list_unsettled(
    request: Request,
    caller: Reader,
    what: What = "orders",
    tenant: Annotated[str | None, Query(max_length=100, description="For operators: only jobs of this tenant.")] = None,
    cursor: IdCursor = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 50,
) -> Response:
    services, before = services_of(request), id_of_cursor(cursor)
    tenant_id = tenant if tenant is not None and OPERATE in caller.scopes else caller.tenant_id
    async with services.pool.acquire() as connection:
        items, next_id = await read_unsettled(connection, services, caller, what, tenant_id, before, limit)
    return json_response({"items": items, "next_cursor": None if next_id is None else cursor_of(next_id)})


async def read_unsettled(
    connection: Connection,
    services: Services,
    caller: Caller,
    what: What,
    tenant_id: str,
    before: UUID | None,
    limit: int,
) -> _ItemsAndNext:
    """A page of cases of the sort `what`: at most `limit` items, only of the kinds of work that the caller may read.
    `before`: the id at which the previous page ended; None: read the first page.
    """
    read_items = {
        "orders": _read_orders, "approvals": _read_approvals, "external": _read_external_steps,
        "webhooks": _read_webhooks, "schedules": _read_schedules,
    }[what]  # fmt: skip
    return await read_items(connection, services, caller, tenant_id, before, limit)


async def count_unknown_orders(
    connection: Connection, services: Services, caller: Caller, max_searched: int
) -> tuple[int, bool]:
    """The number of orders of the caller's tenant that people have to settle, and whether jobs that were not searched
    may have more. `max_searched`: as for `unsettled.count_orders`. Only orders of kinds of work that the caller may
    read are counted.
    """
    orders_by_pipeline = _unknown_orders(services, caller, caller.tenant_id)
    if not orders_by_pipeline:
        return 0, False
    codes = {code for orders in orders_by_pipeline.values() for code in orders.codes}
    ordering = _ordering(orders_by_pipeline)
    return await unsettled.count_orders(connection, caller.tenant_id, ordering, sorted(codes), max_searched)


def _unknown_orders(services: Services, caller: Caller, tenant_id: str) -> dict[str, UnknownOrders]:
    """Pipeline that sends orders -> how people settle its orders. Only pipelines of kinds that the caller may read."""
    kinds = services.job_kinds
    return {
        pipeline: orders
        for pipeline in kinds.permitted_jobs(tenant_id, caller.scopes, write=False).pipelines
        if (orders := kinds.of(pipeline, is_run=False).operations.unknown_orders) is not None
    }


def _ordering(orders_by_pipeline: Mapping[str, UnknownOrders]) -> list[tuple[str, str, str]]:
    """The steps that send orders: for each step, its pipeline, its name, and the member of its note that records the
    order.
    """
    return [(pipeline, orders.step, orders.intent) for pipeline, orders in orders_by_pipeline.items()]


async def _read_orders(
    connection: Connection, services: Services, caller: Caller, tenant_id: str, before: UUID | None, limit: int
) -> _ItemsAndNext:
    kinds = services.job_kinds
    orders_by_pipeline = _unknown_orders(services, caller, tenant_id)
    if not orders_by_pipeline:
        return [], None
    rows, next_id = await unsettled.orders(connection, tenant_id, _ordering(orders_by_pipeline), before, limit)
    items = []
    for row in rows:
        kind = kinds.of(row["pipeline"], is_run=False)
        # `note`: what the step wrote down before it sent the order.
        sent_order = orders_by_pipeline[row["pipeline"]].sent(row["params"], row["note"], row["job_id"])
        because = "The job was cancelled." if row["error"] is None else row["error"]["message"]
        items.append({
            "job_id": row["job_id"], "tenant_id": row["tenant_id"], "kind": kind.name, "since": row["since"],
            "because": because, "system": sent_order.system,
            "sent_at": sent_order.at, "sent": sent_order.what,
        })  # fmt: skip
    return items, next_id


async def _read_approvals(
    connection: Connection, services: Services, caller: Caller, tenant_id: str, before: UUID | None, limit: int
) -> _ItemsAndNext:
    if not services.job_kinds.permitted_jobs(tenant_id, caller.scopes, write=False).runs:  # the caller may read no runs
        return [], None
    rows, next_id = await unsettled.waiting_runs(connection, tenant_id, before, limit)
    items = [
        {
            "job_id": row["job_id"], "tenant_id": row["tenant_id"], "kind": "run", "template": row["pipeline"],
            "since": row["since"], "because": f"waits for the signal {' or '.join(row['signals'])}",
            "signals": row["signals"], "until": row["until"],
        }
        for row in rows
    ]  # fmt: skip
    return items, next_id


async def _read_external_steps(
    connection: Connection, services: Services, caller: Caller, tenant_id: str, before: UUID | None, limit: int
) -> _ItemsAndNext:
    if not services.job_kinds.permitted_jobs(tenant_id, caller.scopes, write=False).runs:
        return [], None
    seconds = services.settings.external_silent_seconds
    rows, next_id = await unsettled.silent_steps(connection, tenant_id, seconds, before, limit)
    items = [
        {
            "job_id": row["job_id"], "task_id": row["task_id"], "tenant_id": row["tenant_id"], "kind": "run",
            "since": row["since"], "because": f"no external worker works on the step {row['step']}",
            "step": row["step"], "queue": row["queue"],
            "losses": row["losses"],  # how many workers were lost while they worked on the step
        }
        for row in rows
    ]  # fmt: skip
    return items, next_id


async def _read_webhooks(
    connection: Connection, _services: Services, _caller: Caller, tenant_id: str, before: UUID | None, limit: int
) -> _ItemsAndNext:
    # One row more than the page has shows whether there is a next page.
    rows = await unsettled.disabled_webhooks(connection, tenant_id, before, limit + 1)
    items = [
        {
            "webhook_id": row["webhook_id"], "tenant_id": row["tenant_id"], "kind": "webhook",
            "since": row["since"], "because": row["disabled_because"], "system": shown_host(row["url"]),
        }
        for row in rows[:limit]
    ]  # fmt: skip
    return items, rows[limit - 1]["webhook_id"] if len(rows) > limit else None


async def _read_schedules(
    connection: Connection, _services: Services, caller: Caller, tenant_id: str, before: UUID | None, limit: int
) -> _ItemsAndNext:
    if RUNS_READ not in caller.scopes:
        return [], None
    rows = await unsettled.paused_schedules(connection, tenant_id, before, limit + 1)
    items = [
        {
            "schedule_id": row["schedule_id"], "tenant_id": row["tenant_id"], "kind": "run",
            "template": row["template"], "since": row["updated_at"], "because": row["paused_because"],
        }
        for row in rows[:limit]
    ]  # fmt: skip
    return items, rows[limit - 1]["schedule_id"] if len(rows) > limit else None


#: For the API reference: the problems if there is no such job, or no longer.
_MISSING = {HTTPStatus.NOT_FOUND: "`job_not_found`", HTTPStatus.GONE: "`job_deleted`, `job_expired`"}


@router.post(
    "/jobs/{job_id}/settle",
    operation_id="settleJob",
    summary="Settle an order whose outcome is unknown",
    description="`adopt`: the order arrived, and `ref` is its id at the provider: the job goes on with this order. "
    "`again`: order once more. `give_up`: the job stays as it is, and is listed no more. An expired or cancelled job "
    "does not run again: `again` is refused, and after `adopt` the order is withdrawn at the provider. If two requests "
    "settle the same order, the first decides; the problem of the second names the person and the decision.",
    status_code=202,
    responses=problems(_MISSING | {
        HTTPStatus.CONFLICT: "`already_settled`, `order_adopted`: another job has this order; "
        "`resource_invalid_state`; `same_key_running`, `pipeline_not_served`, `order_being_withdrawn`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`order_not_adoptable`, `invalid_request`",
        HTTPStatus.TOO_MANY_REQUESTS: REFUSED_FOR_NOW,
    }),
)  # fmt: skip
async def settle_job(request: Request, job_id: UUID, body: SettleRequest, caller: Operator) -> Response:
    services = services_of(request)
    permitted_job = await find(services, caller, job_id, write=True)
    limit_headers = await settle(services, permitted_job, body)
    return json_response({"id": job_id, "action": body.action}, HTTPStatus.ACCEPTED, limit_headers)


@router.post(
    "/unsettled/settle",
    operation_id="settleJobs",
    summary="Settle many orders, each by itself",
    description="`refused` names the jobs that could not be settled, each with its code, such as "
    "`database_unavailable` for one that somebody else has locked for long, and for all jobs that are left after "
    "half a minute, which are not tried. The others are settled.",
    status_code=202,
    responses=problems({
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`",
        HTTPStatus.TOO_MANY_REQUESTS: f"{REFUSED_FOR_NOW}, `bulk_writes_waiting`",
    }),
)  # fmt: skip
async def settle_jobs(request: Request, body: BulkSettleRequest, caller: Operator) -> Response:
    services = services_of(request)
    settled_ids: list[UUID] = []
    refusals: list[dict[str, Any]] = []
    limit_headers: dict[str, str] = {}
    away: NotInTime | None = None  # the last error of a job that PostgreSQL did not write in time
    async with services.bulk.turn(caller.tenant_id):  # bounds how many such requests run at once
        ends_at = monotonic() + BULK_SECONDS
        for index, item in enumerate(body.settlements):
            if index and monotonic() > ends_at:
                refusals += [
                    {"job_id": each.job_id, "code": NotInTime().code, "detail": NOT_TRIED}
                    for each in body.settlements[index:]
                ]
                break
            try:
                # `in_time` raises NotInTime if PostgreSQL does not write this job in time.
                with in_time("settlements"):
                    permitted_job = await find(services, caller, item.job_id, write=True)
                    limit_headers = await settle(services, permitted_job, item)
            except RequestError as error:  # this job cannot be settled, but the others may be
                if isinstance(error, NotInTime):
                    away = error
                elif isinstance(error, TooMany | Unavailable) and not settled_ids:  # the other jobs would get it, too
                    raise
                refusals.append({"job_id": item.job_id, "code": error.code, "detail": error.message})
            else:
                settled_ids.append(item.job_id)
    # If no job was settled, the whole request fails with this error.
    if away is not None and not settled_ids:
        raise away
    return json_response({"settled": settled_ids, "refused": refusals}, HTTPStatus.ACCEPTED, limit_headers)
