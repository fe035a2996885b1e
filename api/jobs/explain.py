"""Builds the answer of GET /v1/jobs/{job_id}/explain: a sentence for each reason why a job is not running, and a ledger
of what its workers did. The endpoints of runs and the console use this module, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from difflib import get_close_matches
from typing import Any

from leasehold.api.process.services import Services
from leasehold.db import handler_reads, job_reads
from leasehold.db.database import Connection
from leasehold.db.handler_reads import Place, Served
from leasehold.db.job_reads import MAX_COUNTED, Row
from leasehold.domain.missing_code import split_handlers
from leasehold.domain.sentences import counted, to_the_second
from leasehold.domain.states import JOB_TERMINAL
from leasehold.transitions import workers
from leasehold.transitions.concurrency import without_value
from leasehold.transitions.jobs import EXTERNAL, client_queue


@dataclass(frozen=True, slots=True)
class Depth:
    """How many rows an explanation reads at most: `entries` of the ledger, waiting `steps`, and the tasks or jobs
    `ahead` of the job.
    """

    entries: int = job_reads.MAX_LEDGER
    steps: int = job_reads.MAX_STEPS
    ahead: int = MAX_COUNTED


_FULL_DEPTH = Depth()
#: If no worker has a handler, the explanation names at most this many handlers with similar names.
_MAX_NEAREST = 3


@dataclass(frozen=True, slots=True)
class Serving:
    """Which workers serve the waiting steps. A place is a queue and a handler (the function that does a step).

    `places`: for each place, how many workers serve the queue, and how many of these have the handler. `nearest` has at
    most one place: a place whose handler no worker of its queue has. Its value is a list of handlers that workers of
    the queue have, and whose names are the most similar to the name of the missing handler.
    """

    places: Mapping[Place, Served] = field(default_factory=dict)
    nearest: Mapping[Place, Sequence[str]] = field(default_factory=dict)


#: Used if the caller has not read which workers serve the steps.
_UNKNOWN_SERVING = Serving()


async def explain(services: Services, tenant_id: str, job: Row, depth: Depth = _FULL_DEPTH) -> dict[str, Any]:
    """Build the answer. `job`: a row with `id`, `status`, `held` (it waits at concurrency limits) and `error`."""
    async with services.pool.acquire() as connection:
        waiting_steps = await job_reads.why_waiting(connection, tenant_id, job["id"], depth.steps, depth.ahead)
        full_limits = await job_reads.why_held(connection, tenant_id, job["id"], depth.ahead)
        ledger = await job_reads.ledger(connection, tenant_id, job["id"], depth.entries)
        serving = await _read_serving(connection, waiting_steps)
    return explanation(job, waiting_steps, full_limits, ledger, serving)


async def _read_serving(connection: Connection, waiting_steps: Sequence[Row]) -> Serving:
    """Read which workers serve the waiting steps, and the running steps whose lease has expired (`lapsed`). Queues of
    external workers are left out, because the platform does not know which external workers serve them.
    """
    # A step that needs several handlers gives a place with all of them, and a place with each of them.
    places = {
        (row["queue"], handler)
        for row in waiting_steps
        if (row["status"] != "running" or row["lapsed"]) and not row["queue"].startswith(EXTERNAL)
        for handler in (row["handler"], *split_handlers(row["handler"]))
    }
    if not places:
        return _UNKNOWN_SERVING
    dead = await workers.dead(connection)
    served_by_place = await handler_reads.served(connection, places, dead)
    nearest: dict[Place, Sequence[str]] = {}
    for place, served in served_by_place.items():
        queue, handler = place
        is_single = split_handlers(handler) == [handler]
        if is_single and served.workers and not served.able:  # no worker has the handler
            names = await handler_reads.handlers_of_queue(connection, queue, dead)
            nearest[place] = get_close_matches(handler, names, _MAX_NEAREST, 0.8)
            break  # for one place only, because comparing all names is slow
    return Serving(served_by_place, nearest)


def explanation(
    job: Row,
    waiting_steps: Sequence[Row],
    full_limits: Sequence[Row],
    ledger: Sequence[Row],
    serving: Serving = _UNKNOWN_SERVING,
) -> dict[str, Any]:
    """Build the answer from rows that the caller has read, as `explain` reads them. `full_limits`: the concurrency
    limits at which the job waits.
    """
    return {
        "id": job["id"],
        "status": job["status"],
        "reasons": _reasons(job, waiting_steps, full_limits, serving),
        "ledger": [_ledger_entry(row) for row in ledger],
    }


def _reasons(
    job: Row, waiting_steps: Sequence[Row], full_limits: Sequence[Row], serving: Serving
) -> list[dict[str, Any]]:
    if job["status"] in JOB_TERMINAL:
        return [_reason("ended", f"The job has ended: {job['status']}.", error=job["error"])]
    if job["held"]:  # the job waits at concurrency limits, and no step has started
        starts_at: datetime | None = next((row["starts_at"] for row in full_limits), None)
        if starts_at is not None:  # the job has the same start time at all its limits
            message = f"The job starts at {to_the_second(starts_at)} or later."
            return [_reason("waiting_until", message, until=starts_at)]
        return [_reason_of_limit(row) for row in full_limits] or [
            _reason("admitting", "The job is about to be admitted.")
        ]
    reasons = []
    is_cancelling = job["status"] == "cancel_requested"
    if is_cancelling:
        reasons.append(
            _reason("cancelling", "The job was asked to stop. Its running steps are stopped after the grace.")
        )
    return reasons + [
        reason for row in waiting_steps for reason in _reasons_of_step(row, serving, is_cancelling=is_cancelling)
    ]


def _reason(code: str, message: str, **details: Any) -> dict[str, Any]:
    return {"code": code, "message": message} | {name: value for name, value in details.items() if value is not None}


def _reason_of_limit(row: Row) -> dict[str, Any]:
    """Why a concurrency limit does not admit the job. Columns of `row`: `at_most` and `per_minute` are the limit,
    `inside` is the number of admitted jobs that are unfinished, `lately` the number of jobs admitted in the last
    minute, and `ahead` the number of jobs that wait there before this job.
    """
    # If a limit counts the jobs of each value in the payload separately, its key ends with the digest of the value.
    # Leave out the digest, because a reader cannot use it.
    key = without_value(row["key"])
    if key.startswith("scope:"):
        return _reason("same_scope", "A job of the same scope is unfinished.", ahead=row["ahead"])
    if row["at_most"] is not None and row["inside"] >= row["at_most"]:
        running = counted(row["inside"], "is running", "are running")
        message = f"The limit {key} admits {counted(row['at_most'], 'job', 'jobs')} at once, and {running}."
        return _reason("limit", message, limit=key, at_most=row["at_most"], running=row["inside"], ahead=row["ahead"])
    if row["per_minute"] is not None and row["lately"] >= row["per_minute"]:
        per_minute = counted(row["per_minute"], "job", "jobs")
        message = f"The limit {key} admits {per_minute} a minute, and {row['lately']:,} started in the last minute."
        return _reason("rate", message, limit=key, per_minute=row["per_minute"], ahead=row["ahead"])
    if row["cut"]:  # the count of the admitted jobs ended at MAX_COUNTED
        message = f"The job waits at the limit {key}, which has admitted at least {MAX_COUNTED:,} jobs."
        return _reason("limit", message, limit=key, at_most=row["at_most"], ahead=row["ahead"])
    return _reason("limit_has_room", f"The limit {key} has room.", limit=key, ahead=row["ahead"])


def _reasons_of_step(row: Row, serving: Serving, *, is_cancelling: bool) -> list[dict[str, Any]]:
    """The reasons of one step. Usually there is one. There are two if the step waits until a time and no worker has its
    handler, or if the step's lease has expired and no worker can take the step over.
    """
    if row["status"] == "running" and row["lapsed"]:
        return _reasons_of_lapsed_step(row, serving, is_cancelling=is_cancelling)
    reason = _reason_of_step(row, serving)
    if reason["code"] != "waiting_until" or not _is_handler_missing(row, serving):
        return [reason]
    return [_reason_of_missing_handler(row, serving), reason]


def _is_handler_missing(row: Row, serving: Serving) -> bool:
    """Whether workers serve the step's queue, but none of them has the step's handler. If the step needs several
    handlers, one worker must have all of them.
    """
    served = serving.places.get((row["queue"], row["handler"]))
    return served is not None and served.workers > 0 and served.able == 0  # `able`: how many have the handler


def _reasons_of_lapsed_step(row: Row, serving: Serving, *, is_cancelling: bool) -> list[dict[str, Any]]:
    """The reasons of a running step whose lease has expired. If the job is being cancelled, the sweeper of a worker
    ends the step. Otherwise another worker takes the step over. If no worker can take it over, a second reason names
    the obstacle: the queue is paused, or no worker has the step's queue and handler.
    """
    step = row["step"]
    lapsed = f"The lease on {step} has expired."
    if is_cancelling:
        return [_reason("lease_lapsed", f"{lapsed} A worker's sweeper ends {step}.", step=step)]
    served = serving.places.get((row["queue"], row["handler"]))
    if row["paused_because"] is not None:
        obstacle = _reason_of_paused_queue(row)
    elif served is not None and not (served.workers and served.able):
        obstacle = _reason_of_runnable_step(row, serving)
    else:
        return [_reason("lease_lapsed", f"{lapsed} Another worker takes {step} over.", step=step)]
    return [_reason("lease_lapsed", lapsed, step=step), obstacle]


def _reason_of_paused_queue(row: Row) -> dict[str, Any]:
    message = f"The queue {client_queue(row['queue'])} is paused: {row['paused_because']}"
    return _reason("queue_paused", message, step=row["step"])


def _reason_of_step(row: Row, serving: Serving) -> dict[str, Any]:
    """The reason of a step that waits, or runs under a valid lease. The column `later`: the step is not due yet."""
    step = row["step"]
    if row["status"] == "running":
        return _reason("running", f"{step} is running.", step=step, worker=row["lease_owner"], until=row["lease_until"])
    if row["later"]:
        return _reason_of_later_step(row)
    queue = row["queue"]
    if row["paused_because"] is not None:
        return _reason_of_paused_queue(row)
    if queue.startswith(EXTERNAL):
        message = f"{step} waits until an external worker claims tasks of the queue {client_queue(queue)}."
        return _reason("waiting_for_external_worker", message, step=step, queue=client_queue(queue))
    return _reason_of_runnable_step(row, serving)


def _reason_of_runnable_step(row: Row, serving: Serving) -> dict[str, Any]:
    step, queue, ahead = row["step"], row["queue"], row["ahead"]
    served = serving.places.get((queue, row["handler"]))
    if served is not None and not served.workers:
        return _reason_of_unserved_queue(row, served)
    if _is_handler_missing(row, serving):
        return _reason_of_missing_handler(row, serving)
    others_text = counted(ahead, "other", "others")
    if ahead >= row["ahead_bound"]:  # the count of jobs ahead ended at this bound
        others_text = f"at least {others_text}"
    return _reason("behind_others", f"{step} is runnable, behind {others_text}.", step=step, queue=queue, ahead=ahead)


def _reason_of_unserved_queue(row: Row, served: Served) -> dict[str, Any]:
    step, queue = row["step"], row["queue"]
    task = ", ".join(_task_of(handler) for handler in split_handlers(row["handler"]))
    message = f"No worker serves the queue {queue}."
    if served.elsewhere:
        message += f" Workers that have the code of {task} serve other queues."
    else:
        message += f" {_last_seen_sentence(task, served)}"
    return _reason("no_worker", message, step=step, queue=queue, task=task, last_seen=served.seen_at)


def _reason_of_missing_handler(row: Row, serving: Serving) -> dict[str, Any]:
    step, queue, handlers = row["step"], row["queue"], split_handlers(row["handler"])
    # If the step needs several handlers, name the first handler that no worker has. There is no such handler if workers
    # have each of the handlers, but no worker has all of them.
    places = [(queue, handler) for handler in handlers if not _is_served(serving, (queue, handler))]
    if not places:
        task = ", ".join(map(_task_of, handlers))
        message = f"No worker of the queue {queue} has the code of all these tasks, which {step} needs: {task}."
        return _reason("unknown_task", message, step=step, queue=queue, task=task)
    place, task = places[0], _task_of(places[0][1])
    served = serving.places[place]
    nearest = [_task_of(name) for name in serving.nearest.get(place, ())]
    message = (
        f"No worker serves {task}: no worker of the queue {queue} has its code. {_last_seen_sentence(task, served)}"
    )
    if nearest:
        message += f" The workers of this queue have similar tasks: {', '.join(nearest)}."
    return _reason(
        "unknown_task", message, step=step, queue=queue, task=task, last_seen=served.seen_at, nearest=nearest or None
    )


def _is_served(serving: Serving, place: Place) -> bool:
    """Whether a worker of the queue has the handler. True if `_read_serving` has read nothing about this place."""
    served = serving.places.get(place)
    return served is None or served.able > 0


def _last_seen_sentence(task: str, served: Served) -> str:
    if served.seen_at is None:
        return f"No worker with the code of {task} has been seen."
    return f"A worker with the code of {task} was last seen at {to_the_second(served.seen_at)}."


def _task_of(handler: str) -> str:
    """The task's name as it stands in the author's code. A task of an app is a pipeline `APP.TASK` with one step, so
    the handler `APP.TASK.STEP` is shortened to `APP.TASK`. A handler of another pipeline (`PIPELINE.STEP`) stays as it
    is.
    """
    pipeline, _, _ = handler.rpartition(".")
    return pipeline if "." in pipeline else handler


def _reason_of_later_step(row: Row) -> dict[str, Any]:
    due_at: datetime | None = row["available_at"]
    # `signals`: names of signals. The step's workflow waits until one of them arrives.
    if row["signals"]:
        names = " or ".join(row["signals"])
        until = "" if due_at is None else f", until {to_the_second(due_at)}"
        message = f"{row['step']} waits for the signal {names}{until}."
        return _reason("waiting_for_signal", message, step=row["step"], signals=row["signals"], until=due_at)
    if due_at is None:
        return _reason("waiting_for_steps", f"{row['step']} waits for steps that it started.", step=row["step"])
    if row["status"] == "retry":
        message = f"{row['step']} failed and is tried again at {to_the_second(due_at)}."
        return _reason("retry_later", message, step=row["step"], until=due_at, error=row["failure"])
    return _reason(
        "waiting_until", f"{row['step']} waits until {to_the_second(due_at)}.", step=row["step"], until=due_at
    )


def _ledger_entry(row: Row) -> dict[str, Any]:
    """An entry of the ledger. A claim also has `worker`. An attempt that failed or was lost also has `cause`."""
    entry = {name: row[name] for name in ("seq", "at", "kind", "step", "epoch", "outputs") if row[name] is not None}
    data = row["data"] or {}
    return entry | {name: data[name] for name in ("worker", "cause") if data.get(name) is not None}
