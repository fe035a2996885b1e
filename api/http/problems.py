"""Turns errors into HTTP answers of the form `application/problem+json` (RFC 9457). STATUS_OF has the HTTP status of
each kind of error.

The member `type` of an answer is a URN with the error's code, because a URN stays valid forever, unlike an address. The
member `detail` is written for the client, and names no internal part of the platform.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from math import ceil
from typing import Any
from urllib.parse import quote

import asyncpg
import orjson
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from leasehold.api.process.metrics import PROBLEMS
from leasehold.domain.errors import (
    BadGateway,
    BodyTooLarge,
    BodyTooSlow,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    NotFound,
    RequestError,
    StoreAbsent,
    StoreError,
    TooMany,
    Unauthenticated,
    Unavailable,
    Unsupported,
    WrongCell,
)
from leasehold.domain.job_filter import InvalidFilter
from leasehold.domain.json_pointer import pointer_to
from leasehold.runtime.transient import may_try_again

MEDIA_TYPE = "application/problem+json"

#: The class of an error -> the HTTP status. A subclass that is not here has the status of its base class.
STATUS_OF: dict[type[RequestError], HTTPStatus] = {
    Unauthenticated: HTTPStatus.UNAUTHORIZED,
    Forbidden: HTTPStatus.FORBIDDEN,
    NotFound: HTTPStatus.NOT_FOUND,
    Conflict: HTTPStatus.CONFLICT,
    Gone: HTTPStatus.GONE,
    BodyTooSlow: HTTPStatus.REQUEST_TIMEOUT,
    BodyTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    WrongCell: HTTPStatus.MISDIRECTED_REQUEST,
    Unsupported: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    Invalid: HTTPStatus.UNPROCESSABLE_ENTITY,
    TooMany: HTTPStatus.TOO_MANY_REQUESTS,
    BadGateway: HTTPStatus.BAD_GATEWAY,
    Unavailable: HTTPStatus.SERVICE_UNAVAILABLE,
}

#: Seconds after which a client may try again during an outage of the database or the store.
RETRY_AFTER = 2

#: PostgreSQL's error code while a tenant moves to another cell (installation). Triggers then refuse the tenant's
#: changes (migration 0040).
MOVING = "LHMOV"

#: The errors by which PostgreSQL refuses a NUL character in text, and in JSON.
NOT_STORABLE = (asyncpg.CharacterNotInRepertoireError, asyncpg.UntranslatableCharacterError)

#: An answer names at most this many wrong values, because a small body can have very many.
_MAX_ERRORS = 100
#: The ASCII characters that need no percent-encoding in the fragment of a URI (RFC 3986, 3.5).
_SAFE_IN_FRAGMENTS = "/?:@!$&'()*+,;="
#: An HTTP status -> the code and the sentence of an error about which only the status is known.
CODE_AND_DETAIL = {
    HTTPStatus.NOT_FOUND: ("not_found", "There is nothing at this address."),
    HTTPStatus.METHOD_NOT_ALLOWED: ("method_not_allowed", "This address does not support the method."),
    HTTPStatus.BAD_REQUEST: ("bad_request", "The request is malformed."),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as the client sees it. `errors`: the wrong values of the request, each with its place and the reason."""

    status: HTTPStatus
    code: str
    detail: str
    headers: Mapping[str, str] = field(default_factory=dict)
    errors: Sequence[Mapping[str, str | int]] = ()

    def body(self, request_id: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "type": f"urn:leasehold:problem:{self.code}",
            "title": self.status.phrase,
            "status": int(self.status),
            "detail": self.detail,
            "code": self.code,
            "request_id": request_id,
        }
        if self.errors:
            body["errors"] = list(self.errors)
        return body

    def count(self) -> None:
        """Count the problem in the metric PROBLEMS. Call this once for each answer."""
        PROBLEMS.labels(self.code).inc()

    def response(self, request_id: str) -> Response:
        """The HTTP answer. This method also counts the problem."""
        self.count()
        return Response(
            orjson.dumps(self.body(request_id)), int(self.status), dict(self.headers), media_type=MEDIA_TYPE
        )


