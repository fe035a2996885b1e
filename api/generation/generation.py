"""The endpoints that order images and videos from providers, and that cancel an order. The endpoints in `queries` read
an order.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial
from http import HTTPStatus
from time import time
from typing import Annotated
from uuid import UUID

import structlog
from fastapi import APIRouter, Depends, Header, Request, Response

from leasehold.api.auth.audit import record
from leasehold.api.auth.security import GENERATION_WRITE, Require
from leasehold.api.generation.schemas import (
    CancelRequest,
    GenerationAccepted,
    GenerationAnswer,
    GenerationRequest,
    Ordered,
)
from leasehold.api.generation.view import answer, is_finished
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.callback_urls import REFUSED_URL, check_callback_url
from leasehold.api.http.edge import identity_of
from leasehold.api.http.idempotent import Answer, IdempotencyKey, once
from leasehold.api.http.openapi import REFUSED_FOR_NOW, problems
from leasehold.api.http.responses import publish_and_admit
from leasehold.api.http.tags import json_of_request
from leasehold.api.process.keyring import Caller
from leasehold.api.process.metrics import SUBMITTED
from leasehold.api.process.services import Services, services_of
from leasehold.broker.outbox import Announcement
from leasehold.db.clock import database_time
from leasehold.db.database import Connection
from leasehold.db.idempotency import fingerprint
from leasehold.domain.errors import Conflict, Invalid, NotFound
from leasehold.domain.ids import new_id
from leasehold.exporter.jobs import count_ended_jobs
from leasehold.limits.admission import queues_of
from leasehold.pipelines.generation import rows as generations
from leasehold.pipelines.generation.operations import own_limits, seconds_of, withdraw
from leasehold.pipelines.generation.pipeline import BACKSTOP, GenerationParams, Source, generation
from leasehold.pipelines.generation.provider import Kind
from leasehold.pipelines.generation.providers import Catalogue, ProviderTerms
from leasehold.pipelines.generation.rows import NewGeneration
from leasehold.security.sealing import Sealing
from leasehold.settings import Settings
from leasehold.transitions import concurrency, jobs
from leasehold.transitions.endings import JobEnded
from leasehold.transitions.jobs import NewJob
from leasehold.transitions.limits import Submitted

log = structlog.get_logger(__name__)
router = APIRouter(tags=["generation"], route_class=AuthenticatedFirst)
Writer = Annotated[Caller, Depends(Require(GENERATION_WRITE))]
Credential = Annotated[
    str | None,
    Header(
        alias="X-Provider-Credential",
        max_length=4096,
        description="Your own credential at the provider. It is stored sealed, and never returned. If left out, the "
        "credential of the installation is used.",
    ),
]

#: The common parts of the two routes that order.
_ORDERING = {
    "status_code": 202,
    "response_model": GenerationAccepted,
    "responses": problems({
        HTTPStatus.CONFLICT: "`task_id_reused`, `result_consumed`, `idempotency_key_in_flight`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`unknown_provider`, `provider_not_configured`, `credential_missing`, "
        f"`invalid_request`, `idempotency_key_reused`, `idempotency_key_malformed`, {REFUSED_URL}",
        HTTPStatus.TOO_MANY_REQUESTS: REFUSED_FOR_NOW,
        HTTPStatus.SERVICE_UNAVAILABLE: "`sealing_not_configured`",
    }),
}  # fmt: skip


@router.post("/v1/images/generations", operation_id="generateImages", summary="Order images", **_ORDERING)  # type: ignore[arg-type]  # values of several types
async def generate_images(
    request: Request,
    order: GenerationRequest,
    caller: Writer,
    credential: Credential = None,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    return await _create(request, "image", order, caller, credential, idempotency_key)


@router.post("/v1/video/generations", operation_id="generateVideo", summary="Order a video", **_ORDERING)  # type: ignore[arg-type]  # as above
async def generate_video(
    request: Request,
    order: GenerationRequest,
    caller: Writer,
    credential: Credential = None,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    return await _create(request, "video", order, caller, credential, idempotency_key)


# Writes the job of the order, and answers with the job's id. If the same order exists already, the answer has the id of
# that order's job. If the caller has used the idempotency key before, `write_job` does not run, and the answer is the
# first answer.
async def _create(
    request: Request,
    kind: Kind,
    order: GenerationRequest,
    caller: Caller,
    credential: str | None,
    idempotency_key: str | None,
) -> Response:
    services = services_of(request)
    services.store.require()  # first, because without a store the provider would charge for files that are lost
    check_callback_url(services.settings, order.callback_url)
    credential = credential or None  # an empty header is no credential
    # `opened["generation"]` is the catalogue of providers. `terms`: what the settings define for the order's provider,
    # which is whether they have a credential for it, and how many generations it may have under way at once.
    terms = _terms_of(services.opened["generation"], order, credential)
    sealed_credential = Sealing(services.settings).seal(credential.encode()).decode() if credential else None
    async with services.pool.acquire() as connection:
        now = await database_time(connection)
    params = _params_of(services.settings, kind, order, terms, sealed_credential, now)
    request_hash = fingerprint(kind.encode(), json_of_request(order))
    new_generation = _new_generation(
        services.settings, caller, order, params, request_hash, terms, identity_of(request).trace
    )
    submissions: list[Submitted] = []  # the new order, if this request is not a repetition
    limit_fields: dict[str, str] = {}  # the RateLimit headers

    async def write_job(connection: Connection) -> Answer:
        job_id = await generations.existing_order(connection, new_generation)
        if job_id is None:
            submitted, charge_fields = await _submit(services, connection, caller, new_generation)
            limit_fields.update(charge_fields)
            if isinstance(submitted, UUID):  # another request wrote the same order after `existing_order` had looked
                job_id = submitted
            else:
                submissions.append(submitted)
                job_id = new_generation.job.id
        answer_body = GenerationAccepted(
            created=int(time()), data=Ordered(task_id=new_generation.task_id, job_id=job_id)
        )
        return Answer(HTTPStatus.ACCEPTED, answer_body.model_dump_json().encode())

    stored_answer = await once(services.pool, caller.tenant_id, idempotency_key, request_hash, write_job)
    for submitted in submissions:
        await publish_and_admit(services, submitted.hints, submitted.limits)
        SUBMITTED.labels(generation.name).inc()
        log.info("generation ordered", job_id=str(new_generation.job.id), kind=kind, provider=params.provider)
    return Response(stored_answer.body, stored_answer.status_code, limit_fields, media_type="application/json")


async def _submit(
    services: Services, connection: Connection, caller: Caller, new_generation: NewGeneration
) -> tuple[Submitted | UUID, dict[str, str]]:
    """Write the job, and charge the caller. Returns what was submitted, and the RateLimit headers.

    If another request has just submitted the same order, this function refunds the charge, and returns the UUID of that
    order's job in place of the submission.
    """
    queues = queues_of(caller.tenant_id, generation, new_generation.job.pin)
    async with services.admission.submitting(connection, caller.payer, queues) as charge:
        submitted = await generations.create(connection, new_generation)
        if isinstance(submitted, UUID):
            await services.admission.refund(connection, caller.payer)
    return submitted, charge.fields


def _terms_of(catalogue: Catalogue, order: GenerationRequest, credential: str | None) -> ProviderTerms:
    """The terms of the order's provider in this installation. If the order names no provider, the default provider
    counts.

    Raises Invalid if there is no such provider, or if there is no credential for it (from the client or in the
    installation).
    """
    name = order.provider or catalogue.default
    if not name:
        raise Invalid("provider_not_configured", "Name a provider: this installation has no default.")
    terms = catalogue.find(name)
    if terms is None:
        raise Invalid("unknown_provider", "This installation has no such provider.")
    if credential is None and not terms.has_credential:
        raise Invalid("credential_missing", f"Send X-Provider-Credential: there is no credential for {name}.")
    return terms


#: The job's parameters have these fields of the order under the same names.
_COPIED_FIELDS = {
    "prompt", "model", "negative_prompt", "width", "height", "sample_strength", "is_pro", "duration", "ratio",
}  # fmt: skip


def _params_of(
    settings: Settings,
    kind: Kind,
    order: GenerationRequest,
    terms: ProviderTerms,
    sealed_credential: str | None,
    now: datetime,
) -> GenerationParams:
    """The parameters of the job. `sealed_credential`: the client's own credential, encrypted."""
    is_image = kind == "image"
    return GenerationParams(
        kind=kind,
        provider=terms.name,
        deadline_at=now + timedelta(seconds=seconds_of(settings, kind)),
        poll_seconds=settings.generation_image_poll_seconds if is_image else settings.generation_video_poll_seconds,
        images=tuple(Source(url=image.url, width=image.width, height=image.height) for image in order.images),
        extra=order.extra,
        resubmit=order.allow_resubmit,
        credential=sealed_credential,
        **order.model_dump(include=_COPIED_FIELDS),
    )


