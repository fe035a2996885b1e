"""What a worker counts. Labels are bounded: pipelines, steps and outcomes, never ids."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

HINTS = Counter("leasehold_hints_total", "Hints received from the broker, by what came of them", ["result"])
CLAIMS = Counter("leasehold_claims_total", "Tasks claimed, by how they were found", ["found_by"])
ATTEMPTS = Counter("leasehold_attempts_total", "Attempts ended", ["pipeline", "step", "outcome"])
SECONDS = Histogram(
    "leasehold_attempt_duration_seconds",
    "Claim to settlement",
    ["pipeline", "step"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800),
)
ADOPTED = Counter(
    "leasehold_outputs_adopted_total", "Attempts that found their work already done", ["pipeline", "step"]
)
LEASES = Gauge("leasehold_leases_held", "Leases that this worker holds")
LOST = Counter("leasehold_leases_lost_total", "Leases that were lost before the attempt could settle")
RELAYED = Counter("leasehold_outbox_relayed_total", "Hints that the relay sent because their committer did not")
EXPIRED = Counter("leasehold_leases_expired_total", "Leases of lost workers that this worker's sweeper ended")
