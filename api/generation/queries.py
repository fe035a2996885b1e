"""The endpoints that read generations: the state and the results of an order, and statistics."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request, Response

from leasehold.api.auth.security import GENERATION_READ, Require
from leasehold.api.generation.schemas import SERVER_ID, TASK_ID, GenerationAnswer, GenerationStatistics, TaskQuery
from leasehold.api.generation.view import answer, etag, is_finished, statistics, unknown_answer
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.etags import WaitSeconds, matches, may_be_current
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.http.openapi import problems
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.pipelines.generation import rows as generations
from leasehold.pipelines.generation.provider import Kind
from leasehold.pipelines.generation.rows import Row

router = APIRouter(tags=["generation"], route_class=AuthenticatedFirst)
Reader = Annotated[Caller, Depends(Require(GENERATION_READ))]  # a caller whose key has the scope `generation:read`
#: The client's own id of a generation. (In the paths, parameters and answers of generations, `task` does not mean a
#: task of the platform.)
TaskId = Annotated[str, Query(pattern=TASK_ID)]
Consume = Annotated[bool, Query(description="Consume a finished result: no later query finds the task.")]
IfNoneMatch = Annotated[str | None, Header(max_length=1000)]

#: The arguments that the decorators of all POST routes have in common, and below those of all GET routes.
_POST_ROUTE = {
    "response_model": GenerationAnswer,
    "description": "An unknown task has status 0, an empty url and the `status_text` `unknown`. A result is "
    "kept until `expires_at`, unless it is consumed.",
    "responses": problems({HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`"}),
}
_NOT_MODIFIED = {304: {"description": "Nothing has changed since the answer with the ETag in `If-None-Match`."}}
_GET_ROUTE = _POST_ROUTE | {
    "responses": problems({HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`"}) | _NOT_MODIFIED
}


@router.get("/v1/images/query", operation_id="queryImages", summary="Get the state of images", **_GET_ROUTE)  # type: ignore[arg-type]  # values of several types
async def query_images(
    request: Request,
    response: Response,
    caller: Reader,
    task_id: TaskId,
    wait: WaitSeconds = 0,
    if_none_match: IfNoneMatch = None,
    *,
    consume: Consume = False,
) -> GenerationAnswer | Response:
    return await _query(request, response, caller, "image", task_id, wait, if_none_match, consume=consume)


@router.post("/v1/images/query", operation_id="postImagesQuery", summary="As the GET, with a JSON body", **_POST_ROUTE)  # type: ignore[arg-type]  # as above
async def post_images_query(
    request: Request, response: Response, caller: Reader, body: TaskQuery
) -> GenerationAnswer | Response:
    return await _query(request, response, caller, "image", body.task_id, body.wait, consume=body.consume)


@router.get("/v1/video/query", operation_id="queryVideo", summary="Get the state of a video", **_GET_ROUTE)  # type: ignore[arg-type]  # as above
async def query_video(
    request: Request,
    response: Response,
    caller: Reader,
    task_id: TaskId,
    wait: WaitSeconds = 0,
    if_none_match: IfNoneMatch = None,
    *,
    consume: Consume = False,
) -> GenerationAnswer | Response:
    return await _query(request, response, caller, "video", task_id, wait, if_none_match, consume=consume)


@router.post("/v1/video/query", operation_id="postVideoQuery", summary="As the GET, with a JSON body", **_POST_ROUTE)  # type: ignore[arg-type]  # as above
async def post_video_query(
    request: Request, response: Response, caller: Reader, body: TaskQuery
) -> GenerationAnswer | Response:
    return await _query(request, response, caller, "video", body.task_id, body.wait, consume=body.consume)


async def _query(
    request: Request,
    response: Response,
    caller: Caller,
    kind: Kind,
    task_id: str,
    wait: float = 0,
    if_none_match: str | None = None,
    *,
    consume: bool,
) -> GenerationAnswer | Response:
    services = services_of(request)
    row = await _find(request, caller, kind, task_id)
    if row is not None and wait and not is_finished(row) and may_be_current(if_none_match, etag(row)):
        # Wait until the next event, at most `wait` seconds.
        await services.watch.changed(row["job_id"], row["event_seq"], wait)
        row = await _find(request, caller, kind, task_id)
    if row is None:
        return unknown_answer(task_id)
    headers = {"ETag": etag(row)} | ({} if is_finished(row) else {"Retry-After": "1"})
    if matches(if_none_match, headers["ETag"]) and not consume:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    generation_answer = answer(services, row)
    # A client that disconnected while it waited does not get the result, so its query must not consume the result.
    if consume and is_finished(row) and not await request.is_disconnected():
        async with services.pool.acquire() as connection:
            if not await generations.consume(connection, caller.tenant_id, row["job_id"]):  # another query was faster
                return unknown_answer(task_id)
    response.headers.update(headers)
    return generation_answer


async def _find(request: Request, caller: Caller, kind: Kind, task_id: str) -> Row | None:
    async with services_of(request).pool.acquire() as connection:
        return await generations.find(connection, caller.tenant_id, task_id, kind)


@router.get(
    "/v1/generations/statistics",
    operation_id="generationStatistics",
    summary="Count generations by status, and unfinished generations by server",
    response_model=GenerationStatistics,
    responses=problems({HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`"}),
)
@may_read_standby
async def generation_statistics(
    request: Request, caller: Reader, server_id: Annotated[str | None, Query(pattern=SERVER_ID)] = None
) -> GenerationStatistics:
    async with services_of(request).pool.acquire() as connection:
        return statistics(await generations.counts(connection, caller.tenant_id, server_id))
