"""Metrics of requests to the object store: duration and outcome."""

from __future__ import annotations

from leasehold.telemetry.meters import QUICK, counter, histogram

REQUESTS = histogram(
    "store_request_duration_seconds",
    "A request to the object store, with the transfer of its bytes. operation: put, get, head, delete, list; "
    "outcome: ok, missing, there already, unavailable, refused, left",
    ["operation", "outcome"],
    buckets=QUICK,
)
REMOVED = counter(
    "uploads_removed_total",
    "Objects of clients that housekeeping deleted. why: too large, refused, unfinished",
    ["why"],
)
