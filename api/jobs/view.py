"""Builds the JSON of a job of any kind from its row, for the endpoints of jobs and the console. A run is a job that
executes a template. Its row also has the columns of the table `run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from leasehold.api.jobs.access import JobAccess
from leasehold.api.process.services import Services
from leasehold.db.job_reads import Row
from leasehold.domain.errors import StoreAbsent
from leasehold.domain.states import JOB_TERMINAL, TaskState
from leasehold.kinds.job_kinds import JobKind
from leasehold.security.egress import shown_host
from leasehold.transitions.jobs import client_queue

#: At most this many outputs of an answer have a link, because signing the links takes time for each answer.
MAX_LINKS = 100
#: The states of a step that waits to run.
_WAITING = (TaskState.PENDING, TaskState.RETRY, TaskState.WAITING)


def summary(row: Row, kind: JobKind) -> dict[str, Any]:
    """The job as an item of a list. Members without a value are left out."""
    item = {
        "id": row["id"],
        "kind": kind.name,
        "template": row["template"] or row["pipeline"],
        "status": row["status"],
        "tenant_id": row["tenant_id"],
        "priority": ("high", "normal", "low")[row["priority"]],
        "tags": row["tags"] or {},
        "held": row["held"],  # whether the job waits at its concurrency limits
        "deleting": row["keep_seconds"] == 0,  # a delete was requested, so retention deletes the job after its end
        "created_at": row["created_at"],
        "started_at": row["started_at"],
        "finished_at": row["finished_at"],
        "deadline_at": row["deadline_at"],
        "expires_at": row["expires_at"],
        "error": row["error"],
        "cancel": row["cancel"] and {name: value for name, value in row["cancel"].items() if name != "at"},
        "cancel_requested_at": row["cancel_requested_at"],
        "run": _run_part(row) if row["is_run"] else None,
        # `tick`: the instant at which the schedule made this run due
        "schedule": row["schedule_id"] and _without_none(id=row["schedule_id"], tick=row["tick"]),
    }
    return _without_none(**item)


def _run_part(row: Row) -> dict[str, Any]:
    """The members that only a run has. `scope`, `scope_id`: the group of runs that a concurrency policy counts
    together.
    """
    return _without_none(
        version=row["version"],
        scope=row["scope"],
        scope_id=row["scope_id"],
        scheduled_at=row["scheduled_at"],
        dedupe_key=row["dedupe_key"],
    )


def _without_none(**members: Any) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}


def answer(access: JobAccess) -> dict[str, Any]:
    """The job as the answer of GET, without links to its outputs. `access`: the job's row and its kind.
    `kind.redacted`: the parameters that the answer hides.
    """
    row, kind = access.row, access.kind
    params: Mapping[str, Any] = row["params"]
    steps = row["steps"] or []
    return summary(row, kind) | _without_none(
        updated_at=row["updated_at"],
        parameters={name: value for name, value in params.items() if name not in kind.redacted},
        redacted=sorted(name for name in kind.redacted if params.get(name) is not None),
        steps=[_step_answer(step) for step in steps],
        outputs=row["outputs"] or [],
        result={step["id"]: step["result"] for step in steps if step["result"] is not None},
        waits_for=[] if row["status"] in JOB_TERMINAL else _waits_for(row, steps),
        parent=_parent_of(row, kind),
        callback=_callback_answer(row["callback"]),
    )


def _step_answer(step: Mapping[str, Any]) -> dict[str, Any]:
    return _without_none(**step) | {"queue": client_queue(step["queue"]), "attempts": step["attempts"] or []}


def _waits_for(row: Row, steps: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    # A held job waits at concurrency limits. The column `limits` names all these limits except the limit of a run's
    # scope. If the column is empty, only the scope holds the job.
    if row["held"]:
        return [{"limit": key} for key in row["limits"] or ["scope"]]
    now = datetime.now(UTC)
    return [
        _without_none(
            step=step["id"],
            state=step["state"],
            queue=client_queue(step["queue"]),
            until=_if_future(step["available_at"], now),
        )
        for step in steps
        if step["state"] in _WAITING
    ]


def _if_future(text: str | None, now: datetime) -> str | None:
    """The instant if it is in the future. `text`: ISO 8601; None: a workflow waits, without a time limit, for a
    signal or a step.
    """
    return text if text is not None and datetime.fromisoformat(text) > now else None


def _callback_answer(callback: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The callback, with only the host of its URL, because the rest of the URL may contain a secret."""
    if callback is None:
        return None
    delivery = {"id": callback["id"], "status": callback["status"]} if callback["id"] is not None else None
    return _without_none(host=shown_host(callback["url"]), delivery=delivery)


def _parent_of(row: Row, kind: JobKind) -> dict[str, Any] | None:
    """The job that this job repeats (`rerun_of`), or else the job for which this job was made (`made_for`).
    `kind.parents`: pipeline -> a JSON Pointer into this job's parameters. It points to the id of the `made_for` job.
    """
    if row["rerun_of"] is not None:
        return {"id": row["rerun_of"], "relation": "rerun_of"}
    pointer = kind.parents.get(row["pipeline"])
    if pointer is None:
        return None
    value: Any = row["params"]
    for part in pointer.split("/")[1:]:
        value = value.get(part) if isinstance(value, dict) else None
    try:
        return {"id": UUID(str(value)), "relation": "made_for"}
    except ValueError:
        return None


def with_links(services: Services, access: JobAccess, body: dict[str, Any]) -> dict[str, Any]:
    """The answer with a signed URL for each of the first MAX_LINKS outputs. A browser downloads the object at such a
    URL, and never shows it as a page.
    """
    if not access.kind.signed_links:
        return body
    outputs = []
    for number, output in enumerate(body["outputs"]):
        url = _url_of(services, output) if number < MAX_LINKS else None
        outputs.append(output | _without_none(url=url))
    return body | {"outputs": outputs}


def _url_of(services: Services, output: Mapping[str, Any]) -> str | None:
    seconds, name = services.settings.download_url_seconds, output["name"].rpartition("/")[2]
    try:
        return services.store.sign_get(output["key"], seconds=seconds, download_name=name)
    except StoreAbsent:
        return None
