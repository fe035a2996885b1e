"""The JSON of /v1/runs: the models of the requests, and the answers built from rows."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, JsonValue

from leasehold.api.http.callback_urls import CallbackUrl
from leasehold.api.http.cursors import cursor_of
from leasehold.api.http.tags import Tags
from leasehold.db.job_reads import MAX_STEPS, Row
from leasehold.domain.cron import FIRST, LAST
from leasehold.domain.json_values import MAX_SMALLINT, JsonInstant, JsonNumber
from leasehold.domain.pipeline import MAX_DELAY
from leasehold.domain.states import JobState
from leasehold.domain.template import MAX_SECONDS

Priority = Literal["high", "normal", "low"]
#: The group of runs that a concurrency policy counts together: its name, and an id in it (`user`, `user_123`).
Scope = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]
ScopeId = Annotated[str, Field(max_length=200)]


def _utc(instant: datetime) -> datetime:
    return instant.astimezone(UTC)


#: An instant that a client names. Between these bounds it fits a `timestamptz` column, and Python can convert it to
#: every time zone. `_utc` converts it to UTC, because RFC 3339 allows offsets up to 23:59, but PostgreSQL reads only
#: offsets up to 15:59.
Instant = Annotated[AwareDatetime, Field(ge=FIRST, le=LAST), AfterValidator(_utc), JsonInstant]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Dedupe(_Request):
    """At most one unfinished run of a template has the `key`. While it is unfinished, a request with the same key
    starts no run: the answer names the unfinished run, whatever else the request contains.
    """

    key: str = Field(min_length=1, max_length=200)


StartWithin = Annotated[
    Annotated[int, Field(ge=1, le=MAX_SECONDS), JsonNumber] | None,
    Field(
        description="Seconds that the run may wait to start: for other runs of its scope, or at a concurrency limit. "
        "If left out, the template's value."
    ),
]


class RunRequest(_Request):
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"template": "demo-long-task", "scope": "user", "scope_id": "user_123", "payload": {"n": 3}}]
        },
    )

    template: str = Field(max_length=63)
    # `JsonNumber` refuses JSON strings and booleans, which Pydantic would convert.
    version: Annotated[int, Field(ge=1, le=MAX_SMALLINT), JsonNumber] | None = Field(
        None, description="If left out, the newest enabled version."
    )
    scope: Scope = "tenant"
    scope_id: ScopeId = ""
    payload: dict[str, JsonValue] = Field(default_factory=dict)
    priority: Priority = "normal"
    scheduled_at: Instant | None = Field(None, description="The run starts at this time or later.")
    delay_seconds: Annotated[float, Field(gt=0, le=MAX_DELAY.total_seconds()), JsonNumber] | None = Field(
        None,
        description="In place of `scheduled_at`: the run starts this long after the request, or later. Repeat a "
        "request with the same number: the repetition gets the first answer, and the start time stays as it was.",
    )
    start_within_seconds: StartWithin = None
    dedupe: Dedupe | None = None
    tags: Tags = {}
    callback_url: CallbackUrl = None


class BatchItem(_Request):
    payload: dict[str, JsonValue] = Field(default_factory=dict)
    scope_id: ScopeId = ""
    dedupe: Dedupe | None = None
    tags: Tags = {}


#: The largest number of runs in one batch.
MAX_BATCH_RUNS = 1000


class BatchRequest(_Request):
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"template": "demo-long-task", "runs": [{"payload": {"n": 1}}, {"payload": {"n": 2}}]}]
        },
    )

    template: str = Field(max_length=63)
    version: Annotated[int, Field(ge=1, le=MAX_SMALLINT), JsonNumber] | None = Field(
        None, description="If left out, the newest enabled version."
    )
    scope: Scope = "tenant"
    priority: Priority = "normal"
    scheduled_at: Instant | None = Field(None, description="The run starts at this time or later.")
    start_within_seconds: StartWithin = None
    callback_url: CallbackUrl = None
    runs: list[BatchItem] = Field(min_length=1, max_length=MAX_BATCH_RUNS)


class BatchAccepted(BaseModel):
    """`ids`: the runs, in the order of the request. `existing`: the ids among them of runs that an earlier request
    started with the same `dedupe` key.
    """

    ids: list[UUID]
    existing: list[UUID]
    template: str
    version: int


class RunAccepted(BaseModel):
    id: UUID
    status: JobState
    template: str
    version: int


class RunList(BaseModel):
    runs: list[dict[str, Any]]
    next_cursor: str | None


def run_summary(row: Row) -> dict[str, Any]:
    """The run as an item of a list."""
    # Leave out `at`, because the member `cancel_requested_at` already has the time of the cancel.
    cancel = row["cancel"] and {name: value for name, value in row["cancel"].items() if name != "at"}
    summary = {
        "id": row["id"],
        "template": row["template"],
        "version": row["version"],
        "scope": row["scope"],
        "scope_id": row["scope_id"],
        "status": row["status"],
        "priority": ("high", "normal", "low")[row["priority"]],
        "error": row["error"],
        "cancel": cancel,
        "cancel_requested_at": row["cancel_requested_at"],
        "created_at": row["created_at"],
        "updated_at": row["updated_at"],
        "started_at": row["started_at"],
        "finished_at": row["finished_at"],
        "deadline_at": row["deadline_at"],
        "scheduled_at": row["scheduled_at"],
        "schedule_id": row["schedule_id"],
        "tick": row["tick"],
        "rerun_of": row["rerun_of"],
        "dedupe": row["dedupe_key"] and {"key": row["dedupe_key"]},
    }
    return {name: value for name, value in summary.items() if value is not None}


def run_answer(row: Row) -> dict[str, Any]:
    """The run as the answer of GET, with a page of its steps. `row["all_steps"]` has the number, the progress and the
    phase of all steps of the run. If the page has all steps, `all_steps` is None, and this function computes these
    values from the page. But `summary` and `result` cover only the steps of the page.
    """
    steps = row["steps"] or []
    results = {step["id"]: step["result"] for step in steps if step["result"] is not None}
    # The number (`n`), the progress (`percent`) and the phase of all steps of the run.
    every = row["all_steps"] or {"n": len(steps), "percent": _percentage(steps), "phase": _phase(steps)}
    return run_summary(row) | {
        "payload": row["payload"],
        "held": row["held"],
        "phase": every["phase"],
        "progress": {
            "percentage": int(every["percent"] or 0),
            "summary": next((step["summary"] for step in reversed(steps) if step["summary"]), ""),
            "steps": [_step_answer(step) for step in steps],
            "step_count": every["n"],
            # A full page may be the last page. Then the next page is empty.
            "next_cursor": cursor_of(row["last_step"]) if MAX_STEPS <= len(steps) < every["n"] else None,
        },
        "result": results or None,
        "outputs": row["outputs"] or [],
    }


def _step_answer(step: Mapping[str, Any]) -> dict[str, Any]:
    """A step of the run. `state` is the task's own state. `status` has one word, `pending`, for all states in which the
    task waits.
    """
    names = ("id", "status", "attempt", "max_attempts", "queue", "started_at", "finished_at", "percent", "summary",
             "error", "result", "task_id")  # fmt: skip
    status = {"blocked": "pending", "retry": "pending", "waiting": "pending"}.get(step["status"], step["status"])
    return {name: step[name] for name in names if step[name] is not None} | {"status": status, "state": step["status"]}


def _phase(steps: list[Mapping[str, Any]]) -> str | None:
    """The id of the first step that has not succeeded and was not skipped, or None if there is no such step."""
    return next((step["id"] for step in steps if step["status"] not in ("succeeded", "skipped")), None)


def _percentage(steps: list[Mapping[str, Any]]) -> float:
    if not steps:
        return 0
    total = sum(100.0 if step["status"] in ("succeeded", "skipped") else float(step["percent"] or 0) for step in steps)
    return total / len(steps)
