"""What the API measures, and /metrics. Labels are bounded: route templates, known methods, status codes."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, Counter, Gauge, Histogram, generate_latest

REQUESTS = Histogram(
    "leasehold_http_request_duration_seconds",
    "Time from a request's first byte to its answer's last",
    ["route", "method", "code"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
IN_FLIGHT = Gauge("leasehold_http_requests_in_flight", "Requests that are being answered, long polls included")
SUBMITTED = Counter("leasehold_jobs_submitted_total", "Jobs written by this process", ["pipeline"])
REFUSED = Counter("leasehold_uploads_refused_total", "Uploaded objects refused before any job", ["code"])

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

router = APIRouter(include_in_schema=False)


def method_label(method: str) -> str:
    return method if method in _METHODS else "OTHER"


@router.get("/metrics")
async def metrics() -> Response:
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
