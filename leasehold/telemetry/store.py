"""Metrics of the object store: the duration and outcome of requests, and clients' objects that housekeeping deleted."""

from __future__ import annotations

from leasehold.telemetry.meters import QUICK, counter, histogram

REQUESTS = histogram(
    "store_request_duration_seconds",
    "A request to the object store, with the transfer of its bytes. operation: put, get, head, delete, list, bucket, "
    "readiness (the check of /readyz); outcome: ok, missing, there already, unavailable (no answer, an error, or no "
    "bucket), refused (401 or 403: the credentials), left (the caller gave up)",
    ["operation", "outcome"],
    buckets=QUICK,
)
#: The outcomes of requests that the store did not serve.
NOT_SERVED = ("unavailable", "refused")
# These histograms exist at 0 from the start, because an alert must see the first request that the store did not serve.
for _operation in ("put", "get", "head", "delete", "list", "bucket", "readiness"):
    for _outcome in NOT_SERVED:
        REQUESTS.labels(_operation, _outcome)
REMOVED = counter(
    "uploads_removed_total",
    "Objects of clients that housekeeping deleted. why: too large, refused, unfinished",
    ["why"],
)
