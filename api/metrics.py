"""What the API measures, and /metrics. Labels are bounded: route templates, known methods, status codes."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from leasehold.telemetry.meters import QUICK, counter, gauge, histogram, tallies

REQUESTS = histogram(
    "http_request_duration_seconds",
    "Time from a request's first byte to its answer's last; `waited`: it was asked to wait for a change",
    ["route", "method", "code", "waited"],
    buckets=QUICK,
)
IN_FLIGHT = gauge("http_requests_in_flight", "Requests that are being answered, long polls included")
PROBLEMS = counter(
    "http_problems_total", "Requests that were refused or failed, by the problem's code; 429s among them", ["code"]
)
SUBMITTED = tallies("jobs_submitted_total", "Jobs written by this process", ["pipeline"])
REFUSED = counter("uploads_refused_total", "Uploaded objects refused before any job", ["code"])

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

router = APIRouter(include_in_schema=False)


def method_label(method: str) -> str:
    return method if method in _METHODS else "OTHER"


@router.get("/metrics")
async def metrics() -> Response:
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
