"""The conversion door: send a model, poll, download what came out."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import structlog
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse

from api.conversion_upload import Sent, TfLite, receive
from api.conversion_view import ARTIFACTS, STATES, disposition, record
from api.cursors import cursor_of, id_at
from api.edge import identity_of
from api.keyring import Caller
from api.openapi import problems
from api.problems import Problem
from api.security import CONVERSION_READ, CONVERSION_WRITE, Require
from api.services import Services, services_of
from leasehold import conversions
from leasehold.conversions import Busy, NewConversion, Row
from leasehold.errors import Conflict, LeaseholdError, NotFound, StoreError, TooMany
from leasehold.ids import new_id
from leasehold.rates import take
from leasehold.transitions.jobs import NewJob
from pipelines.conversion.pipeline import conversion

log = structlog.get_logger(__name__)
router = APIRouter(tags=["conversion"])
Reader = Annotated[Caller, Depends(Require(CONVERSION_READ))]
Writer = Annotated[Caller, Depends(Require(CONVERSION_WRITE))]

PATH = "/api/v1/jobs"
_KEPT_SECONDS = 7 * 24 * 3600
_DOWNLOADS_A_MINUTE = 20
_BINARY = "application/octet-stream"

_TFLITE = Problem(
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    "tflite_unsupported",
    "This installation converts .onnx models; bring a .tflite model to ONNX with tf2onnx first.",
)
_STORE_AWAY = Problem(HTTPStatus.BAD_GATEWAY, "store_unavailable", "The model could not be stored. Try again soon.")
_SLOW = Problem(
    HTTPStatus.REQUEST_TIMEOUT, "body_too_slow", "The form did not arrive in time.", {"Connection": "close"}
)


@router.post(
    PATH,
    operation_id="createConversion",
    summary="Send a model to convert",
    description="A multipart form: `model`, `ref_images[]`, `user_id`, `tenant_id`, `model_id`, `version`, "
    "`platform`, `enable_evaluate`, `enable_sim_fp`, `enable_sim_fixed`, `enable_sim_hw`.",
    status_code=201,
    responses=problems({
        HTTPStatus.BAD_REQUEST: "`bad_request`: no readable form",
        HTTPStatus.REQUEST_TIMEOUT: "`body_too_slow`",
        HTTPStatus.CONFLICT: "`job_in_progress`: the user's unfinished job is in `Location`",
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "`tflite_unsupported`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`, `model_missing`, `unsupported_format`, `too_large`, "
        "`bad_reference_images`, `hardware_simulation_unavailable`",
        HTTPStatus.BAD_GATEWAY: "`store_unavailable`",
    }),
)  # fmt: skip
async def create_conversion(request: Request, response: Response, caller: Writer) -> Any:
    services, identity = services_of(request), identity_of(request)
    with tempfile.TemporaryDirectory(prefix="leasehold-upload-") as directory:
        try:
            sent = await receive(request, Path(directory))
        except TfLite:
            return _TFLITE.response(identity.request_id)
        except TimeoutError:
            return _SLOW.response(identity.request_id)
        new = _new(caller, sent, identity.trace)
        try:
            await _store(services, new, sent)
        except StoreError:
            await _clean_up(services, new)
            return _STORE_AWAY.response(identity.request_id)
    try:
        async with services.pool.acquire() as connection:
            hints = await conversions.create(connection, new)
    except Busy as busy:
        await _clean_up(services, new)
        return _busy(busy).response(identity.request_id)
    # Of any other error nobody knows whether the rows were committed: the objects must stay.
    services.announcer.announce(hints)
    log.info("job submitted", job_id=str(new.job.id), bytes=new.input["size_bytes"])
    response.headers["Location"] = f"{PATH}/{new.job.id}"
    return record(await _find(services, caller, new.job.id))


def _new(caller: Caller, sent: Sent, trace: dict[str, str]) -> NewConversion:
    job_id = new_id()
    prefix = f"jobs/{job_id}"
    keys = {
        name: f"{prefix}/input/{file}" for name, file in (("model", "model.onnx"), ("references", "references.tar"))
    }
    job = NewJob(
        pipeline=conversion,
        tenant_id=caller.tenant_id,
        params=sent.params.model_dump(mode="json"),
        inputs=keys,
        output_prefix=prefix,
        keep_seconds=_KEPT_SECONDS,
        trace=trace,
        id=job_id,
        exclusive_key=sent.user_id,
    )
    said = {
        "filename": sent.file_name,
        "object_key": keys["model"],
        "size_bytes": sent.model.stat().st_size,
        "ref_images_count": sent.images,
    }
    return NewConversion(job, sent.user_id, sent.owner_tenant, sent.file_name, said)


async def _store(services: Services, new: NewConversion, sent: Sent) -> None:
    for name, path in (("model", sent.model), ("references", sent.references)):
        await services.store.put_file(
            new.job.inputs[name], path, content_type=_BINARY, metadata={"job": str(new.job.id)}, fresh=True
        )


async def _clean_up(services: Services, new: NewConversion) -> None:
    """Take back what a refused job has stored; a store that is away keeps it."""
    try:
        await services.store.delete(*new.job.inputs.values())
    except LeaseholdError as error:
        log.warning("objects of a refused job are left", job_id=str(new.job.id), error=type(error).__name__)


def _busy(busy: Busy) -> Problem:
    headers = {} if busy.job_id is None else {"Location": f"{PATH}/{busy.job_id}"}
    return Problem(
        HTTPStatus.CONFLICT, "job_in_progress", f"The user has an unfinished conversion: {busy.job_id}.", headers
    )


async def _find(services: Services, caller: Caller, job_id: UUID) -> Row:
    async with services.pool.acquire() as connection:
        found = await conversions.find(connection, caller.tenant_id, job_id)
    if found is None:
        raise NotFound("job_not_found", "There is no such conversion.")
    return found


@router.get(
    f"{PATH}/{{job_id}}",
    operation_id="getConversion",
    summary="See what became of a model",
    responses=problems({HTTPStatus.NOT_FOUND: "`job_not_found`", HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`"}),
)
async def get_conversion(request: Request, job_id: UUID, caller: Reader) -> dict[str, Any]:
    return record(await _find(services_of(request), caller, job_id))


@router.get(
    PATH,
    operation_id="listConversions",
    summary="List conversions, newest first",
    responses=problems({HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`, `invalid_cursor`"}),
)
async def list_conversions(
    request: Request,
    caller: Reader,
    user_id: Annotated[str | None, Query(max_length=128)] = None,
    status: Literal["created", "running", "completed", "failed"] | None = None,
    cursor: Annotated[str | None, Query(max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, Any]:
    before, states = id_at(cursor), None if status is None else STATES[status]
    async with services_of(request).pool.acquire() as connection:
        rows, total = await conversions.newest(
            connection, caller.tenant_id, user_id=user_id, states=states, before=before, limit=limit + 1
        )
    page = rows[:limit]
    more = cursor_of(page[-1]["job_id"]) if len(rows) > limit else None
    return {"jobs": [record(row) for row in page], "total": total, "next_cursor": more}


@router.get(
    f"{PATH}/{{job_id}}/result",
    operation_id="getConversionResult",
    summary="Download what came out",
    response_class=StreamingResponse,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`job_not_found`",
        HTTPStatus.CONFLICT: "`not_ready`",
        HTTPStatus.GONE: "`expired`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`",
        HTTPStatus.TOO_MANY_REQUESTS: "`too_many_downloads`",
    }),
)  # fmt: skip
async def get_conversion_result(
    request: Request, job_id: UUID, caller: Reader, artifact: Literal["onnx", "bie", "nef", "report"] = "nef"
) -> Response:
    services = services_of(request)
    audit = log.bind(job_id=str(job_id), artifact=artifact)
    audit.info("result requested")
    await _admit(services, caller)
    found = await _find(services, caller, job_id)
    if found["expired"]:
        gone = Problem(HTTPStatus.GONE, "expired", "The results have been deleted.")
        return gone.response(identity_of(request).request_id)
    output = next((o for o in found["outputs"] or [] if o["name"] == ARTIFACTS[artifact]), None)
    if output is None:
        raise Conflict("not_ready", "The conversion has no such result, or not yet.")
    suffix = "json" if artifact == "report" else artifact
    headers = {
        "Content-Length": str(output["size"]),
        "Content-Disposition": disposition(found["source_filename"], suffix),
        "Accept-Ranges": "none",
        "Cache-Control": "private, no-store",
    }
    return StreamingResponse(_streamed(services, output, audit), headers=headers, media_type=output["content_type"])


async def _admit(services: Services, caller: Caller) -> None:
    """The rate is one for all API processes, by key."""
    async with services.pool.acquire() as connection:
        quota = await take(connection, f"conversion-result {caller.key_prefix}", _DOWNLOADS_A_MINUTE)
    if not quota.allowed:
        log.info("result limited")
        raise TooMany("too_many_downloads", "Too many downloads; wait a little.", retry_after=quota.wait)


async def _streamed(services: Services, output: dict[str, Any], audit: Any) -> AsyncIterator[bytes]:
    sent = 0
    try:
        async for piece in services.store.pieces(output["key"]):
            yield piece
            sent += len(piece)
    finally:
        audit.info("result streamed" if sent == output["size"] else "result aborted", bytes=sent)
