"""POST /v1/runs: starts a run of a template.

`Submissions` (process/submissions.py) writes the simple runs of several clients together. Every other run gets a
transaction of its own. A run is simple if all of this is true:
- It has no idempotency key, no dedupe key and no delay.
- Its template lets runs of the same scope run at once.
- No concurrency limit, rate or queue depth applies to it.
- The tenant is far from its bound on unfinished jobs.

The modules `batches` and `replays` also use helpers of this module.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from http import HTTPStatus
from typing import Annotated, Any

import orjson
import structlog
from fastapi import APIRouter, Depends, Request, Response

from leasehold.api.auth.security import RUNS_WRITE, Require
from leasehold.api.http.callback_urls import REFUSED_URL, check_callback_url
from leasehold.api.http.early import refuse_early
from leasehold.api.http.edge import identity_of
from leasehold.api.http.idempotent import Answer, IdempotencyKey, once
from leasehold.api.http.openapi import REFUSED_FOR_NOW, TOO_MANY_CHECKS, problems
from leasehold.api.http.quick import QuickRoute
from leasehold.api.http.responses import encoded, json_response, publish_submitted_run
from leasehold.api.http.tags import json_of_request
from leasehold.api.process.keyring import Caller
from leasehold.api.process.metrics import SUBMITTED
from leasehold.api.process.services import Services, services_of
from leasehold.api.runs.schemas import RunAccepted, RunRequest
from leasehold.broker.base import BANDS
from leasehold.db.clock import database_time
from leasehold.db.database import Connection
from leasehold.db.idempotency import fingerprint, is_answered
from leasehold.domain.errors import Invalid, RequestError, TooMany
from leasehold.evaluation.templates import TemplateVersion
from leasehold.limits.admission import queues_of
from leasehold.transitions import runs
from leasehold.transitions.runs import CreatedRun, Duplicate, NewRun

router = APIRouter(tags=["runs"], prefix="/v1/runs", route_class=QuickRoute)
Writer = Annotated[Caller, Depends(Require(RUNS_WRITE))]
#: For the API reference: the answer to a request whose dedupe key an unfinished run already has.
_EXISTING_RUN: dict[int | str, dict[str, Any]] = {
    200: {"model": RunAccepted, "description": "An unfinished run already has the `dedupe` key: the answer names it."}
}
#: The API tries at most this many times to write a request's runs. A try fails if another request has just started a
#: run with the same dedupe key. If that run ends before the next try, the next try may fail in the same way.
_DUPLICATE_TRIES = 5


@router.post(
    "",
    operation_id="createRun",
    summary="Start a run of a template",
    description="With `dedupe`: while an unfinished run has that key, the answer is 200 and that run.",
    status_code=202,
    response_model=RunAccepted,
    responses=_EXISTING_RUN
    | problems({
        HTTPStatus.NOT_FOUND: "`template_not_found`",
        HTTPStatus.CONFLICT: "`template_disabled`, `same_scope_running`, `same_key_running`, "
        "`idempotency_key_in_flight`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_payload`, `payload_too_large`, `payload_too_complex`, "
        f"`nothing_to_do`, `two_workflows`, `invalid_request`, `start_ambiguous`, {REFUSED_URL}",
        HTTPStatus.TOO_MANY_REQUESTS: f"{REFUSED_FOR_NOW}, {TOO_MANY_CHECKS}",
    }),
)  # fmt: skip
async def create_run(
    request: Request, body: RunRequest, caller: Writer, idempotency_key: IdempotencyKey = None
) -> Response:
    services = services_of(request)
    check_callback_url(services.settings, body.callback_url)
    if body.scheduled_at is not None and body.delay_seconds is not None:
        raise Invalid("start_ambiguous", "Name `scheduled_at` or `delay_seconds`, not both.")
    if body.dedupe is not None and not idempotency_key:
        async with services.pool.acquire() as connection:
            existing_run = await _existing_run(connection, caller.tenant_id, body)
        if existing_run is not None:  # answer before the payload is checked and the submission is charged
            return accepted_response(existing_run)
    # `is_reserved`: the run has its place among the tenant's unfinished jobs. It is True only if the settings limit
    # no rates and no depths of queues, and if the tenant is far from its bound on unfinished jobs. Then only a
    # concurrency limit can still apply to the run.
    try:
        is_reserved = await services.admission.reserve_single_run(services.pool, caller.tenant_id)
        if not is_reserved:
            # Refuse a request over a limit before the expensive check of its payload. The queues are not checked yet,
            # because the template, which names them, is read later.
            queued_tasks: dict[str, int] = {}
            await refuse_early(services, caller, queued_tasks)
    except TooMany:
        # A request that creates nothing gets its answer, even if the tenant is over a limit. To find out whether the
        # request creates nothing costs a query. So the API makes this query only here, after a limit has refused the
        # request.
        if idempotency_key is None or not await _creates_nothing(services, caller, body, idempotency_key):
            raise
        is_reserved = False
    new_run = await _check_run(services, caller, body, identity_of(request).trace)
    if is_reserved and idempotency_key is None:  # the run may be written together with the runs of other requests
        if isinstance(new_run, RequestError):
            raise new_run
        if (
            new_run.dedupe_key is None
            and body.delay_seconds is None  # only `_create_alone` reads the database's clock, for the delay
            and new_run.template_version.independent  # runs of the template neither exclude nor replace each other
            and await services.submissions.create(new_run)  # False: a limit applies, and nothing is written
        ):
            SUBMITTED.labels(new_run.template_version.template.type).inc()
            _name_in_log(new_run)
            return accepted_response(Answer(HTTPStatus.ACCEPTED, accepted_body(new_run, runs.first_state(new_run))))
    # `_create_alone` reserves a place itself. It does not use the place that `reserve_single_run` may have reserved,
    # and nobody gives that place back. So the tenant's remembered count is too high by one for a while. No submission
    # is refused for that, because PostgreSQL counts the jobs of a tenant that seems to be near its bound.
    return await _create_alone(services, caller, body, idempotency_key, new_run)


async def _creates_nothing(services: Services, caller: Caller, body: RunRequest, idempotency_key: str) -> bool:
    """Whether the request repeats an answered request, or an unfinished run has its dedupe key."""
    async with services.pool.acquire() as connection:
        if await is_answered(connection, caller.tenant_id, idempotency_key):
            return True
        return await _existing_run(connection, caller.tenant_id, body) is not None


async def _create_alone(
    services: Services, caller: Caller, body: RunRequest, idempotency_key: str | None, new_run: NewRun | RequestError
) -> Response:
    """Write the run in a transaction of its own, with its idempotency key and its charges. For a repeated request,
    `once` returns the first answer without a call of `work`, so nothing is created. If `new_run` is an error, `work`
    raises it.
    """
    # The run that `work` has written, if any, and its effects: what must be published after the commit.
    written_runs: list[tuple[NewRun, CreatedRun]] = []
    limit_headers: dict[str, str] = {}

    async def work(connection: Connection) -> Answer:
        if isinstance(new_run, RequestError):
            raise new_run
        existing_run = await _existing_run(connection, caller.tenant_id, body)
        if existing_run is not None:
            return existing_run
        queues = queues_of(caller.tenant_id, new_run.template_version.pipeline, params=new_run.params)
        async with services.admission.submitting(connection, caller.payer, queues) as charge:
            run = await _with_delay(connection, new_run, body.delay_seconds)
            effects = await runs.create(connection, run)
            written_runs.append((run, effects))
        limit_headers.update(charge.fields)
        status = runs.first_state(run, is_limited=bool(effects.limits))
        return Answer(HTTPStatus.ACCEPTED, accepted_body(run, status))

    request_hash = fingerprint(b"POST /v1/runs", json_of_request(body))
    answer = await retry_duplicates(lambda: once(services.pool, caller.tenant_id, idempotency_key, request_hash, work))
    for run, effects in written_runs:
        await publish_submitted_run(services, effects, run.template_version.template.type)
        _name_in_log(run)
    return accepted_response(answer, limit_headers)


async def _with_delay(connection: Connection, new_run: NewRun, delay_seconds: float | None) -> NewRun:
    """The run, to be started `delay_seconds` from now by the database's clock. If `delay_seconds` is None, the run is
    unchanged.
    """
    if delay_seconds is None:
        return new_run
    return replace(new_run, scheduled_at=await database_time(connection) + timedelta(seconds=delay_seconds))


async def retry_duplicates(create: Callable[[], Awaitable[Answer]]) -> Answer:
    """Call `create`, and call it again if it raises Duplicate. Duplicate means that another request has just started a
    run with the same dedupe key. The next try finds this run, or finds that it has ended.

    Raises Duplicate after the last try, and every other error of `create` immediately.
    """
    for _ in range(_DUPLICATE_TRIES - 1):
        with suppress(Duplicate):
            return await create()
    return await create()


async def _existing_run(connection: Connection, tenant_id: str, body: RunRequest) -> Answer | None:
    """The answer that names the unfinished run with the request's dedupe key, or None if the request has no key or
    there is no such run.
    """
    if body.dedupe is None:
        return None
    key = body.dedupe.key
    row = (await runs.unfinished_by_key(connection, tenant_id, body.template, [key])).get(key)
    if row is None:
        return None
    content = {"id": row["id"], "status": row["status"], "template": body.template, "version": row["version"]}
    return Answer(HTTPStatus.OK, encoded(content))


async def _check_run(
    services: Services, caller: Caller, body: RunRequest, trace: dict[str, str]
) -> NewRun | RequestError:
    """Check the payload, and build the run. If the run is refused, return the error instead of raising it. The caller
    raises the error later, if the request is not a repetition. A repeated request must get its first answer, even if
    the template has changed since then.

    No connection is held while the payload is checked, because the check may wait for other payloads of the tenant.
    """
    try:
        template_version = await _find_template_version(services, caller, body)
        return NewRun(
            template_version=template_version,
            tenant_id=caller.tenant_id,
            params=await services.templates.params(caller.tenant_id, template_version, body.payload),
            scope=body.scope,
            scope_id=body.scope_id,
            priority=BANDS.index(body.priority),  # BANDS: the priorities, the most urgent first
            scheduled_at=body.scheduled_at,
            trace=trace,
            keep_seconds=services.settings.retention_days * 86_400,
            dedupe_key=None if body.dedupe is None else body.dedupe.key,
            start_within=seconds_or_none(body.start_within_seconds),
            tags=body.tags,
            callback_url=body.callback_url,
        )
    except RequestError as error:
        return error


def seconds_or_none(number: int | None) -> timedelta | None:
    return None if number is None else timedelta(seconds=number)


async def _find_template_version(services: Services, caller: Caller, body: RunRequest) -> TemplateVersion:
    """The version of the template that the request names. A template that is declared in code needs no query."""
    template_version = services.templates.declared_in_code(body.template, body.version)
    if template_version is not None:
        return template_version
    async with services.pool.acquire() as connection:
        return await services.templates.find_usable(connection, caller.tenant_id, body.template, body.version)


def accepted_body(new_run: NewRun, status: str) -> bytes:
    """A RunAccepted, as JSON. `status`: the state in which the run was committed."""
    template = new_run.template_version.template
    return encoded({"id": new_run.id, "status": status, "template": template.type, "version": template.version})


def accepted_response(answer: Answer, limit_headers: dict[str, str] | None = None) -> Response:
    """The response for an answer whose body is a RunAccepted. `limit_headers`: the RateLimit fields."""
    run_id = orjson.loads(answer.body)["id"]
    headers = (limit_headers or {}) | {"Location": f"/v1/runs/{run_id}"}
    return json_response(answer.body, answer.status_code, headers)


def _name_in_log(new_run: NewRun) -> None:
    """Add the run's id to the request's own log line."""
    structlog.contextvars.bind_contextvars(job_id=str(new_run.id))
