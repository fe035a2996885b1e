"""The answers of the API, as the Python clients return them. Fields that a newer API adds are kept, too."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict

Status = Literal[
    "pending", "queued", "running", "waiting_worker", "cancel_requested", "succeeded", "failed", "cancelled", "expired"
]
#: The statuses of a job that has ended.
ENDED = frozenset({"succeeded", "failed", "cancelled", "expired"})


class Answer(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class Problem(Answer):
    """Why a job or one of its attempts failed."""

    code: str
    message: str
    step: str | None = None
    retryable: bool | None = None


class Output(Answer):
    """A file that a step made. `key`: its name in the store. `url`: a signed URL to read it."""

    step: str
    name: str
    key: str
    size: int
    sha256: str
    content_type: str
    url: str | None = None


class Accepted(Answer):
    """A run that was started, or the unfinished run that has the same dedupe key. `version`: the version of the
    template.
    """

    id: UUID
    status: Status
    template: str
    version: int


class Batch(Answer):
    """The runs of one request. `existing`: unfinished runs of earlier requests that have the same dedupe keys."""

    ids: list[UUID]
    existing: list[UUID]
    template: str
    version: int


class JobAfterAction(Answer):
    """A job after a cancel, after a retry, or after a delete that has to wait for the job's running steps."""

    id: UUID
    status: Status


class RunStep(Answer):
    """One step of a run. `state`: the state of its task. `status`: the same, but `pending` in place of each state in
    which the task waits (`blocked`, `retry`, `waiting`).
    """

    id: str
    status: str
    state: str
    attempt: int
    max_attempts: int
    queue: str
    started_at: datetime | None = None
    finished_at: datetime | None = None
    percent: float | None = None
    summary: str | None = None
    result: Any = None
    error: Problem | None = None


class Progress(Answer):
    """How far a run is. `steps`: at most 1,000. `step_count`: the number of all steps. `next_cursor`: pass it to
    `get_run` as `cursor` to get the next steps; None: there are no more steps. An API of an earlier release puts all
    steps into `steps`.
    """

    percentage: int
    summary: str
    steps: list[RunStep]
    step_count: int | None = None
    next_cursor: str | None = None


class Run(Answer):
    """A run. An item of a list has no `payload`, `progress`, `result` or `outputs`. `result`: {step: result}, of the
    steps in `progress`. `cancel`: the `reason` of a requested cancel, and who requested it (`by`). `scope` and
    `scope_id`: the group of runs that the template's concurrency policy counts together.
    """

    id: UUID
    template: str
    version: int
    scope: str
    scope_id: str
    status: Status
    priority: str
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    error: Problem | None = None
    cancel: dict[str, Any] | None = None
    payload: dict[str, Any] | None = None
    progress: Progress | None = None
    result: dict[str, Any] | None = None
    outputs: list[Output] = []

    @property
    def ended(self) -> bool:
        return self.status in ENDED


class Job(Answer):
    """A job of any kind. An item of a list has no `parameters`, `steps`, `outputs` or `result`."""

    id: UUID
    kind: str
    template: str
    status: Status
    tenant_id: str
    priority: str
    tags: Mapping[str, str] = {}
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    error: Problem | None = None
    parameters: dict[str, Any] | None = None
    steps: list[dict[str, Any]] | None = None
    outputs: list[Output] | None = None
    result: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        return self.status in ENDED


class Operation(Answer):
    """A bulk operation. `acted`: how many jobs it has acted on so far. `refused`: how many jobs it could not act on."""

    id: UUID
    action: str
    filter: str
    status: Status
    acted: int
    refused: int
    refused_by_code: dict[str, int]
    percent: float
    error: Problem | None = None

    @property
    def ended(self) -> bool:
        return self.status in ENDED


class Count(Answer):
    """The number of matching jobs. `exact`: whether `n` is exact; otherwise it is an estimate."""

    n: int
    exact: bool


class Preview(Answer):
    """The jobs that a bulk operation would act on."""

    total: Count
    examples: list[Job]


class Refusal(Answer):
    """A job that an operation could not act on."""

    job_id: UUID
    code: str


class Event(Answer):
    """One change of a job. `seq`: its number, from 1."""

    seq: int
    at: datetime
    kind: str
    status: str
    step: str | None = None
    step_status: str | None = None


class LogLine(Answer):
    """A line of a job's log. `n`: its number in the job, from 1. `cut`: the attempt has logged too much; this line
    stands in place of the attempt's later lines.
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


class EventPage(Answer):
    """`next_after`: the number after which the next page begins; None: there are no further events yet."""

    events: list[Event]
    next_after: int | None


class LogPage(Answer):
    """`next_after`: the number after which the next page begins; None: there are no further lines yet."""

    lines: list[LogLine]
    next_after: int | None


class Chunk(Answer):
    """An item of a job's stream. `n`: its number in the job; some numbers may be missing. `event` has one of three
    values. `chunk`: the step has emitted the value in the field `chunk`. This field is set only for this event.
    `restart`: the step runs again, and its chunks of earlier attempts are void; `n` is None. `cut`: the attempt has
    emitted too much, and this item stands in place of all later chunks of the attempt.
    """

    event: Literal["chunk", "restart", "cut"]
    step: str
    attempt: int
    epoch: int
    n: int | None = None
    chunk: Any = None


class DeadLetter(Answer):
    """A step that failed for good. `fingerprint`: the same for all dead letters of a group."""

    task_id: UUID
    job_id: UUID
    kind: str
    template: str
    step: str
    code: str
    message: str
    fingerprint: str
    at: datetime


class DeadLetterGroup(Answer):
    """Dead letters whose messages differ only in numbers and ids. `n`: how many. `message`: of the latest of them."""

    fingerprint: str
    kind: str
    template: str
    step: str
    code: str
    message: str
    n: int
    first_at: datetime
    last_at: datetime


class Explanation(Answer):
    """`reasons`: why the job does not run now. `ledger`: what the workers did with the job."""

    reasons: list[dict[str, Any]]
    ledger: list[dict[str, Any]]


class Ticket(Answer):
    """Where to upload the bytes of a picture: `upload_url`, for `expires_in` seconds. `original_key`: the key that the
    uploaded object gets in the store.
    """

    media_id: UUID
    upload_url: str
    original_key: str
    expires_in: int


class PictureAccepted(Answer):
    media_id: UUID
    job_id: UUID
    status: str


class Picture(Answer):
    media_id: UUID
    status: str
    job_id: UUID | None = None
    final_url: str | None = None
    variants: dict[str, dict[str, Any]] | None = None
    error: Problem | None = None


class Conversion(Answer):
    """The conversion of an ONNX model: its job, as `POST /api/v1/jobs` answers it."""

    job_id: UUID
    status: str


class Ordered(Answer):
    """A generation (a job in which a provider makes images or videos) that was ordered. `task_id`: the API's name for
    the id of the order. The client may choose this id; otherwise it is the job's id.
    """

    task_id: str
    job_id: UUID | None = None


class Generation(Answer):
    """The state of a generation. `task_id`: the id of the order. `urls`: the files of the generation, once
    `status_text` is `completed`.
    """

    task_id: str
    job_id: UUID | None = None
    status_text: str
    urls: list[str] = []
    error: Problem | None = None

    @property
    def ended(self) -> bool:
        # `unknown`: there is no such generation, or its result has expired or was consumed. So the client need not wait
        # any longer.
        return self.status_text in ("completed", "failed", "unknown")


class Queue(Answer):
    queue: str


class WorkerInfo(Answer):
    id: UUID
    host: str
    queues: list[str]
