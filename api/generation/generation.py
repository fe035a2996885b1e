"""Order images and videos from providers, and cancel an order. `queries` reads what became of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from http import HTTPStatus
from time import time
from typing import Annotated
from uuid import UUID

import structlog
from fastapi import APIRouter, Depends, Header, Request, Response

from leasehold.api.auth.security import GENERATION_WRITE, Require
from leasehold.api.generation.schemas import (
    CancelRequest,
    GenerationAccepted,
    GenerationAnswer,
    GenerationRequest,
    Ordered,
)
from leasehold.api.generation.view import answer, is_finished
from leasehold.api.http.caller_first import CallerFirst
from leasehold.api.http.edge import identity_of
from leasehold.api.http.idempotent import Answer, IdempotencyKey, once
from leasehold.api.http.openapi import REFUSED_FOR_NOW, problems
from leasehold.api.http.responses import follow_up
from leasehold.api.process.keyring import Caller
from leasehold.api.process.metrics import SUBMITTED
from leasehold.api.process.services import Services, services_of
from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection
from leasehold.db.idempotency import fingerprint
from leasehold.domain.errors import Conflict, Invalid, NotFound
from leasehold.domain.ids import new_id
from leasehold.exporter.jobs import jobs_ended
from leasehold.limits.admission import queues_of
from leasehold.pipelines.generation import rows as generations
from leasehold.pipelines.generation.operations import own_limits, seconds_of, withdraw
from leasehold.pipelines.generation.pipeline import BACKSTOP, GenerationParams, Source, generation
from leasehold.pipelines.generation.provider import Kind
from leasehold.pipelines.generation.providers import Catalogue, ProviderTerms
from leasehold.pipelines.generation.rows import NewGeneration
from leasehold.security.sealing import Sealing
from leasehold.settings import Settings
from leasehold.transitions import gates, jobs
from leasehold.transitions.endings import JobEnded
from leasehold.transitions.jobs import NewJob
from leasehold.transitions.limits import Submitted

log = structlog.get_logger(__name__)
router = APIRouter(tags=["generation"], route_class=CallerFirst)
Writer = Annotated[Caller, Depends(Require(GENERATION_WRITE))]
Credential = Annotated[
    str | None,
    Header(
        alias="X-Provider-Credential",
        max_length=4096,
        description="Your own credential at the provider: stored sealed, never returned. If left out, the "
        "installation's is used.",
    ),
]

_CREATES = {
    "status_code": 202,
    "response_model": GenerationAccepted,
    "responses": problems({
        HTTPStatus.CONFLICT: "`task_id_reused`, `idempotency_key_in_flight`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`unknown_provider`, `provider_not_configured`, `credential_missing`, "
        "`invalid_request`, `idempotency_key_reused`, `idempotency_key_malformed`",
        HTTPStatus.TOO_MANY_REQUESTS: REFUSED_FOR_NOW,
        HTTPStatus.SERVICE_UNAVAILABLE: "`sealing_not_configured`",
    }),
}  # fmt: skip


@router.post("/v1/images/generations", operation_id="generateImages", summary="Order images", **_CREATES)  # type: ignore[arg-type]  # what both routes share
async def generate_images(
    request: Request,
    wanted: GenerationRequest,
    caller: Writer,
    credential: Credential = None,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    return await _create(request, "image", wanted, caller, credential, idempotency_key)


@router.post("/v1/video/generations", operation_id="generateVideo", summary="Order a video", **_CREATES)  # type: ignore[arg-type]  # as above
async def generate_video(
    request: Request,
    wanted: GenerationRequest,
    caller: Writer,
    credential: Credential = None,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    return await _create(request, "video", wanted, caller, credential, idempotency_key)


async def _create(
    request: Request,
    kind: Kind,
    wanted: GenerationRequest,
    caller: Caller,
    credential: str | None,
    idempotency_key: str | None,
) -> Response:
    services = services_of(request)
    services.store.require()  # before the provider charges anything
    terms = _terms(services.opened["generation"], wanted, credential)
    sealed = Sealing(services.settings).seal(credential.encode()).decode() if credential else None
    params = _params(services.settings, kind, wanted, terms, sealed)
    asked = fingerprint(kind.encode(), wanted.model_dump_json().encode())
    new = _new(services.settings, caller, wanted, params, asked, terms, identity_of(request).trace)
    made: list[Submitted] = []
    limited: dict[str, str] = {}

    async def work(connection: Connection) -> Answer:
        job_id = await generations.ordered_before(connection, new)
        if job_id is None:
            queues = queues_of(caller.tenant_id, generation, new.job.pin)
            async with services.admission.submitting(connection, caller.payer, queues) as paid:
                submitted = await generations.create(connection, new)
                if submitted is None:
                    await services.admission.refund(connection, caller.payer)
            made.extend([] if submitted is None else [submitted])
            limited.update(paid.fields)
            job_id = new.job.id if submitted is not None else await generations.ordered_before(connection, new)
        said = GenerationAccepted(created=int(time()), data=Ordered(task_id=new.task_id, job_id=job_id))
        return Answer(HTTPStatus.ACCEPTED, said.model_dump_json().encode())

    said = await once(services.pool, caller.tenant_id, idempotency_key, asked, work)
    for submitted in made:
        await follow_up(services, submitted.hints, submitted.gates)
        SUBMITTED.labels(generation.name).inc()
        log.info("generation ordered", job_id=str(new.job.id), kind=kind, provider=params.provider)
    return Response(said.body, said.status_code, limited, media_type="application/json")


def _terms(catalogue: Catalogue, wanted: GenerationRequest, credential: str | None) -> ProviderTerms:
    """The provider's terms, as this installation is configured. Raises Invalid."""
    name = wanted.provider or catalogue.default
    if not name:
        raise Invalid("provider_not_configured", "Name a provider: this installation has no default.")
    terms = catalogue.find(name)
    if terms is None:
        raise Invalid("unknown_provider", "This installation has no such provider.")
    if credential is None and not terms.has_credential:
        raise Invalid("credential_missing", f"Send X-Provider-Credential: there is no credential for {name}.")
    return terms


