"""/v1/dead-letters: the steps that failed for good, in jobs of every kind. A client lists them, groups them by cause,
and replays them (retries their jobs).

To list or group dead letters, a key needs `jobs:read`, and the scope to read the kind. To replay them, it needs
`jobs:operate`, and the scope to write the kind. For runs, `runs:read` or `runs:write` alone is enough, because earlier
releases, which had dead letters only of runs, asked for no other scope.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from http import HTTPStatus
from time import monotonic
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response

from leasehold.actions.retrying import revive, template_of
from leasehold.api.auth.security import JOBS_OPERATE, JOBS_READ, OPERATE, RUNS_READ, RUNS_WRITE, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.cursors import InstantCursor, cursor_of, instant_and_id_of_cursor
from leasehold.api.http.idempotent import Answer, IdempotencyKey, once_over_transactions
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.http.openapi import REFUSED_FOR_NOW, TOO_MANY_CHECKS, problems
from leasehold.api.http.responses import encoded, json_response, publish_run_effects
from leasehold.api.jobs.access import JobAccess, access_of, check_retry, params_of_retry
from leasehold.api.jobs.ending import record
from leasehold.api.jobs.retrying import retry
from leasehold.api.jobs.schemas import BulkReplayRequest, RetryRequest
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.api.process.tenant_pool import BULK_SECONDS, NOT_TRIED, NotInTime, in_time
from leasehold.db import job_reads
from leasehold.db.database import Connection
from leasehold.db.idempotency import fingerprint as fingerprint_of
from leasehold.db.job_reads import DeadLetterFilter, Row
from leasehold.domain.errors import Conflict, Forbidden, Invalid, NotFound, RequestError, TooMany, Unavailable
from leasehold.domain.kind import RUN
from leasehold.transitions.runs import CreatedRun

router = APIRouter(tags=["dead letters"], prefix="/v1/dead-letters", route_class=AuthenticatedFirst)
Writer = Annotated[Caller, Depends(Require(JOBS_OPERATE, or_scope=RUNS_WRITE))]
Reader = Annotated[Caller, Depends(Require(JOBS_READ, or_scope=RUNS_READ))]


@router.get(
    "",
    operation_id="listDeadLetters",
    summary="List dead letters, latest first",
    description="A page searches 10,000 failed steps. So it may have fewer dead letters than `limit`, or none, "
    "although there is a next page: `next_cursor` tells. Bulk operations on jobs of other tenants are listed only for "
    "a key with `fleet:operate`.",
    responses=problems({HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_cursor`"}),
)
@may_read_standby
async def list_dead_letters(
    request: Request,
    caller: Reader,
    kind: Annotated[str | None, Query(max_length=63)] = None,
    template: Annotated[str | None, Query(max_length=63)] = None,
    code: Annotated[str | None, Query(max_length=200)] = None,
    fingerprint: Annotated[str | None, Query(max_length=64)] = None,
    cursor: InstantCursor = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 50,
) -> Response:
    services = services_of(request)
    letter_filter = dead_letter_filter(services, caller, kind, template, code)
    async with services.pool.acquire() as connection:
        rows, following = await job_reads.dead_letters_page(
            connection,
            caller.tenant_id,
            letter_filter,
            before=instant_and_id_of_cursor(cursor),
            fingerprint=fingerprint,
            limit=limit,
        )
    next_cursor = None if following is None else cursor_of(*following)
    return json_response({"dead_letters": [_json_of(services, row) for row in rows], "next_cursor": next_cursor})


def dead_letter_filter(
    services: Services,
    caller: Caller,
    kind: str | None,
    template: str | None,
    code: str | None,
    *,
    write: bool = False,
) -> DeadLetterFilter:
    """The filter that finds the dead letters that the caller may read. With `write`, it finds only those that the
    caller may replay. For a caller without `jobs:read` (with `write`: without `jobs:operate`), it finds only dead
    letters of runs. For an operator, it also finds bulk operations on jobs of other tenants (`beyond_tenant`).

    If `kind`, `template` or `code` is None, the filter accepts any value.
    """
    kinds = services.job_kinds
    # `kinds.owned`: the pipelines that a kind of work has declared. The dead letters of all other pipelines belong to
    # the kind `run`.
    runs_only = (JOBS_OPERATE if write else JOBS_READ) not in caller.scopes
    if runs_only and kind not in (None, RUN):
        return DeadLetterFilter(runs=False, pipelines=(), owned=kinds.owned, template=template, code=code)  # no match
    permitted = kinds.permitted_jobs(caller.tenant_id, caller.scopes, write=write, kind=RUN if runs_only else kind)
    return DeadLetterFilter(
        permitted.runs, permitted.pipelines, kinds.owned, template, code, beyond_tenant=OPERATE in caller.scopes
    )


def _json_of(services: Services, row: Row) -> dict[str, Any]:
    """The JSON of `row`, which is a dead letter, or a group of dead letters (a group has no `job_id`). `run_id` repeats
    the job's id for clients of earlier releases.
    """
    item = {name: value for name, value in row.items() if name not in ("pipeline", "is_run")}
    item["kind"] = services.job_kinds.of(row["pipeline"], is_run=row["is_run"]).name
    return item | ({"run_id": row["job_id"]} if "job_id" in item else {})


@router.get("/groups", operation_id="groupDeadLetters", summary="Group dead letters by cause", responses=problems({}))
@may_read_standby
async def group_dead_letters(
    request: Request,
    caller: Reader,
    kind: Annotated[str | None, Query(max_length=63)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 50,
) -> Response:
    """Groups the latest 10,000 dead letters by fingerprint: template, step, code, and the message without its numbers.
    To find these dead letters, the API searches the latest 100,000 failed steps.
    """
    return json_response({"groups": await largest_groups(services_of(request), caller, kind, limit)})


async def largest_groups(
    services: Services, caller: Caller, kind: str | None, limit: int, of_last: int = job_reads.MAX_GROUPED
) -> list[dict[str, Any]]:
    """The largest groups among the latest `of_last` dead letters that the caller may read."""
    letter_filter = dead_letter_filter(services, caller, kind, None, None)
    async with services.pool.acquire() as connection:
        rows = await job_reads.dead_letter_groups(connection, caller.tenant_id, letter_filter, limit, of_last)
    return [_json_of(services, row) for row in rows]


@router.post(
    "/replay",
    operation_id="replayDeadLetters",
    summary="Replay the dead letters that match a filter",
    description="`refused` names the jobs that cannot be replayed now, each with its code: another run has the same "
    "scope or dedupe key (`same_scope_running`, `same_key_running`), or the template was deleted. The others are "
    "replayed, until a limit of the tenant is full, such as its rate, or half a minute has passed. `left` then has the "
    "number of the `jobs` after that, and the `code` and the `detail` of the reason; neither list names these jobs. "
    "Send the request again, with another Idempotency-Key, to replay them. A job that somebody else has locked for "
    "long is refused with `database_unavailable`. With `canary` only the latest is replayed.",
    status_code=202,
    responses=problems({
        HTTPStatus.UNPROCESSABLE_ENTITY: "`filter_missing`",
        HTTPStatus.TOO_MANY_REQUESTS: f"{REFUSED_FOR_NOW}, `bulk_writes_waiting`",
    }),
)  # fmt: skip
async def replay_many(
    request: Request, body: BulkReplayRequest, caller: Writer, idempotency_key: IdempotencyKey = None
) -> Response:
    if not (body.fingerprint or body.template or body.code):
        raise Invalid("filter_missing", "Name a fingerprint, a template or a code.")
    services = services_of(request)
    letter_filter = dead_letter_filter(services, caller, body.kind, body.template, body.code, write=True)
    replays = _Replays()  # stays empty if `once_over_transactions` repeats an earlier answer

    async def work() -> Answer:
        limit = 1 if body.canary else body.limit
        async with services.pool.acquire() as connection:
            rows = await _latest(connection, caller.tenant_id, letter_filter, body.fingerprint, limit)
        await _replay_each(services, caller, [*dict.fromkeys(row["job_id"] for row in rows)], replays)
        answer = {"replayed": [effects.id for effects in replays.replayed], "refused": replays.refused}
        return Answer(HTTPStatus.ACCEPTED, encoded(answer | ({"left": replays.left} if replays.left else {})))

    request_hash = fingerprint_of(b"POST /v1/dead-letters/replay", body.model_dump_json().encode())
    # `bulk` bounds how many bulk writes (requests that write many jobs) run at once. `turn` waits until this request
    # may write.
    async with services.bulk.turn(caller.tenant_id):
        answer = await once_over_transactions(services.pool, caller.tenant_id, idempotency_key, request_hash, work)
    for effects in replays.replayed:
        await publish_run_effects(services, effects)
    return json_response(answer.body, answer.status_code, replays.limit_headers)


@dataclass(slots=True)
class _Replays:
    """What a bulk replay has done. `replayed`: for each replayed job, its effects (the hints and limits that
    `publish_run_effects` needs). `refused`: the refusals as JSON. `limit_headers`: the RateLimit headers.

    `left`: JSON about the jobs that are left because a limit was full or the time was over. It has their number
    (`jobs`), and the reason (`code` and `detail`). None: no job is left.
    """

    replayed: list[CreatedRun] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    left: dict[str, Any] | None = None
    limit_headers: dict[str, str] = field(default_factory=dict)


async def _latest(
    connection: Connection, tenant_id: str, letter_filter: DeadLetterFilter, fingerprint: str | None, limit: int
) -> list[Row]:
    """The latest `limit` dead letters that match, however old they are. The function reads page by page, so that each
    statement is short.
    """
    rows: list[Row] = []
    before: tuple[datetime, UUID] | None = None
    while len(rows) < limit:
        page, before = await job_reads.dead_letters_page(
            connection, tenant_id, letter_filter, before=before, fingerprint=fingerprint, limit=limit - len(rows)
        )
        rows += page
        if before is None:
            break
    return rows


async def _replay_each(services: Services, caller: Caller, job_ids: Sequence[UUID], replays: _Replays) -> None:
    """Replay the jobs of a request, each in a transaction and on a connection of its own, and write the results to
    `replays`. Each replayed job counts as one submission against the limits of the tenant.

    When a limit of the tenant is full, this function tries no further job. Jobs that were replayed before stay
    replayed. The job at the full limit and the jobs after it are left. If no job was replayed before, raises TooMany.

    A job that PostgreSQL does not write in time is among the refused jobs. If there was such a job, and no job was
    replayed, raises Unavailable. This function always tries the first job. After BULK_SECONDS, it begins no other job,
    and the rest are left.
    """
    away: Unavailable | None = None  # the last error of a job that PostgreSQL did not write in time
    ends_at = monotonic() + BULK_SECONDS
    for index, job_id in enumerate(job_ids):
        if index and monotonic() > ends_at:
            replays.left = {"jobs": len(job_ids) - index, "code": NotInTime().code, "detail": NOT_TRIED}
            break
        try:
            # `in_time` raises NotInTime (an Unavailable) if PostgreSQL does not write in time.
            with in_time("replays"):
                await _replay(services, caller, job_id, replays)
        except (Conflict, Forbidden, Invalid, NotFound) as error:  # this job cannot be replayed, but other jobs can
            replays.refused.append(_refusal(job_id, error))
        except TooMany as error:
            if not replays.replayed:
                raise
            replays.left = {"jobs": len(job_ids) - index, "code": error.code, "detail": error.message}
            break
        except Unavailable as error:  # this job may be locked, or PostgreSQL may be down
            away = error
            replays.refused.append(_refusal(job_id, error))
    if away is not None and not replays.replayed:
        raise away


def _refusal(job_id: UUID, error: RequestError) -> dict[str, Any]:
    return {"job_id": job_id, "run_id": job_id, "code": error.code, "detail": error.message}


class _NotFailedAnyMore(Exception):
    """Another request has retried the job, or the job has expired, since `_replay` found it."""


async def _replay(services: Services, caller: Caller, job_id: UUID, replays: _Replays) -> None:
    """Retry one job of a request: make the failed job pending again (`revive`). After the commit, add the effects of
    the retry to `replays`. If the job is no longer failed, or was deleted, this function writes nothing.

    Raises Conflict, Forbidden, Invalid or NotFound if this job cannot be replayed. Raises TooMany if a limit of the
    tenant is full.
    """
    async with services.pool.acquire() as connection:
        row = await job_reads.find_job(connection, caller.tenant_id, job_id)
        if row is None:
            return
        access = access_of(services, caller, row)
        check_retry(services, access)
        template_version = await template_of(services.actions, connection, access.target)
        # The argument `{}` (the queues) is empty, because the queue of the step at which the retry begins is not known
        # yet. `add_queues_of` adds this queue after the retry.
        #
        # If the job is no longer failed, _NotFailedAnyMore rolls the transaction back, and ends this block. The job is
        # then neither among the replayed jobs nor among the refused jobs.
        with suppress(_NotFailedAnyMore):
            async with connection.transaction(), services.admission.submitting(connection, caller.payer, {}) as charge:
                effects = await revive(
                    services.actions, connection, access.target, template_version, params_of_retry(access)
                )
                if effects is None:  # roll back, because `revive` may have written deliveries or cancelled runs
                    raise _NotFailedAnyMore
                await record(connection, access, "job.retried")
                await services.admission.add_queues_of(connection, charge, job_id)
            replays.replayed.append(effects)
            replays.limit_headers = charge.fields


@router.post(
    "/{task_id}/replay",
    operation_id="replayDeadLetter",
    summary="Replay a dead letter, with its own or another payload",
    status_code=202,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`dead_letter_not_found`, `template_not_found`",
        HTTPStatus.CONFLICT: "`resource_invalid_state`, `same_scope_running`, `same_key_running`, "
        "`pipeline_not_served`, `template_unreadable`, `order_being_withdrawn`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_payload`, `payload_too_complex`, `payload_fixed`, `unknown_step`, "
        "`skips_other_steps`, `workflow_has_begun`",
        HTTPStatus.TOO_MANY_REQUESTS: f"{REFUSED_FOR_NOW}, {TOO_MANY_CHECKS}",
    }),
)  # fmt: skip
async def replay_one(request: Request, task_id: UUID, caller: Writer, body: RetryRequest | None = None) -> Response:
    services = services_of(request)
    async with services.pool.acquire() as connection:
        job_id = await job_reads.job_of_dead_letter(connection, caller.tenant_id, task_id)
        row = None if job_id is None else await job_reads.find_job(connection, caller.tenant_id, job_id)
    access = None if row is None else access_of(services, caller, row)
    if access is None or not _may_replay(access, caller):
        raise NotFound("dead_letter_not_found", "There is no such dead letter.")
    _, limit_headers = await retry(services, access, body or RetryRequest())
    answer = {"job_id": access.id, "run_id": access.id, "task_id": task_id}
    return json_response(answer, HTTPStatus.ACCEPTED, limit_headers)


def _may_replay(access: JobAccess, caller: Caller) -> bool:
    scopes = access.kind.scopes
    if scopes is None or scopes.write not in caller.scopes:  # None: no key sees the jobs of this kind
        return False
    return JOBS_OPERATE in caller.scopes or access.kind.name == RUN  # for a run, its write scope is enough
