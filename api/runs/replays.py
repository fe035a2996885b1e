"""Repeats runs: `retry` continues a failed run from one of its steps, and `rerun` starts a new run with the same
payload.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Request, Response

from leasehold.api.auth.audit import record
from leasehold.api.auth.security import RUNS_WRITE, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.edge import identity_of
from leasehold.api.http.idempotent import Answer, IdempotencyKey, key_has_expired, once, unless_repeated
from leasehold.api.http.openapi import REFUSED_FOR_NOW, TOO_MANY_CHECKS, problems
from leasehold.api.http.responses import json_response, publish_submitted_run
from leasehold.api.jobs.retrying import retry
from leasehold.api.jobs.schemas import RetryRequest
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.api.runs.creating import accepted_body, accepted_response
from leasehold.api.runs.runs import find_run, run_access
from leasehold.api.runs.schemas import RunAccepted
from leasehold.db.database import Connection
from leasehold.db.idempotency import fingerprint
from leasehold.domain.celery_ids import without_celery_id
from leasehold.domain.errors import Conflict
from leasehold.limits.admission import queues_of
from leasehold.transitions import runs
from leasehold.transitions.runs import CreatedRun, NewRun

router = APIRouter(tags=["runs"], prefix="/v1/runs", route_class=AuthenticatedFirst)
Writer = Annotated[Caller, Depends(Require(RUNS_WRITE))]


@router.post(
    "/{run_id}/retry",
    operation_id="retryRun",
    summary="Retry a failed run, from the step that failed or an earlier step",
    status_code=202,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`run_not_found`, `template_not_found`",
        HTTPStatus.CONFLICT: "`resource_invalid_state`: only a failed run can be retried; `same_scope_running`, "
        "`same_key_running`, `template_unreadable`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_payload`, `payload_too_complex`, `unknown_step`, "
        "`skips_other_steps`, `workflow_has_begun`",
        HTTPStatus.TOO_MANY_REQUESTS: f"{REFUSED_FOR_NOW}, {TOO_MANY_CHECKS}",
    }),
)  # fmt: skip
async def retry_run(request: Request, run_id: UUID, caller: Writer, body: RetryRequest | None = None) -> Response:
    services = services_of(request)
    status, limit_headers = await retry(services, await run_access(services, caller, run_id), body or RetryRequest())
    return json_response({"id": run_id, "status": status}, HTTPStatus.ACCEPTED, limit_headers)


@router.post(
    "/{run_id}/rerun",
    operation_id="rerunRun",
    summary="Start a fresh run of the same payload",
    description="Both runs have the same version of the template. A template in code has its current version only.",
    status_code=202,
    response_model=RunAccepted,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`run_not_found`, `template_not_found`",
        HTTPStatus.CONFLICT: "`not_repeatable`, `template_disabled`, `template_unreadable`, `same_scope_running`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_payload`: the code has changed, and takes this payload no more; "
        "`nothing_to_do`, `two_workflows`",
        HTTPStatus.TOO_MANY_REQUESTS: REFUSED_FOR_NOW,
    }),
)  # fmt: skip
async def rerun_run(request: Request, run_id: UUID, caller: Writer, idempotency_key: IdempotencyKey = None) -> Response:
    services = services_of(request)
    # The run to repeat. None if an answer is stored for the idempotency key, because `once` then repeats this answer
    # and does not call `work`. If the stored answer expires before `once` reads it, `once` calls `work`, which raises
    # an error.
    run = await unless_repeated(
        services.pool, caller.tenant_id, idempotency_key, lambda: find_run(services, caller, run_id)
    )
    # The run that `work` has created, and the name of its template. The list stays empty if an earlier answer is
    # repeated.
    created_runs: list[tuple[CreatedRun, str]] = []
    limit_headers: dict[str, str] = {}

    async def work(connection: Connection) -> Answer:
        if run is None:
            raise key_has_expired()
        template_version = await services.templates.find_for_rerun(
            connection, caller.tenant_id, run["template"], run["version"]
        )
        if not template_version.template.repeatable:
            raise Conflict("not_repeatable", "The template does not allow its runs to be repeated.")
        # If Celery's client chose an id for the run, this id must go on to lead to the first run only.
        params, tags = without_celery_id(run["payload"], run["tags"] or {})
        if template_version.in_code:  # the code may have changed since the payload was checked
            params = template_version.params_by_code(params)
        new_run = NewRun(
            template_version=template_version,
            tenant_id=caller.tenant_id,
            params=params,
            scope=run["scope"],
            scope_id=run["scope_id"],
            priority=run["priority"],
            rerun_of=run_id,
            trace=identity_of(request).trace,
            keep_seconds=services.settings.retention_days * 86_400,
            tags=tags,
        )
        queues = queues_of(caller.tenant_id, template_version.pipeline, params=new_run.params)
        async with services.admission.submitting(connection, caller.payer, queues) as charge:
            created_run = await runs.create(connection, new_run)
            created_runs.append((created_run, run["template"]))
            await record(connection, caller, "job.repeated", run_id, kind="run", new_id=new_run.id)
        limit_headers.update(charge.fields)
        status = runs.first_state(new_run, is_limited=bool(created_run.limits))
        return Answer(HTTPStatus.ACCEPTED, accepted_body(new_run, status))

    request_hash = fingerprint(b"POST /v1/runs/rerun", str(run_id).encode())
    answer = await once(services.pool, caller.tenant_id, idempotency_key, request_hash, work)
    for created_run, template in created_runs:
        await publish_submitted_run(services, created_run, template)
    return accepted_response(answer, limit_headers)
