"""Dead letters: steps that failed for good, by what went wrong, and their replay by hand."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response

from leasehold.api.auth.security import RUNS_READ, RUNS_WRITE, Require
from leasehold.api.http.caller_first import CallerFirst
from leasehold.api.http.cursors import InstantCursor, cursor_of, instant_and_id_at
from leasehold.api.http.openapi import CHECKED_LATER, REFUSED_FOR_NOW, problems
from leasehold.api.http.responses import json_response, tell_of
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.api.runs.runs import retry, revived
from leasehold.api.runs.schemas import BulkReplayRequest, ReplayRequest
from leasehold.db import run_reads
from leasehold.db.database import Connection
from leasehold.domain.errors import Conflict, Invalid, NotFound, TooMany
from leasehold.limits.admission import queues_waited_in
from leasehold.transitions.runs import Made

router = APIRouter(tags=["dead letters"], prefix="/v1/dead-letters", route_class=CallerFirst)
Writer = Annotated[Caller, Depends(Require(RUNS_WRITE))]
Reader = Annotated[Caller, Depends(Require(RUNS_READ))]


@router.get(
    "",
    operation_id="listDeadLetters",
    summary="List dead letters, the latest first",
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


@router.get(
    "/groups", operation_id="groupDeadLetters", summary="Dead letters by what went wrong", responses=problems({})
)
async def group_dead_letters(
    request: Request, caller: Reader, limit: Annotated[int, Query(ge=1, le=100)] = 50
) -> Response:
    """Of the latest ten thousand. A fingerprint is template, step, code and the message without its numbers."""
    async with services_of(request).pool.acquire() as connection:
        rows = await run_reads.dead_letter_groups(connection, caller.tenant_id, limit)
    return json_response({"groups": [dict(row) for row in rows]})


@router.post(
    "/replay",
    operation_id="replayDeadLetters",
    summary="Replay all dead letters of a kind, or one of them first",
    description="`refused` names those that cannot run now, each with its code: another run has their place "
    "(`same_scope_running`, `same_key_running`), or their template is gone. The rest goes on.",
    status_code=202,
    responses=problems({
        HTTPStatus.UNPROCESSABLE_ENTITY: "`filter_missing`, `batch_too_large`",
        HTTPStatus.TOO_MANY_REQUESTS: f"{REFUSED_FOR_NOW}, `bulk_writes_waiting`",
    }),
)  # fmt: skip
async def replay_many(request: Request, asked: BulkReplayRequest, caller: Writer) -> Response:
    if not (asked.fingerprint or asked.template or asked.code):
        raise Invalid("filter_missing", "Say which: by fingerprint, template or code.")
    services = services_of(request)
    replayed: list[Made] = []
    refused: list[dict[str, Any]] = []
    async with services.bulk.turn(caller.tenant_id), services.pool.acquire() as connection:
        rows = await run_reads.dead_letters(
            connection,
            caller.tenant_id,
            before=None,
            template=asked.template,
            code=asked.code,
            fingerprint=asked.fingerprint,
            limit=1 if asked.canary else asked.limit,
        )
        asked_for = [*dict.fromkeys(row["run_id"] for row in rows)]
        async with connection.transaction():
            limited = await services.admission.charge(connection, caller.payer, len(asked_for))
        try:
            for run_id in asked_for:
                try:
                    made = await _replay(services, connection, caller, run_id)
                except (Conflict, NotFound) as error:  # of this one: its place is taken, or its template gone
                    refused.append({"run_id": run_id, "code": error.code, "detail": error.message})
                    continue
                if made is not None:
                    replayed.append(made)
        except TooMany:  # no more fit in
            if not replayed:
                raise
        finally:
            await services.admission.refund(connection, caller.payer, len(asked_for) - len(replayed))
    for made in replayed:
        await tell_of(services, made)
    replayed_ids = [made.id for made in replayed]
    return json_response({"replayed": replayed_ids, "refused": refused}, HTTPStatus.ACCEPTED, limited)


async def _replay(services: Services, connection: Connection, caller: Caller, run_id: UUID) -> Made | None:
    """One of those that were charged for together. None: it has not failed any more. Raises Conflict, NotFound."""
    found = await run_reads.find_run(connection, caller.tenant_id, run_id)
    if found is None:
        return None
    known = await services.templates.of_run(connection, caller.tenant_id, found["template"], found["version"])
    async with connection.transaction(), services.admission.submitting(connection, caller.payer, {}, 0) as paid:
        made = await revived(services, connection, caller, known, found)
        paid.queues |= await queues_waited_in(connection, run_id)
    return made


@router.post(
    "/{task_id}/replay",
    operation_id="replayDeadLetter",
    summary="Replay a dead letter, also with another payload",
    status_code=202,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`dead_letter_not_found`",
        HTTPStatus.CONFLICT: "`resource_invalid_state`, `same_scope_running`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_payload`, `payload_too_complex`, `unknown_step`",
        HTTPStatus.TOO_MANY_REQUESTS: f"{REFUSED_FOR_NOW}, {CHECKED_LATER}",
    }),
)  # fmt: skip
async def replay_one(request: Request, task_id: UUID, caller: Writer, asked: ReplayRequest | None = None) -> Response:
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
    limited = await retry(services, caller, run_id, asked or ReplayRequest())
    return json_response({"run_id": run_id, "task_id": task_id}, HTTPStatus.ACCEPTED, limited)
