"""The JSON of /v1/jobs and /v1/dead-letters: the models of the requests and answers."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from leasehold.domain.job_filter import MAX_CHARACTERS
from leasehold.domain.json_values import Flag, Integer, JsonNumber
from leasehold.domain.states import JobState, TaskState
from leasehold.domain.step_names import MAX_STEP_NAME

KindName = Annotated[str, Field(max_length=63, description="media, conversion, generation, run, webhook or operation.")]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Reason(_Request):
    reason: str = Field("", max_length=500)


class RetryRequest(_Request):
    """`payload`: replaces the payload of a run. The run's template checks it. `from_step`: this step and every step
    that needs it run again, even if they succeeded. Without `from_step`, steps that succeeded do not run again.
    """

    payload: dict[str, JsonValue] | None = None
    from_step: str | None = Field(None, max_length=MAX_STEP_NAME)


class BulkReplayRequest(_Request):
    """Replays the dead letters that match every given filter. `canary`: replay only the latest of them, as a trial."""

    fingerprint: str | None = Field(None, max_length=64)
    kind: KindName | None = None
    template: str | None = Field(None, max_length=63)
    code: str | None = Field(None, max_length=200)
    canary: Flag = False
    limit: Integer = Field(100, ge=1, le=1000)


class SettleRequest(_Request):
    """The action `adopt` needs `ref`, the order's id at the provider. The other actions take no `ref`."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "oneOf": [
                {"required": ["ref"], "properties": {"action": {"const": "adopt"}, "ref": {"type": "string"}}},
                {"properties": {"action": {"enum": ["again", "give_up"]}, "ref": {"type": "null"}}},
            ]
        },
    )

    action: Literal["adopt", "again", "give_up"]
    ref: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,199}$")
    reason: str = Field("", max_length=500)

    @model_validator(mode="after")
    def _ref_belongs_to_adopt(self) -> Self:
        if (self.action == "adopt") != (self.ref is not None):
            raise ValueError("adopt needs ref, and no other action has one")
        return self


class SettleItem(SettleRequest):
    job_id: UUID


class BulkSettleRequest(_Request):
    settlements: list[SettleItem] = Field(min_length=1, max_length=200)


class Unsettled(BaseModel):
    """A case that waits for a person. `losses`: how many attempts of the step were lost with their worker. `system`:
    the provider that got the order. `sent`: the content of the order.
    """

    tenant_id: str
    kind: str
    since: datetime
    because: str
    job_id: UUID | None = None
    task_id: UUID | None = None
    webhook_id: UUID | None = None
    schedule_id: UUID | None = None
    template: str | None = None
    signals: list[str] | None = None
    until: datetime | None = Field(None, description="When the wait for the signals ends by itself.")
    step: str | None = None
    queue: str | None = None
    losses: int | None = None
    system: str | None = None
    sent_at: datetime | None = None
    sent: dict[str, Any] | None = None


class UnsettledPage(BaseModel):
    items: list[Unsettled]
    next_cursor: str | None


class JobError(BaseModel):
    code: str
    message: str
    step: str | None = None
    retryable: bool | None = None


class RunPart(BaseModel):
    """The members that only a run has."""

    version: int
    scope: str
    scope_id: str
    scheduled_at: datetime | None = None
    dedupe_key: str | None = None


class SchedulePart(BaseModel):
    id: UUID
    tick: datetime | None = Field(None, description="The time at which the schedule fired; none: by hand.")


class Parent(BaseModel):
    """The job that this job repeats (`rerun_of`), or for which it works (`made_for`)."""

    id: UUID
    relation: Literal["rerun_of", "made_for"]


class JobSummary(BaseModel):
    """A job as an item of a list."""

    id: UUID
    kind: str
    template: str = Field(description="The template of a run, else the pipeline.")
    status: JobState
    tenant_id: str
    priority: Literal["high", "normal", "low"]
    tags: dict[str, str]
    held: bool = Field(description="Whether the job waits at its concurrency limits.")
    deleting: bool = Field(description="Whether the job is deleted when it has ended.")
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    deadline_at: datetime | None = None
    expires_at: datetime | None = Field(None, description="When the job and its objects are deleted.")
    error: JobError | None = None
    cancel: dict[str, Any] | None = Field(None, description="`by` and `reason` of a requested cancel.")
    cancel_requested_at: datetime | None = None
    run: RunPart | None = None
    schedule: SchedulePart | None = None


class AttemptError(BaseModel):
    epoch: int
    cause: Literal["error", "timeout", "crash", "loss"]
    code: str
    message: str
    retryable: bool
    at: datetime


class StepAnswer(BaseModel):
    """`attempts`: the failed attempts, at most the last 20."""

    id: str
    state: TaskState
    task_id: UUID
    queue: str
    attempt: int
    max_attempts: int
    started_at: datetime | None = None
    finished_at: datetime | None = None
    available_at: datetime | None = None
    worker: UUID | None = Field(None, description="The worker that holds the step's lease.")
    percent: float | None = None
    summary: str | None = None
    result: Any = None
    attempts: list[AttemptError]


class OutputAnswer(BaseModel):
    step: str
    name: str
    key: str
    size: int
    sha256: str
    content_type: str
    url: str | None = Field(None, description="Reads the object for a while. Only the first 100 outputs have it.")


class Waiting(BaseModel):
    """Something that an unfinished job waits for: a concurrency limit, or a step that runs later or needs a worker."""

    limit: str | None = None
    step: str | None = None
    state: TaskState | None = None
    queue: str | None = None
    until: datetime | None = None


