"""The records of a claim: what the claim returns to the worker, and the terms of the lease that the claim gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from leasehold.domain.lease import Lease


@dataclass(frozen=True, slots=True)
class Claimed:
    """A lease, and what the worker needs to run the attempt."""

    lease: Lease
    job_id: UUID
    tenant_id: str
    pipeline: str
    pipeline_version: int
    step: str
    queue: str
    priority: int
    errors: int  # attempts that failed or timed out
    crashes: int  # attempts whose child process died
    #: The task's state before the claim. `running`: the claim took the task over. `waiting`: the task snoozed, was
    #: suspended, or had a start time.
    previous_state: str
    waited: float  # seconds for which the task has been due; without meaning for a task that was taken over
    params: dict[str, Any]
    inputs: dict[str, str]  # the job's input objects: name -> key
    output_prefix: str
    trace: dict[str, str] | None  # the ids of the request that submitted the job
    handler: str | None  # the `pipeline.step` whose code runs the task, if the job's template names one
    timeout_seconds: int | None  # the time limit of one attempt, if the job's template sets one
    gated: bool  # the job passed concurrency limits, so its end may admit other jobs
    grace_seconds: int  # how long a cancelled attempt may take to stop
    cancelling: bool  # the job is being cancelled, and the task is a workflow, whose code must see the cancel
    is_last: bool = False  # no other step needs this one


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Who claims, and for how long. `ttl`: the duration of the lease in seconds. `margin`: the worker stops trusting
    its lease this many seconds before PostgreSQL lets it expire. `max_losses`: a running task with this many losses
    (attempts whose worker was lost) is not taken over.
    """

    owner: UUID
    ttl: float
    margin: float
    max_losses: int


def claimed_of(row: Any, terms: LeaseTerms, requested_at: float) -> Claimed:
    """The claim that `row` describes. `requested_at`: the monotonic time just before the statement was sent, so that
    the worker's lease ends no later than PostgreSQL's.
    """
    return Claimed(
        lease=Lease(row["id"], terms.owner, row["epoch"], row["attempt"], requested_at + terms.ttl - terms.margin),
        job_id=row["job_id"],
        tenant_id=row["tenant_id"],
        pipeline=row["pipeline"],
        pipeline_version=row["pipeline_version"],
        step=row["step"],
        queue=row["queue"],
        priority=row["priority"],
        errors=row["errors"],
        crashes=row["crashes"],
        previous_state=row["was"],
        waited=row["waited"],
        params=row["params"],
        inputs=row["inputs"],
        output_prefix=row["output_prefix"],
        trace=row["trace"],
        handler=row["handler"],
        timeout_seconds=row["timeout_seconds"],
        gated=row["gated"],
        grace_seconds=row["grace_seconds"],
        cancelling=row["cancelling"],
        is_last=row["is_last"],
    )
