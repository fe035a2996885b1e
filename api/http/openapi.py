"""Builds and serves the OpenAPI 3.1 document of the app. Routes use the helpers `problems` and `multipart` to declare
their problems and forms for the document.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from leasehold.api.http.document import complete_document
from leasehold.api.http.may_read_standby import LAG_HEADER, is_marked
from leasehold.api.http.problem_schema import ProblemAnswer
from leasehold.api.http.problems import MEDIA_TYPE
from leasehold.runtime.gather import has_failed

PATH = "/openapi.json"
router = APIRouter(include_in_schema=False)
_REFERENCE = "#/components/schemas/ProblemAnswer"  # the schema of every problem, in the document

#: The problems of every operation that needs an API key.
_COMMON_CODES = {
    HTTPStatus.UNAUTHORIZED: "`missing_api_key`, `invalid_api_key`",
    HTTPStatus.FORBIDDEN: "`insufficient_scope`",
    HTTPStatus.MISDIRECTED_REQUEST: "`wrong_cell`: the header Leasehold-Cell-Address names the cell of the tenant",
    HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`",
    HTTPStatus.INTERNAL_SERVER_ERROR: "`internal_error`",
    HTTPStatus.SERVICE_UNAVAILABLE: "`database_unavailable`, `store_unavailable`, `busy`, `tenant_moving`: try again "
    "after `Retry-After`",
}

#: The codes of 429 for every operation that creates a job.
REFUSED_FOR_NOW = "`rate_limited`, `queue_full`, `too_many_unfinished`, `storage_full`"
#: The code of 429 for every operation that checks a payload. It means that too many payloads of the tenant wait for
#: their check.
TOO_MANY_CHECKS = "`evaluations_waiting`"


def problems(codes: dict[HTTPStatus, str]) -> dict[int | str, dict[str, Any]]:
    """The value of a route's `responses`: the route's own `codes` by status, and the common codes. If `codes` has a
    status of the common codes, its text replaces the common text.
    """
    return {
        int(status): {"description": text, "content": {MEDIA_TYPE: {"schema": {"$ref": _REFERENCE}}}}
        for status, text in sorted((_COMMON_CODES | codes).items())
    }


def multipart(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """The value of a route's `openapi_extra`: the description of a form that the route itself reads from the socket."""
    schema = {"type": "object", "properties": properties, "required": required}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of the app. The first call builds the document; later calls return the same document."""
    if app.openapi_schema is None:
        content = get_openapi(
            title=app.title,
            version=app.version,
            summary=app.summary,
            description=app.description,
            routes=app.routes,
            servers=app.servers,
        )
        problem_schema = ProblemAnswer.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas = content.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(problem_schema.pop("$defs", {}))
        schemas["ProblemAnswer"] = problem_schema
        complete_document(content, app.state.scopes)
        _describe_lags(content, app)
        app.openapi_schema = content
    return app.openapi_schema


def _describe_lags(content: dict[str, Any], app: FastAPI) -> None:
    """Describe the header LAG_HEADER for the endpoints that `may_read_standby` marks, because their answers may come
    from a standby.
    """
    for route in app.routes:
        if isinstance(route, APIRoute) and is_marked(route.endpoint) and route.path in content["paths"]:
            content["paths"][route.path]["get"]["responses"]["200"].setdefault("headers", {})[LAG_HEADER] = {
                "description": "The answer is at most this many seconds old, because it is from a standby of the "
                "database. An answer without this header is from the primary. A request with `Cache-Control: no-cache` "
                "gets such an answer.",
                "schema": {"type": "number", "minimum": 0},
            }


class Contract:
    """The OpenAPI document of an app, as bytes. The first request starts a thread that builds the document, because
    this takes a second. Requests that arrive during this time wait for the same thread.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._building: asyncio.Task[bytes] | None = None

    async def content(self) -> bytes:
        if self._building is None or has_failed(self._building):  # after a failure the next request builds it again
            self._building = asyncio.create_task(asyncio.to_thread(lambda: orjson.dumps(document(self._app))))
        return await asyncio.shield(self._building)  # a request that is cancelled must not stop the building


@router.get(PATH)
async def serve_document(request: Request) -> Response:
    """Serve the document without a key."""
    contract: Contract = request.app.state.contract
    return Response(await contract.content(), media_type="application/json")
