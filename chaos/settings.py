"""The settings of a chaos run: short leases and timeouts, so that minutes become seconds."""

from __future__ import annotations

LEASE_SECONDS = 4.0
SWEEP_SECONDS = 0.5
TRUST_MARGIN_SECONDS = 1.0
MAX_LOSSES = 20
DATABASE_SECONDS = 10.0
GRACE_SECONDS = 10.0  # for at most this long a lease lasts longer after a failover (LEASE_HAS_PASSED in workers.py)
EXTERNAL_LEASE_SECONDS = 5.0  # the shortest lease that the API gives
#: How long the key of a request that died stays reserved.
IN_FLIGHT_SECONDS = 5.0
#: A larger object gets a multipart upload with parts of this size, which is the smallest that S3 accepts. With the
#: platform's own 64 MiB and 16 MiB, a run would have few multipart uploads.
SINGLE_PUT_BYTES = 5 * 1024 * 1024
TENANTS = ("red", "blue", "green")
#: The tenant that has a webhook for the ends of its runs.
SUBSCRIBER = "red"
#: What each tenant's key may do.
SCOPES = (
    "media:read", "media:write", "runs:read", "runs:write", "templates:write", "external:work", "webhooks:write",
    "conversion:read", "conversion:write", "generation:read", "generation:write", "fleet:operate",
    "jobs:read", "jobs:operate",
)  # fmt: skip

#: LEASEHOLD_* of every process of a run.
PROCESS_SETTINGS = {
    "PIPELINES": "chaos.pipelines:with_short_delays",
    "LEASE_SECONDS": LEASE_SECONDS,
    "RENEW_SECONDS": 1.0,
    "TRUST_MARGIN_SECONDS": TRUST_MARGIN_SECONDS,
    "SWEEP_SECONDS": SWEEP_SECONDS,
    "DATABASE_TIMEOUT": DATABASE_SECONDS,
    "POLL_SECONDS": 1.0,
    "DRAIN_SECONDS": 5.0,
    "MAX_LOSSES": MAX_LOSSES,
    "WORKER_CHILDREN": 1,
    "WORKER_CONCURRENCY": 128,
    "AMQP_HEARTBEAT": 3,
    "AMQP_PUBLISH_TIMEOUT": 3.0,
    "S3_OPERATION_TIMEOUT": 5.0,
    "EGRESS_ALLOW": "127.0.0.0/8",  # where a run's receiver of webhooks is
    "GENERATION_IMAGE_POLL_SECONDS": 0.5,
    "GENERATION_PER_SERVER": 0,
    "CONVERSION_POSTS_PER_KEY": 6000,
    "LOG_FORMAT": "json",
}
