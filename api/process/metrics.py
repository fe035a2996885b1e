"""The API's own metrics, and the endpoint GET /metrics. Every label has few values: route templates, known methods,
status codes.
"""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from leasehold.telemetry.meters import QUICK, counter, fast_counter, gauge, histogram

REQUESTS = histogram(
    "http_request_duration_seconds",
    "Time from a request's first byte to the last byte of its answer; `waited`: the client asked to wait for a change",
    ["route", "method", "code", "waited"],
    buckets=QUICK,
)
# An alert needs this counter to exist, with the value 0, from the start. The histogram above has a series for a status
# code only after the first answer with this code.
SERVER_ERRORS = counter(
    "http_server_errors_total", "Requests that ended in a 5xx, without /livez, /readyz and /metrics"
)
IN_FLIGHT = gauge("http_requests_in_flight", "Requests that the API is answering, long polls included")
PROBLEMS = counter(
    "http_problems_total", "Requests that were refused or failed, by the code of the problem; 429 included", ["code"]
)
BODY_BYTES = gauge("http_body_bytes", "Bytes reserved for request bodies: LEASEHOLD_API_BODY_BYTES at most")
CONNECTIONS = gauge("http_connections", "Connections of clients: LEASEHOLD_API_CONNECTIONS at most")
CLOSED = counter(
    "http_connections_closed_total",
    "Connections that the API refused or closed. why: too many (no connection is free), made way (idle, closed for a "
    "new client), head (the request's head is too slow), body after its answer (the client still sends a body that the "
    "API has answered), unread answer (the client does not read its answer)",
    ["why"],
)
SUBMITTED = fast_counter(
    "jobs_submitted_total",
    "Jobs that clients submitted to this process, also as reruns, as runs of a schedule by hand, as test or repeated "
    "deliveries, and as bulk operations. Jobs that follow by themselves, such as ticks of schedules, are not counted",
    ["pipeline"],
)
UPLOADS_REFUSED = counter(
    "uploads_refused_total", "Uploaded objects that were refused, so that no job was written", ["code"]
)

#: The values of the label `method`. Any other method counts as OTHER.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

router = APIRouter(include_in_schema=False)


def method_label(method: str) -> str:
    return method if method in _METHODS else "OTHER"


@router.get("/metrics")
async def metrics() -> Response:
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
