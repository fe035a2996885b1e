"""The outermost middleware. It gives each request its ids (request id, trace), adds the security headers, writes the
log line and the metrics, and answers errors that no exception handler of the application caught.

A log line has only the fields of a fixed list, so it never contains a query string, a header or a body.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, replace
from http import HTTPStatus
from time import perf_counter
from typing import Any

import structlog
from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leasehold.api.http.problems import is_database_away, problem_of
from leasehold.api.process import deadline, tenant_requests
from leasehold.api.process.deadline import Deadline
from leasehold.api.process.metrics import IN_FLIGHT, REQUESTS, SERVER_ERRORS, method_label
from leasehold.db.commit_points import name_commits
from leasehold.domain.ids import new_id
from leasehold.telemetry import traces
from leasehold.telemetry.outages import DATABASE

log = structlog.get_logger(__name__)

#: The request ids that the API accepts from clients: up to 128 printable ASCII characters without spaces.
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
#: The header `traceparent` of W3C Trace Context. An id of zeros only is not valid.
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
#: These headers are added to every answer that does not set them itself.
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)
#: Monitoring requests these paths every few seconds. So their successes are not logged, and their errors do not count
#: among the errors that clients got.
_PATHS_OF_MONITORING = frozenset({"/livez", "/readyz", "/metrics"})


@dataclass(frozen=True, slots=True)
class Identity:
    """The ids of a request. They are in its log lines, in its problems, and in the `trace` of each job that the request
    submits.
    """

    request_id: str
    traceparent: str

    @property
    def trace(self) -> dict[str, str]:
        return {"request_id": self.request_id, "traceparent": self.traceparent}


def identity_of(request: Request) -> Identity:
    identity: Identity = request.state.identity
    return identity


def _identify(headers: Headers) -> Identity:
    """The ids that the client sent. An id that is missing or malformed is replaced by a new id."""
    request_id = headers.get("x-request-id", "")
    traceparent = headers.get("traceparent", "")
    if not _REQUEST_ID.fullmatch(request_id):
        request_id = str(new_id())
    if not _TRACEPARENT.fullmatch(traceparent):
        traceparent = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
    return Identity(request_id, traceparent)


def _client_span(headers: Headers) -> dict[str, str] | None:
    """The client's span, of which the request's span becomes a child. None: the client names no span."""
    traceparent = headers.get("traceparent", "")
    return {"traceparent": traceparent} if _TRACEPARENT.fullmatch(traceparent) else None


class Edge:
    """The middleware. `database_seconds`: the total time for which a request may wait for PostgreSQL before its answer
    begins.
    """

    def __init__(self, app: ASGIApp, database_seconds: float) -> None:
        self._app = app
        self._database_seconds = database_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        method = method_label(scope["method"])
        with traces.span(method, "SERVER", parent=_client_span(headers), http_request_method=method) as span:
            identity = _identify(headers)
            if span.traceparent is not None:  # None: traces are off
                identity = replace(identity, traceparent=span.traceparent)
            await self._serve(identity, span, scope, receive, send)

    async def _serve(self, identity: Identity, span: traces.Span, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["identity"] = identity
        answer = _Answer(send, identity, deadline.begin(self._database_seconds))
        started_at = perf_counter()
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(
            request_id=identity.request_id, trace_id=traces.trace_id_of(identity.trace)
        )
        # Tests stop the process at failpoints. The failpoint after a commit is named after the request's endpoint.
        name_commits(lambda: getattr(scope.get("route"), "operation_id", None))
        IN_FLIGHT.inc()
        try:
            await self._app(scope, receive, answer.send)
        except Exception as error:  # noqa: BLE001 - the last place that can turn an error into an answer
            span.mark_failed(type(error).__name__)
            await _answer_error(error, identity, scope, receive, answer)
        finally:
            IN_FLIGHT.dec()
            tenant_requests.end(scope["state"])  # the request no longer counts among those of its tenant under way
            _record_request(scope, answer.status, perf_counter() - started_at, span, identity)


class _Answer:
    """Sends the answer: adds headers, remembers the status, and lifts the request's deadline for PostgreSQL when the
    answer begins, because a stream may last longer than this deadline.
    """

    def __init__(self, send: Send, identity: Identity, database_deadline: Deadline) -> None:
        self._send = send
        self._identity = identity
        self._deadline = database_deadline
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = int(message["status"])
            self._deadline.lift()
            headers = list(message.get("headers", ()))
            present_names = {name for name, _ in headers}
            headers += [header for header in _HEADERS if header[0] not in present_names]
            headers.append((b"x-request-id", self._identity.request_id.encode()))
            message["headers"] = headers
        await self._send(message)


async def _answer_error(error: Exception, identity: Identity, scope: Scope, receive: Receive, answer: _Answer) -> None:
    """Log the error. If no answer has begun, answer with the error's problem."""
    problem = problem_of(error)
    if is_database_away(error):
        DATABASE.record_error(error, "requests")  # logs the outage once; the request's own log line has the status
    elif problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("request failed unexpectedly", error=type(error).__name__, exc_info=error)
    else:
        log.warning("request failed", error=type(error).__name__, code=problem.code)
    if answer.status is None:
        # The console sets `error_response` to a page, which replaces the problem.
        response = scope["state"].get("error_response") or problem.response(identity.request_id)
        await response(scope, receive, answer.send)


def _record_request(scope: Scope, status: int | None, seconds: float, span: traces.Span, identity: Identity) -> None:
    """Write the metrics, the span and the log line of a request. `status`: None if no answer has begun."""
    route = getattr(scope.get("route"), "path", "unmatched")
    method = method_label(scope["method"])
    code = str(status) if status is not None else "aborted"
    # With `wait`, the API may hold the request back for a while. Such durations are recorded apart from all others.
    is_long_poll = "yes" if b"&wait=" in b"&" + scope.get("query_string", b"") else "no"
    REQUESTS.labels(route, method, code, is_long_poll).observe(
        seconds, traces.exemplar_of(traces.trace_id_of(identity.trace))
    )
    if status is not None and status >= HTTPStatus.INTERNAL_SERVER_ERROR and route not in _PATHS_OF_MONITORING:
        SERVER_ERRORS.inc()
    span.rename(f"{method} {route}")
    span.set_attributes(http_route=route, http_response_status_code=status or 0)
    if route in _PATHS_OF_MONITORING and status == 200:  # noqa: PLR2004 - an HTTP status
        return
    fields: dict[str, Any] = {"route": route, "method": method, "status": status}
    log.info("request", **fields, duration_ms=round(seconds * 1000, 2))
