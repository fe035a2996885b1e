"""Builds the JSON record of a conversion from its row. The conversion endpoints answer with it."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import orjson

from leasehold.domain.states import JOB_TERMINAL, JobState
from leasehold.pipelines.conversion.rows import Row

#: A public state of a conversion -> the states of its job that have this public state.
STATES: dict[str, tuple[str, ...]] = {
    "created": ("pending", "queued"),
    "running": ("running", "waiting_worker", "cancel_requested"),
    "completed": ("succeeded",),
    "failed": ("failed", "cancelled", "expired"),
}
#: A state of a job -> the public state of its conversion.
PUBLIC_STATE = {state: public_state for public_state, states in STATES.items() for state in states}
#: An artifact that a client may request -> the name of its output.
ARTIFACTS = {
    "onnx": "output/out.onnx",
    "bie": "output/out.bie",
    "nef": "output/out.nef",
    "report": "output/report.json",
}
#: The artifacts that are models, in the order of the stages that make them.
_MODELS = ("onnx", "bie", "nef")
#: The parameters that every row has, and that the record shows.
_PARAMETERS = (
    "model_id", "version", "platform", "enable_evaluate", "enable_sim_fp", "enable_sim_fixed", "enable_sim_hw",
    "toolchain",
)  # fmt: skip
#: Newer parameters -> their defaults. A row has such a parameter only if its value is not the default.
_NEW_PARAMETERS = {"accuracy_guard": False}
#: The `stage_status` of an ended conversion. Before the end, `stage_status` is the name of the current stage in capital
#: letters, such as `ONNX`.
_STAGE_STATUS_AT_END = {"completed": "COMPLETED", "failed": "FAILED"}
#: The error of a cancelled conversion. The record says `failed`, but the row of a cancelled job has no error.
_CANCELLED = {"code": "cancelled", "message": "The conversion was cancelled.", "retryable": True}


def record(row: Row) -> dict[str, Any]:
    """The record of one conversion."""
    steps: list[dict[str, Any]] = row["steps"] or []
    keys = {output["name"]: output["key"] for output in row["outputs"] or []}
    models = {name: keys.get(ARTIFACTS[name]) for name in _MODELS}
    status = PUBLIC_STATE[row["status"]]
    current_step = next((step for step in steps if step["status"] != "succeeded"), None)
    percent_of_current = (current_step or {}).get("percent") or 0
    finished_steps = sum(step["status"] == "succeeded" for step in steps)
    # A finished step counts 100 %, and the current step counts its own percentage.
    progress = (100 * finished_steps + percent_of_current) / max(len(steps), 1)
    stage = None if current_step is None else current_step["step"]
    return {
        "job_id": str(row["job_id"]),
        "created_at": row["created_at"],
        "updated_at": row["updated_at"],
        "status": status,
        "stage": stage,
        "stage_status": _STAGE_STATUS_AT_END.get(status, (stage or _MODELS[0]).upper()),
        "progress": 100 if status == "completed" else int(progress),
        "stage_progress": 100 if status == "completed" else int(percent_of_current),
        "parameters": _parameters(row["params"]),
        "result_object_keys": models,
        "output": {f"{name}_path": key for name, key in models.items()},
        "error": _CANCELLED if row["status"] == JobState.CANCELLED else row["error"],
        "origin": "api",
        "user_id": row["user_id"],
        "tenant_id": row["owner_tenant"],  # as the client named it
        "created_by_client_id": row["client_id"],
        "source_filename": row["source_filename"],
        "input": row["input"],
        "stage_timings": {step["step"]: _timing(step) for step in steps},
        "expires_at": row["expires_at"],
        "metadata": {step["step"]: step["value"] for step in steps if step["value"] is not None},
        "promoted": row["promoted"] is not None,
        "promoted_object_keys": row["promoted"] or [],
    }


def encoded(content: dict[str, Any]) -> bytes:
    """The content as JSON. asyncpg's own UUID type is written as text, because orjson does not know it."""
    return orjson.dumps(content, option=orjson.OPT_UTC_Z, default=str)


def is_finished(row: Row) -> bool:
    return row["status"] in JOB_TERMINAL


def file_name_of(artifact: str) -> str:
    return ARTIFACTS[artifact].rpartition("/")[2]


def _parameters(params: dict[str, Any]) -> dict[str, Any]:
    later = {name: params.get(name, default) for name, default in _NEW_PARAMETERS.items()}
    return {name: params[name] for name in _PARAMETERS} | later


def _timing(step: dict[str, Any]) -> dict[str, Any] | None:
    if step["started_at"] is None:
        return None
    return {"started_at": step["started_at"], "completed_at": step["finished_at"]}


def disposition(source: str, suffix: str) -> str:
    """The header Content-Disposition (RFC 6266): a quoted ASCII name for old clients, and the true name. `source`: the
    file name of the model that the client sent.
    """
    stem = source.rpartition(".")[0] or source
    ascii_stem = "".join(c if c.isascii() and (c.isalnum() or c in " ._-()") else "_" for c in stem)[:100]
    return f"attachment; filename=\"{ascii_stem}.{suffix}\"; filename*=UTF-8''{quote(f'{stem}.{suffix}', safe='')}"
