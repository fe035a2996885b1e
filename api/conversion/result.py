"""GET /api/v1/jobs/{job_id}/result: streams an artifact from the store.

Each API key has limits for downloads, and each download has a time limit. A key is charged for the bytes that the API
has sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated, Any, Literal
from uuid import UUID

import structlog
from fastapi import APIRouter, Depends, Request, Response
from starlette.types import Receive, Scope, Send

from leasehold.api.auth.audit import AuditedRequire, log_access, record
from leasehold.api.auth.security import CONVERSION_READ
from leasehold.api.conversion.conversion import find
from leasehold.api.conversion.view import ARTIFACTS, disposition
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.leaving import until_gone
from leasehold.api.http.openapi import problems
from leasehold.api.process.best_effort import best_effort
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.domain.errors import Conflict, Gone, LeaseholdError, NotFound, ObjectMissing, TooMany
from leasehold.limits import downloads
from leasehold.pipelines.conversion.rows import Row

log = structlog.get_logger(__name__)
router = APIRouter(tags=["conversion"], route_class=AuthenticatedFirst)
Reader = Annotated[Caller, Depends(AuditedRequire(CONVERSION_READ))]
ArtifactName = Literal["onnx", "bie", "nef", "report"]

#: The code of the problem that the audit's log line calls `over_quota`.
_OVER_QUOTA = "download_quota_exceeded"


@router.get(
    "/api/v1/jobs/{job_id}/result",
    operation_id="getConversionResult",
    summary="Download a result",
    description="At most 10 at once, 5 in 10 seconds, 20 a minute, 1 GB an hour and 6 GB in 24 hours by API key; "
    "5 minutes each. `Range` is ignored.",
    response_class=Response,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`job_not_found`",
        HTTPStatus.CONFLICT: "`not_ready`",
        HTTPStatus.GONE: "`expired`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`",
        HTTPStatus.TOO_MANY_REQUESTS: "`too_many_downloads`, `too_many_at_once`, `download_quota_exceeded`",
    }) | {200: {"content": {"application/octet-stream": {}, "application/json": {}}}},
)  # fmt: skip
async def get_conversion_result(
    request: Request, job_id: UUID, caller: Reader, artifact: ArtifactName = "nef"
) -> Response:
    services = services_of(request)
    audit_fields = {"job_id": str(job_id), "artifact": artifact}
    log_access("result.requested", request, caller, **audit_fields)
    try:
        artifacts = await finished_artifacts(services, caller, job_id, (artifact,))
        download_id = await _begin_download(services, caller, artifacts[0]["size"])
    except LeaseholdError as error:
        log_access(f"result.{_outcome_of(error)}", request, caller, **audit_fields)
        raise
    return await _open_stream(services, request, caller, download_id, artifacts[0], audit_fields)


async def finished_artifacts(
    services: Services, caller: Caller, job_id: UUID, names: tuple[str, ...]
) -> list[dict[str, Any]]:
    """The rows of the job's artifacts. Raises NotFound, Gone or Conflict."""
    row = await find(services, caller, job_id)
    return [_artifact_of(row, name) for name in names]


def _artifact_of(row: Row, name: str) -> dict[str, Any]:
    for output in row["outputs"] or []:
        if output["name"] == ARTIFACTS[name]:
            return {**output, "disposition": disposition(row["source_filename"], _suffix(name))}
    raise Conflict("not_ready", "The conversion does not have this result yet, or will never have it.")


def _suffix(name: str) -> str:
    return "json" if name == "report" else name


async def _begin_download(services: Services, caller: Caller, size: int) -> UUID:
    """Charge the key for `size` bytes. At the end of the download, `_end_download` corrects this charge. Returns the
    download's id. Raises TooMany if the key is over a limit.
    """
    async with services.pool.acquire() as connection:
        return await downloads.begin(connection, caller.tenant_id, caller.quota_key, size)


def _outcome_of(error: LeaseholdError) -> str:
    """The outcome that the audit's log line names."""
    match error:
        case NotFound():
            return "missing"
        case Gone():
            return "expired"
        case Conflict():
            return "not_ready"
        case TooMany(code=code):
            return "over_quota" if code == _OVER_QUOTA else "limited"
    return "failed"


async def _open_stream(
    services: Services,
    request: Request,
    caller: Caller,
    download_id: UUID,
    output: dict[str, Any],
    audit_fields: dict[str, Any],
) -> Response:
    """The response that streams the artifact. The first piece is read before the response begins, so that the answer
    can still be 410 if the object was deleted.
    """
    pieces = services.store.pieces(output["key"])
    try:
        first_piece = await anext(pieces, b"")
    except BaseException as error:
        await pieces.aclose()
        await _end_download(services, caller, download_id, 0)
        is_missing = isinstance(error, ObjectMissing)
        log_access("result.expired" if is_missing else "result.failed", request, caller, **audit_fields)
        if is_missing:
            raise Gone("expired", "The results have been deleted.") from None
        raise
    headers = {
        "Content-Length": str(output["size"]),
        "Content-Disposition": output["disposition"],
        "Accept-Ranges": "none",
        "Cache-Control": "private, no-store",
    }

    async def record_end(sent_bytes: int, outcome: str) -> None:
        log_access(f"result.{outcome}", request, caller, **audit_fields, bytes=sent_bytes)
        await _end_download(services, caller, download_id, sent_bytes, audit_fields | {"outcome": outcome})

    return _ArtifactStream(
        pieces, first_piece, output["size"], record_end, headers=headers, media_type=output["content_type"]
    )


async def _end_download(
    services: Services, caller: Caller, download_id: UUID, sent_bytes: int, audit_fields: dict[str, Any] | None = None
) -> None:
    """Charge the download for `sent_bytes` in place of its whole size. `audit_fields`: the fields for the audit; None:
    no byte was sent, and the audit gets no row.

    If an outage prevents this, the download stays charged in full, and counts as open until its time limit.
    """
    with best_effort("the ends of downloads"):
        async with services.pool.acquire() as connection, connection.transaction():
            await downloads.end(connection, caller.tenant_id, download_id, sent_bytes)
            if audit_fields is not None:
                details = {name: value for name, value in audit_fields.items() if name != "job_id"}
                await record(connection, caller, "job.downloaded", audit_fields["job_id"], bytes=sent_bytes, **details)


class _ArtifactStream(Response):
    """Streams an artifact, with one piece in memory. The stream ends early if the client disconnects, the time limit
    passes, or the store fails. At its end, early or not, the stream calls `record_end` with the number of sent bytes
    and the outcome.
    """

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], first_piece: bytes, size: int, record_end: Any, **options: Any
    ) -> None:
        super().__init__(None, **options)
        self._pieces = pieces
        self._first_piece = first_piece
        self._size = size
        self._record_end = record_end
        self._sent_bytes = 0

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        disconnected = asyncio.create_task(until_gone(receive))
        try:
            async with aclosing(self._pieces), asyncio.timeout(downloads.MAX_SECONDS) as time_limit:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await self._send(send, self._first_piece)
                async for piece in self._pieces:
                    if disconnected.done():
                        return
                    await self._send(send, piece)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            if not time_limit.expired():
                raise
            # The error is not raised, because a slow client is not an outage.
            log.info("a download was cut at its time limit", bytes=self._sent_bytes)
        finally:
            disconnected.cancel()
            is_complete = self._sent_bytes == self._size and not disconnected.done()
            await asyncio.shield(self._record_end(self._sent_bytes, "streamed" if is_complete else "aborted"))

    async def _send(self, send: Send, piece: bytes) -> None:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        self._sent_bytes += len(piece)