def _new_generation(
    settings: Settings,
    caller: Caller,
    order: GenerationRequest,
    params: GenerationParams,
    request_hash: bytes,
    terms: ProviderTerms,
    trace: dict[str, str],
) -> NewGeneration:
    job_id = new_id()
    server_id = order.server_id or settings.generation_default_server
    job = NewJob(
        pipeline=generation,
        tenant_id=caller.tenant_id,
        params=params.model_dump(mode="json"),
        keep_seconds=settings.generation_keep_seconds,
        # A poll is a request of the job for the order's state at the provider. The first poll after the order's own
        # deadline ends the job. This later deadline ends a job that polls no more.
        deadline_at=params.deadline_at + BACKSTOP,
        trace=trace,
        id=job_id,
        limits=own_limits(settings, caller.tenant_id, order.server_id, terms),
        pin=order.server_id,  # only workers with this label run the job
        tags=order.tags,
        callback_url=order.callback_url,
    )
    return NewGeneration(job, order.task_id or str(job_id), params.kind, server_id, request_hash)


#: The common parts of the two routes that cancel.
_CANCELLING = {
    "response_model": GenerationAnswer,
    "responses": problems({
        HTTPStatus.NOT_FOUND: "`task_not_found`",
        HTTPStatus.CONFLICT: "`resource_invalid_state`: the generation has ended, or is being cancelled",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`",
    }),
    "status_code": 202,
}  # fmt: skip


@router.post("/v1/images/cancel", operation_id="cancelImages", summary="Cancel images", **_CANCELLING)  # type: ignore[arg-type]  # as above
async def cancel_images(request: Request, body: CancelRequest, caller: Writer) -> GenerationAnswer:
    return await _cancel(request, "image", body, caller)


@router.post("/v1/video/cancel", operation_id="cancelVideo", summary="Cancel a video", **_CANCELLING)  # type: ignore[arg-type]  # as above
async def cancel_video(request: Request, body: CancelRequest, caller: Writer) -> GenerationAnswer:
    return await _cancel(request, "video", body, caller)


async def _cancel(request: Request, kind: Kind, body: CancelRequest, caller: Caller) -> GenerationAnswer:
    services = services_of(request)
    async with services.pool.acquire() as connection:
        find = partial(generations.find, connection, caller.tenant_id, body.task_id, kind)
        row = await find()
        if row is None:
            raise NotFound("task_not_found", "There is no such generation.")
        limit_ids = await concurrency.limits_of(connection, [row["job_id"]])
        cancellation = None
        if not is_finished(row):
            cancellation = await _cancel_and_withdraw(connection, services, caller, row["job_id"], body)
        if cancellation is None:
            raise Conflict("resource_invalid_state", "The generation has ended, or is being cancelled.")
        current_row = await find()
    hints, ended_jobs = cancellation
    count_ended_jobs(ended_jobs)
    await publish_and_admit(services, hints, limit_ids, [row["job_id"]])
    return answer(services, current_row or row)  # the earlier `row`, if the generation expired and was deleted since


async def _cancel_and_withdraw(
    connection: Connection, services: Services, caller: Caller, job_id: UUID, body: CancelRequest
) -> tuple[list[Announcement], list[JobEnded]] | None:
    """Cancel the job. The same transaction writes a withdrawal, which is a job that cancels the order at the provider.

    Returns the hints (messages that tell workers of the withdrawal), and the jobs that have ended. Returns None if the
    job cannot be cancelled.
    """
    client = f"client {caller.client_id}"
    async with connection.transaction():
        cancellation = await jobs.request_cancel(connection, [job_id], caller.tenant_id, reason=body.reason, by=client)
        if not cancellation.states:
            return None
        await record(connection, caller, "job.cancelled", job_id, kind="generation", reason=body.reason or None)
        return [*await withdraw(connection, services.settings, job_id, caller.tenant_id)], cancellation.ended
