"""/v1/dead-letters: the steps that failed for good. A client lists them, groups them by cause, and replays them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response

from leasehold.api.auth.security import RUNS_READ, RUNS_WRITE, Require
from leasehold.api.http.caller_first import CallerFirst
from leasehold.api.http.cursors import InstantCursor, cursor_of, instant_and_id_at
from leasehold.api.http.openapi import CHECKED_LATER, REFUSED_FOR_NOW, problems
from leasehold.api.http.responses import follow_up_run, json_response
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.api.runs.replays import retry, revive
from leasehold.api.runs.schemas import BulkReplayRequest, ReplayRequest
from leasehold.db import run_reads
from leasehold.db.database import Connection
from leasehold.domain.errors import Conflict, Invalid, NotFound, TooMany
from leasehold.limits.admission import queues_waited_in
from leasehold.transitions.runs import CreatedRun

router = APIRouter(tags=["dead letters"], prefix="/v1/dead-letters", route_class=CallerFirst)
Writer = Annotated[Caller, Depends(Require(RUNS_WRITE))]
Reader = Annotated[Caller, Depends(Require(RUNS_READ))]


@router.get(
    "",
    operation_id="listDeadLetters",
    summary="List dead letters, latest first",
    responses=problems({HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_cursor`"}),
)
async def list_dead_letters(
    request: Request,
    caller: Reader,
    template: Annotated[str | None, Query(max_length=63)] = None,
    code: Annotated[str | None, Query(max_length=200)] = None,
    fingerprint: Annotated[str | None, Query(max_length=64)] = None,
    cursor: InstantCursor = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 50,
) -> Response:
    async with services_of(request).pool.acquire() as connection:
        rows = await run_reads.dead_letters(
            connection,
            caller.tenant_id,
            before=instant_and_id_at(cursor),
            template=template,
            code=code,
            fingerprint=fingerprint,
            limit=limit + 1,
        )
    more = cursor_of(rows[limit - 1]["at"], rows[limit - 1]["task_id"]) if len(rows) > limit else None
    return json_response({"dead_letters": [dict(row) for row in rows[:limit]], "next_cursor": more})


@router.get("/groups", operation_id="groupDeadLetters", summary="Group dead letters by cause", responses=problems({}))
async def group_dead_letters(
    request: Request, caller: Reader, limit: Annotated[int, Query(ge=1, le=100)] = 50
) -> Response:
    """Groups the latest 10,000 dead letters by fingerprint: template, step, code, and the message without its
    numbers.
    """
    async with services_of(request).pool.acquire() as connection:
        rows = await run_reads.dead_letter_groups(connection, caller.tenant_id, limit)
    return json_response({"groups": [dict(row) for row in rows]})


@router.post(
    "/replay",
    operation_id="replayDeadLetters",
    summary="Replay the dead letters that match a filter",
    description="`refused` names the runs that cannot be replayed now, each with its code: another run has the same "
    "scope or dedupe key (`same_scope_running`, `same_key_running`), or the template was deleted. The others are "
    "replayed. With `canary` only the latest is replayed.",
    status_code=202,
    responses=problems({
        HTTPStatus.UNPROCESSABLE_ENTITY: "`filter_missing`, `batch_too_large`",
        HTTPStatus.TOO_MANY_REQUESTS: f"{REFUSED_FOR_NOW}, `bulk_writes_waiting`",
    }),
)  # fmt: skip
async def replay_many(request: Request, body: BulkReplayRequest, caller: Writer) -> Response:
    if not (body.fingerprint or body.template or body.code):
        raise Invalid("filter_missing", "Name a fingerprint, a template or a code.")
    services = services_of(request)
    replayed: list[CreatedRun] = []
    refused: list[dict[str, Any]] = []
    async with services.bulk.turn(caller.tenant_id), services.pool.acquire() as connection:
        rows = await run_reads.dead_letters(
            connection,
            caller.tenant_id,
            before=None,
            template=body.template,
            code=body.code,
            fingerprint=body.fingerprint,
            limit=1 if body.canary else body.limit,
        )
        run_ids = [*dict.fromkeys(row["run_id"] for row in rows)]
        async with connection.transaction():
            limit_headers = await services.admission.charge(connection, caller.payer, len(run_ids))
        try:
            for run_id in run_ids:
                try:
                    effects = await _replay(services, connection, caller, run_id)
                except (Conflict, NotFound) as error:  # this run cannot be replayed; the others can
                    refused.append({"run_id": run_id, "code": error.code, "detail": error.message})
                    continue
                if effects is not None:
                    replayed.append(effects)
        except TooMany:  # a limit of the tenant is full: what was replayed until now counts
            if not replayed:
                raise
        finally:
            await services.admission.refund(connection, caller.payer, len(run_ids) - len(replayed))
    for effects in replayed:
        await follow_up_run(services, effects)
    replayed_ids = [effects.id for effects in replayed]
    return json_response({"replayed": replayed_ids, "refused": refused}, HTTPStatus.ACCEPTED, limit_headers)


async def _replay(services: Services, connection: Connection, caller: Caller, run_id: UUID) -> CreatedRun | None:
    """Revive one run of a request that was charged as a whole. None: the run is not failed any more.

    Raises Conflict and NotFound for this run, TooMany for the tenant.
    """
    run = await run_reads.find_run(connection, caller.tenant_id, run_id)
    if run is None:
        return None
    known = await services.templates.of_run(connection, caller.tenant_id, run["template"], run["version"])
    async with connection.transaction(), services.admission.submitting(connection, caller.payer, {}, 0) as paid:
        effects = await revive(services, connection, caller, known, run)
        paid.queues |= await queues_waited_in(connection, run_id)
    return effects


@router.post(
    "/{task_id}/replay",
    operation_id="replayDeadLetter",
    summary="Replay a dead letter, with its own or another payload",
    status_code=202,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`dead_letter_not_found`",
        HTTPStatus.CONFLICT: "`resource_invalid_state`, `same_scope_running`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_payload`, `payload_too_complex`, `unknown_step`",
        HTTPStatus.TOO_MANY_REQUESTS: f"{REFUSED_FOR_NOW}, {CHECKED_LATER}",
    }),
)  # fmt: skip
async def replay_one(request: Request, task_id: UUID, caller: Writer, body: ReplayRequest | None = None) -> Response:
    services = services_of(request)
    async with services.pool.acquire() as connection:
        run_id = await connection.fetchval(
            "SELECT t.job_id FROM task t JOIN run r ON r.job_id = t.job_id"
            " WHERE t.id = $1 AND t.tenant_id = $2 AND t.status = 'failed'",
            task_id,
            caller.tenant_id,
        )
    if run_id is None:
        raise NotFound("dead_letter_not_found", "There is no such dead letter.")
    limit_headers = await retry(services, caller, run_id, body or ReplayRequest())
    return json_response({"run_id": run_id, "task_id": task_id}, HTTPStatus.ACCEPTED, limit_headers)