def _params(
    settings: Settings, kind: Kind, wanted: GenerationRequest, terms: ProviderTerms, sealed: str | None
) -> GenerationParams:
    image = kind == "image"
    same = {"prompt", "model", "negative_prompt", "width", "height", "sample_strength", "is_pro", "duration", "ratio"}
    return GenerationParams(
        kind=kind,
        provider=terms.name,
        deadline_at=datetime.now(UTC) + timedelta(seconds=seconds_of(settings, kind)),
        poll_seconds=settings.generation_image_poll_seconds if image else settings.generation_video_poll_seconds,
        images=tuple(Source(url=one.url, width=one.width, height=one.height) for one in wanted.images),
        extra=wanted.extra,
        resubmit=wanted.allow_resubmit,
        credential=sealed,
        **wanted.model_dump(include=same),
    )


def _new(
    settings: Settings,
    caller: Caller,
    wanted: GenerationRequest,
    params: GenerationParams,
    asked: bytes,
    terms: ProviderTerms,
    trace: dict[str, str],
) -> NewGeneration:
    job_id = new_id()
    server = wanted.server_id or settings.generation_default_server
    job = NewJob(
        pipeline=generation,
        tenant_id=caller.tenant_id,
        params=params.model_dump(mode="json"),
        keep_seconds=settings.generation_keep_seconds,
        deadline_at=params.deadline_at + BACKSTOP,
        trace=trace,
        id=job_id,
        gates=own_limits(settings, caller.tenant_id, wanted.server_id, terms),
        pin=wanted.server_id,
    )
    return NewGeneration(job, wanted.task_id or str(job_id), params.kind, server, asked)


_CANCELS = {
    "response_model": GenerationAnswer,
    "responses": problems({
        HTTPStatus.NOT_FOUND: "`task_not_found`",
        HTTPStatus.CONFLICT: "`resource_invalid_state`: the generation has ended, or is being cancelled",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`",
    }),
    "status_code": 202,
}  # fmt: skip


@router.post("/v1/images/cancel", operation_id="cancelImages", summary="Cancel images", **_CANCELS)  # type: ignore[arg-type]  # as above
async def cancel_images(request: Request, wanted: CancelRequest, caller: Writer) -> GenerationAnswer:
    return await _cancel(request, "image", wanted, caller)


@router.post("/v1/video/cancel", operation_id="cancelVideo", summary="Cancel a video", **_CANCELS)  # type: ignore[arg-type]  # as above
async def cancel_video(request: Request, wanted: CancelRequest, caller: Writer) -> GenerationAnswer:
    return await _cancel(request, "video", wanted, caller)


async def _cancel(request: Request, kind: Kind, wanted: CancelRequest, caller: Caller) -> GenerationAnswer:
    services = services_of(request)
    async with services.pool.acquire() as connection:
        find = partial(generations.find, connection, caller.tenant_id, wanted.task_id, kind)
        row = await find()
        if row is None:
            raise NotFound("task_not_found", "There is no such generation.")
        left = await gates.gates_of(connection, [row["job_id"]])
        off = (
            None
            if is_finished(row)
            else await _cancel_and_withdraw(connection, services, caller, row["job_id"], wanted)
        )
        if off is None:
            raise Conflict("resource_invalid_state", "The generation has ended, or is being cancelled.")
        said = await find()
    hints, ended = off
    jobs_ended(ended)
    await follow_up(services, hints, left, [row["job_id"]])
    return await answer(services, said or row)


async def _cancel_and_withdraw(
    connection: Connection, services: Services, caller: Caller, job_id: UUID, wanted: CancelRequest
) -> tuple[list[Announcement], list[JobEnded]] | None:
    """Cancel the job and, in the same transaction, write a withdrawal job that cancels the order at the provider.

    Returns the hints of the withdrawal, and the jobs that ended. None: the job cannot be cancelled.
    """
    by = f"client {caller.client_id}"
    async with connection.transaction():
        cancels = await jobs.request_cancel(connection, [job_id], caller.tenant_id, reason=wanted.reason, by=by)
        if not cancels.states:
            return None
        return [*await withdraw(connection, services.settings, job_id, caller.tenant_id)], cancels.ended