def problem_of(error: Exception) -> Problem:
    """The problem for `error`. An unexpected error becomes a 500 without any detail."""
    if isinstance(error, RequestError):
        return _problem_of_request_error(error)
    if isinstance(error, RequestValidationError):
        return _problem_of_validation(error)
    if isinstance(error, HTTPException):
        return _problem_of_http_exception(error)
    if isinstance(error, NOT_STORABLE):
        return Problem(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            "text_not_storable",
            "A text contains a NUL character, which cannot be stored.",
        )
    return _problem_of_other_error(error)


def _problem_of_other_error(error: Exception) -> Problem:
    if isinstance(error, StoreAbsent):
        return Problem(HTTPStatus.SERVICE_UNAVAILABLE, "store_not_configured", str(error))
    if isinstance(error, StoreError):
        return _unavailable("store_unavailable", "The object store does not answer.")
    if isinstance(error, asyncpg.PostgresError) and error.sqlstate == MOVING:
        return _unavailable("tenant_moving", "The tenant is moving to another cell.")
    if is_database_away(error):
        return _unavailable("database_unavailable", "The database does not answer.")
    return Problem(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "internal_error",
        "The server failed; its log has the request_id.",
    )


def is_database_away(error: BaseException) -> bool:
    """Whether the error may mean that PostgreSQL is unreachable or overloaded. Then the request may succeed later."""
    return may_try_again(error)


def _unavailable(code: str, detail: str) -> Problem:
    return Problem(HTTPStatus.SERVICE_UNAVAILABLE, code, f"{detail} Try again soon.", {"Retry-After": str(RETRY_AFTER)})


def _problem_of_request_error(error: RequestError) -> Problem:
    status = next(STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF)
    headers = dict(error.headers)
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, Forbidden):
        headers["WWW-Authenticate"] = 'Bearer error="insufficient_scope"'
    if isinstance(error, (BodyTooSlow, BodyTooLarge)):
        headers["Connection"] = "close"  # the rest of the body is not read
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, ceil(error.retry_after)))
    elif isinstance(error, (TooMany, Unavailable)):
        headers["Retry-After"] = str(RETRY_AFTER)
    if isinstance(error, InvalidFilter):  # the filter was in the body (`pointer`), or else the query parameter `q`
        place = {"parameter": "q", "in": "query"} if error.pointer is None else {"pointer": error.pointer}
        errors: list[dict[str, str | int]] = [{**place, "position": error.position, "detail": error.sentence}]
        return Problem(status, error.code, error.message, headers, errors)
    return Problem(status, error.code, error.message, headers)


def _problem_of_http_exception(error: HTTPException) -> Problem:
    return problem_of_status(HTTPStatus(error.status_code), dict(error.headers or {}))


def problem_of_status(status: HTTPStatus, headers: Mapping[str, str] | None = None) -> Problem:
    code, detail = CODE_AND_DETAIL.get(status, (status.name.lower(), f"{status.phrase}."))
    return Problem(status, code, detail, headers or {})


def _problem_of_validation(error: RequestValidationError) -> Problem:
    errors = error.errors()
    places = {str(item["loc"][0]) for item in errors if item["loc"]}
    if "path" in places:  # a malformed id names no object, so the answer is 404
        return _problem_of_http_exception(HTTPException(404))
    if any(item["type"] == "json_invalid" for item in errors):
        return Problem(HTTPStatus.BAD_REQUEST, "malformed_json", "The body is not JSON.")
    return Problem(
        HTTPStatus.UNPROCESSABLE_ENTITY,
        "invalid_request",
        f"Some values of the request are not acceptable: `errors` names the first {_MAX_ERRORS}."
        if len(errors) > _MAX_ERRORS
        else "Some values of the request are not acceptable: `errors` names each.",
        errors=[_field_error(item) for item in errors[:_MAX_ERRORS]],
    )


def _field_error(item: Mapping[str, Any]) -> dict[str, str]:
    """Where the error is (a JSON pointer into the body, or a parameter's name), and its reason. The result never
    contains the wrong value.
    """
    place, *path = (str(part) for part in item["loc"]) if item["loc"] else ("body",)
    if place == "body":
        # The fragment of a URI (RFC 6901, 6).
        return {"pointer": "#" + quote(pointer_to(path), safe=_SAFE_IN_FRAGMENTS), "detail": str(item["msg"])}
    return {"parameter": ".".join(path), "in": place, "detail": str(item["msg"])}
