"""Metrics of jobs that ended. The process that ended a job counts it. Mostly this process is a worker. But an API
process ends a job when a request to cancel takes effect immediately, or when an external worker did the work.
"""

from __future__ import annotations

from collections.abc import Sequence

from leasehold.telemetry.meters import fast_counter, fast_histogram
from leasehold.transitions.endings import JobEnded

JOBS = fast_counter(
    "jobs_finished_total",
    "Jobs that ended. rejected: no attempt can succeed with this input; failed: all attempts failed; expired: too late",
    ["pipeline", "outcome"],
    words=["outcome"],
)
# An alert on an outcome needs the counter at 0 from the start of the process. The pipelines are not known then, because
# the templates of tenants are pipelines, too. So this counter has no label for the pipeline.
OUTCOMES = fast_counter(
    "job_outcomes_total", "Jobs that ended, as leasehold_jobs_finished_total, of all pipelines together", ["outcome"]
)
for _outcome in ("succeeded", "rejected", "failed", "expired", "cancelled"):
    OUTCOMES.labels(_outcome)
JOB_SECONDS = fast_histogram("job_duration_seconds", "From a job's submission to its success", ["pipeline"])


def count_ended_jobs(ends: Sequence[JobEnded]) -> None:
    """Count the jobs. Call it once the transaction that ended them has committed."""
    for job in ends:
        JOBS.labels(job.pipeline, job.outcome).inc()
        OUTCOMES.labels(job.outcome).inc()
        if job.outcome == "succeeded":
            JOB_SECONDS.labels(job.pipeline).observe(job.seconds)
