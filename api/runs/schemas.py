"""The runs door's requests and answers, as its clients see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, JsonValue

from leasehold.db.run_reads import Row
from leasehold.domain.cron import FIRST, LAST
from leasehold.domain.json_values import MOST_SMALLINT, Flag, Integer, JsonInstant, JsonNumber
from leasehold.domain.states import JobState
from leasehold.domain.template import MOST_SECONDS

Priority = Literal["high", "normal", "low"]
Scope = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]
ScopeId = Annotated[str, Field(max_length=200)]
#: An instant that a client names: none that leaves the calendar in some zone, or the range of a column.
Instant = Annotated[AwareDatetime, Field(ge=FIRST, le=LAST), JsonInstant]


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Dedupe(_Asked):
    """At most one unfinished run of a template has the `key`. Who asks for another meanwhile is answered with that run,
    whatever else the request says; no run is made.
    """

    key: str = Field(min_length=1, max_length=200)


StartWithin = Annotated[
    Annotated[int, Field(ge=1, le=MOST_SECONDS), JsonNumber] | None,
    Field(description="How long it may wait at its scope and its limits; left out: as the template says."),
]


class RunRequest(_Asked):
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"template": "demo-long-task", "scope": "user", "scope_id": "user_123", "payload": {"n": 3}}]
        },
    )

    template: str = Field(max_length=63)
    version: Annotated[int, Field(ge=1, le=MOST_SMALLINT), JsonNumber] | None = Field(
        None, description="Left out: the newest enabled one."
    )
    scope: Scope = "tenant"
    scope_id: ScopeId = ""
    payload: dict[str, JsonValue] = Field(default_factory=dict)
    priority: Priority = "normal"
    scheduled_at: Instant | None = Field(None, description="Not earlier than this.")
    start_within_seconds: StartWithin = None
    dedupe: Dedupe | None = None


class BatchItem(_Asked):
    payload: dict[str, JsonValue] = Field(default_factory=dict)
    scope_id: ScopeId = ""
    dedupe: Dedupe | None = None


#: Runs of one request.
MOST_TOGETHER = 1000


class BatchRequest(_Asked):
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"template": "demo-long-task", "runs": [{"payload": {"n": 1}}, {"payload": {"n": 2}}]}]
        },
    )

    template: str = Field(max_length=63)
    version: Annotated[int, Field(ge=1, le=MOST_SMALLINT), JsonNumber] | None = Field(
        None, description="Left out: the newest enabled one."
    )
    scope: Scope = "tenant"
    priority: Priority = "normal"
    scheduled_at: Instant | None = Field(None, description="Not earlier than this.")
    start_within_seconds: StartWithin = None
    runs: list[BatchItem] = Field(min_length=1, max_length=MOST_TOGETHER)


class BatchAccepted(BaseModel):
    """`ids`: of the runs, in their order. `existing`: those of them that were there already, by their `dedupe` keys."""

    ids: list[UUID]
    existing: list[UUID]
    template: str
    version: int


class Reason(_Asked):
    reason: str = Field("", max_length=500)


class ReplayRequest(_Asked):
    """`payload`: in place of the run's own, checked by the same template. `from_step`: do this step again, too, and
    all that needs it; left out: what succeeded stays.
    """

    payload: dict[str, JsonValue] | None = None
    from_step: str | None = Field(None, max_length=100)


class BulkReplayRequest(_Asked):
    """By what the letters have in common. `canary`: only the latest, to see whether it helps."""

    fingerprint: str | None = Field(None, max_length=64)
    template: str | None = Field(None, max_length=63)
    code: str | None = Field(None, max_length=200)
    canary: Flag = False
    limit: Integer = Field(100, ge=1, le=1000)


class RunAccepted(BaseModel):
    id: UUID
    status: JobState
    template: str
    version: int


class RunList(BaseModel):
    runs: list[dict[str, Any]]
    next_cursor: str | None


def run_summary(row: Row) -> dict[str, Any]:
    """A run as lists show it."""
    cancel = row["cancel"] and {name: value for name, value in row["cancel"].items() if name != "at"}
    said = {
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
    return {name: value for name, value in said.items() if value is not None}


def run_answer(row: Row) -> dict[str, Any]:
    """A run as GET shows it, with its steps' progress."""
    steps = row["steps"] or []
    results = {step["id"]: step["result"] for step in steps if step["result"] is not None}
    return run_summary(row) | {
        "payload": row["payload"],
        "held": row["held"],
        "phase": _phase(steps),
        "progress": {
            "percentage": _percentage(steps),
            "summary": next((step["summary"] for step in reversed(steps) if step["summary"]), ""),
            "steps": [_step(step) for step in steps],
        },
        "result": results or None,
        "outputs": row["outputs"] or [],
    }


def _step(step: Mapping[str, Any]) -> dict[str, Any]:
    shown = ("id", "status", "attempt", "max_attempts", "queue", "started_at", "finished_at", "percent", "summary",
             "error", "result", "task_id")  # fmt: skip
    status = {"blocked": "pending", "retry": "pending", "waiting": "pending"}.get(step["status"], step["status"])
    return {name: step[name] for name in shown if step[name] is not None} | {"status": status, "state": step["status"]}


def _phase(steps: list[Mapping[str, Any]]) -> str | None:
    """The step that the run is at."""
    return next((s["id"] for s in steps if s["status"] not in ("succeeded", "skipped")), None)


def _percentage(steps: list[Mapping[str, Any]]) -> int:
    if not steps:
        return 0
    done = sum(100.0 if s["status"] in ("succeeded", "skipped") else float(s["percent"] or 0) for s in steps)
    return int(done / len(steps))