class CallbackDelivery(BaseModel):
    """The job that reports the latest end of this job to its `callback_url`. For its `id`, `GET /v1/jobs/{id}` shows
    the tries, and `POST /v1/jobs/{id}/retry` sends the message again.
    """

    id: UUID
    status: JobState


class Callback(BaseModel):
    """`host`: the host of the URL, because the rest of the URL may contain a secret. `delivery`: left out until the job
    has ended.
    """

    host: str | None = None
    delivery: CallbackDelivery | None = None


class JobAnswer(JobSummary):
    updated_at: datetime
    parameters: dict[str, Any]
    redacted: list[str] = Field(description="The names of parameters that are not shown.")
    steps: list[StepAnswer] = Field(description="At most 1000.")
    outputs: list[OutputAnswer] = Field(description="At most 1000.")
    result: dict[str, Any] = Field(description="The result of each step that has one.")
    waits_for: list[Waiting]
    parent: Parent | None = None
    callback: Callback | None = Field(None, description="The job was submitted with a `callback_url`.")


class Count(BaseModel):
    n: int
    exact: bool = Field(description="False: an estimate.")


class JobList(BaseModel):
    """`searched_back_to`: a search in payloads or texts, or by queue, has stopped at jobs of this time. `next_cursor`
    continues the search.
    """

    jobs: list[JobSummary]
    next_cursor: str | None
    count: Count | None = None
    searched_back_to: datetime | None = None


class JobAfterAction(BaseModel):
    """The job after a cancel, a retry, or a delete that waits for the job's end."""

    id: UUID
    status: JobState


class EventItem(BaseModel):
    model_config = ConfigDict(extra="allow")

    seq: int
    at: datetime
    kind: str
    status: JobState
    step: str | None = None
    step_status: TaskState | None = None


class LogLine(BaseModel):
    """`n`: the line's number in its job; numbers rise, and some may be missing. `epoch`: the epoch of the attempt's
    claim. `cut`: the attempt has logged too much; this line stands in place of its later lines.
    """

    n: int
    at: datetime
    step: str
    attempt: int
    epoch: int
    level: str
    logger: str
    message: str
    fields: dict[str, Any] = {}
    traceback: str | None = None
    cut: bool = False


class LogPage(BaseModel):
    """`next_after`: send this number as `after` to get the next page. It is null if there are no further lines yet."""

    lines: list[LogLine]
    next_after: int | None


class StreamItem(BaseModel):
    """`n`: the chunk's number in its job; numbers rise, and some may be missing. `restarts`: with this chunk, a later
    attempt of the step begins the step's stream again. `superseded`: the chunk is from an attempt before such a
    restart. `cut`: the attempt has emitted too much; this item stands in place of all its later chunks.
    """

    n: int
    at: datetime
    step: str
    attempt: int
    epoch: int
    superseded: bool
    restarts: bool
    chunk: Any = None
    cut: bool = False


class StreamPage(BaseModel):
    """`next_after`: send this number as `after` to get the next page. It is null if there are no further chunks yet."""

    chunks: list[StreamItem]
    next_after: int | None


class EventPage(BaseModel):
    """`next_after`: send this number as `after` to get the next page. It is null if there are no further events yet."""

    events: list[EventItem]
    next_after: int | None


class NewOperation(_Request):
    """`filter`: as `q` of GET /v1/jobs, with at least one term. `canary`: the operation acts on this many jobs first.
    If one of them is refused, or does not succeed after its retry, the operation stops. `rate`: the largest number of
    jobs a second. Without `rate`, a retry uses LEASEHOLD_OPERATION_RETRY_RATE, and the other actions use
    LEASEHOLD_OPERATION_RATE. No rate exceeds LEASEHOLD_OPERATION_RATE. `reason`: stored with the cancelled jobs.
    """

    action: Literal["cancel", "retry", "delete"]
    filter: str = Field(min_length=1, max_length=MAX_CHARACTERS)
    canary: Integer = Field(0, ge=0, le=100)
    rate: Annotated[int, Field(ge=1, le=100_000), JsonNumber] | None = None
    reason: str = Field("", max_length=500)
    dry_run: Flag = False


class OperationCanary(BaseModel):
    jobs: int
    passed: bool | None = Field(None, description="None: not known yet.")


class OperationAnswer(BaseModel):
    """A bulk operation. `total`: the jobs that matched when it began. `refused_by_code`: the number of refused jobs, by
    the code of the refusal.
    """

    id: UUID
    action: Literal["cancel", "retry", "delete"]
    filter: str
    status: JobState
    tenant_id: str
    by: str
    reason: str
    rate: int | None = None
    canary: OperationCanary | None = None
    total: Count | None = None
    acted: int
    refused: int
    refused_by_code: dict[str, int]
    percent: float
    error: JobError | None = None
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None


class OperationPreview(BaseModel):
    """The jobs on which an operation would act. `total`: their number. `rate`: the most jobs a second. `examples`: of
    the jobs whose kind the key may read, the newest ten at most.
    """

    dry_run: Literal[True]
    action: Literal["cancel", "retry", "delete"]
    filter: str
    total: Count
    rate: int
    examples: list[JobSummary]


class OperationList(BaseModel):
    operations: list[OperationAnswer]
    next_cursor: str | None


class RefusalItem(BaseModel):
    job_id: UUID
    code: str
    detail: str
    at: datetime


class RefusalList(BaseModel):
    refusals: list[RefusalItem]
    next_cursor: str | None
