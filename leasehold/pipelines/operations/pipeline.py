"""Declares the pipeline of bulk operations. Each operation is one job that cancels, retries or deletes other jobs. The
only step of this job acts on one batch of jobs after the other.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from leasehold.domain.kind import Kind, Scopes
from leasehold.domain.pipeline import Pipeline, RunTerms, Step

Action = Literal["cancel", "retry", "delete"]


def bound_of(action: Action) -> Literal["failed", "unfinished"] | None:
    """The state of the jobs on which an operation with this action acts, for `Bound.state` (db/job_lists.py). Returns
    None for any state.
    """
    states: dict[str, Literal["failed", "unfinished"]] = {"retry": "failed", "cancel": "unfinished"}
    return states.get(action)


#: The delays before the step is tried again after an error (an outage of the database, or a bug). Committed batches
#: stay committed.
_RETRY_LADDER = tuple(timedelta(seconds=seconds) for seconds in (1, 5, 30, 60))


class Operation(BaseModel):
    """The parameters of an operation, as its submission fixed them.

    `at`: the time of the submission. The operation acts only on jobs that were created by this time, and a retry only
    on jobs that had also failed by this time. Ages in the filter are measured from this time. `of_tenant`: the tenant
    of the jobs; None: all tenants. `pipelines`: the operation may change only jobs of these pipelines. `runs`: the
    operation may also change runs. `pipelines` and `runs` follow from the scopes of the client's key. `payer_key`: the
    quota key that is charged for retries. `canary`: the operation tries this many jobs first, and stops if they do not
    succeed; 0: it does not try any jobs first. `rate`: the operation acts on at most this many jobs a second.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    action: Action
    filter: str
    at: datetime
    of_tenant: str | None
    pipelines: tuple[str, ...]
    runs: bool
    client_id: str
    payer_key: str | None = None
    canary: int = Field(0, ge=0)
    rate: int | None = Field(None, ge=1)
    reason: str = ""


#: The queue of operations.
QUEUE = "operations"

bulk_operation = Pipeline(
    "bulk_operation",
    module="leasehold.pipelines.operations.steps",
    params=Operation,
    steps=[
        Step(
            "act",
            queue=QUEUE,
            max_attempts=100,
            retry_ladder=_RETRY_LADDER,
            timeout=timedelta(seconds=60),
        )
    ],
    # `offered`: clients order operations through /v1/operations, and not through /v1/runs. `unlimited`: no concurrency
    # limit of a tenant makes an operation wait.
    terms=RunTerms(offered=False, unlimited=True),
)

OPERATION = Kind(
    "operation",
    pipelines=(bulk_operation,),
    scopes=Scopes(read="jobs:read", write="jobs:operate"),
    redacted=frozenset({"payer_key"}),
)
