"""The OpenAPI 3.1 document: problem answers per operation, written once a status."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi

from leasehold.api.http.document import complete
from leasehold.api.http.problem_schema import ProblemAnswer
from leasehold.api.http.problems import MEDIA_TYPE

PATH = "/openapi.json"
router = APIRouter(include_in_schema=False)
_REFERENCE = "#/components/schemas/ProblemAnswer"

#: Every operation behind a key may answer these.
_ALWAYS = {
    HTTPStatus.UNAUTHORIZED: "`missing_api_key`, `invalid_api_key`",
    HTTPStatus.FORBIDDEN: "`insufficient_scope`",
    HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`",
    HTTPStatus.INTERNAL_SERVER_ERROR: "`internal_error`",
    HTTPStatus.SERVICE_UNAVAILABLE: "`database_unavailable`, `store_unavailable`: try again after `Retry-After`",
}

#: With 429, of whatever makes a job.
REFUSED_FOR_NOW = "`rate_limited`, `queue_full`, `too_many_unfinished`, `storage_full`"
#: With 429, of whatever has a payload checked.
CHECKED_LATER = "`evaluations_waiting`"


def problems(said: dict[HTTPStatus, str]) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`: status -> which codes it stands for, on top of those of every operation."""
    return {
        int(status): {"description": text, "content": {MEDIA_TYPE: {"schema": {"$ref": _REFERENCE}}}}
        for status, text in sorted((_ALWAYS | said).items())
    }


def multipart(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """For a route's `openapi_extra`: a form that the route reads from the socket itself."""
    schema = {"type": "object", "properties": properties, "required": required}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def document(app: FastAPI) -> dict[str, Any]:
    """Made once, at the first request for it."""
    if app.openapi_schema is None:
        made = get_openapi(
            title=app.title,
            version=app.version,
            summary=app.summary,
            description=app.description,
            routes=app.routes,
            servers=app.servers,
        )
        schema = ProblemAnswer.model_json_schema(ref_template="#/components/schemas/{model}")
        parts = made.setdefault("components", {}).setdefault("schemas", {})
        parts.update(schema.pop("$defs", {}))
        parts["ProblemAnswer"] = schema
        complete(made, app.state.scopes)
        app.openapi_schema = made
    return app.openapi_schema


@router.get(PATH)
async def contract(request: Request) -> Response:
    """The document, for anybody. It is made once, at the first request, in a thread: that takes a second, and needs no
    key. Later requests get the same bytes.
    """
    state = request.app.state
    if not hasattr(state, "contract"):
        state.contract = asyncio.create_task(asyncio.to_thread(lambda: orjson.dumps(document(request.app))))
    made: bytes = await asyncio.shield(state.contract)
    return Response(made, media_type="application/json")
