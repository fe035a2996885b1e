"""The answer of GET /v1/jobs/{job_id}/explain: a sentence for each reason why a job is not running, and a ledger of
what its workers did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from leasehold.api.process.services import Services
from leasehold.db import job_reads
from leasehold.db.job_reads import MAX_COUNTED, Row
from leasehold.domain.states import JOB_TERMINAL
from leasehold.transitions.concurrency import without_value
from leasehold.transitions.jobs import EXTERNAL, client_queue


@dataclass(frozen=True, slots=True)
class Depth:
    """How much an explanation reads: `entries` of the ledger, `steps` that wait, and tasks or jobs `ahead`."""

    entries: int = job_reads.MAX_LEDGER
    steps: int = job_reads.MAX_STEPS
    ahead: int = MAX_COUNTED


_WHOLE = Depth()


async def explain(services: Services, tenant_id: str, job: Row, depth: Depth = _WHOLE) -> dict[str, Any]:
    """Build the answer. `job`: a row with `id`, `status`, `held` and `error`."""
    async with services.pool.acquire() as connection:
        waiting_steps = await job_reads.why_waiting(connection, tenant_id, job["id"], depth.steps, depth.ahead)
        full_limits = await job_reads.why_held(connection, tenant_id, job["id"], depth.ahead)
        ledger = await job_reads.ledger(connection, tenant_id, job["id"], depth.entries)
    return explanation(job, waiting_steps, full_limits, ledger)


def explanation(
    job: Row, waiting_steps: Sequence[Row], full_limits: Sequence[Row], ledger: Sequence[Row]
) -> dict[str, Any]:
    return {
        "id": job["id"],
        "status": job["status"],
        "reasons": _reasons(job, waiting_steps, full_limits),
        "ledger": [_entry(row) for row in ledger],
    }


def _reasons(job: Row, waiting_steps: Sequence[Row], full_limits: Sequence[Row]) -> list[dict[str, Any]]:
    if job["status"] in JOB_TERMINAL:
        return [_reason("ended", f"The job has ended: {job['status']}.", error=job["error"])]
    if job["held"]:
        return [_limit(row) for row in full_limits] or [_reason("admitting", "The job is about to be admitted.")]
    reasons = []
    if job["status"] == "cancel_requested":
        reasons.append(
            _reason("cancelling", "The job was asked to stop. Its running steps are stopped after the grace.")
        )
    return reasons + [_step(row) for row in waiting_steps]


def _reason(code: str, message: str, **details: Any) -> dict[str, Any]:
    return {"code": code, "message": message} | {name: value for name, value in details.items() if value is not None}


def _limit(row: Row) -> dict[str, Any]:
    key = without_value(row["key"])
    if key.startswith("scope:"):
        return _reason("same_scope", "A job of the same scope is unfinished.", ahead=row["ahead"])
    if row["at_most"] is not None and row["inside"] >= row["at_most"]:
        message = f"The limit {key} admits {row['at_most']} jobs at once, and {row['inside']} are running."
        return _reason("limit", message, limit=key, at_most=row["at_most"], running=row["inside"], ahead=row["ahead"])
    if row["per_minute"] is not None and row["lately"] >= row["per_minute"]:
        message = (
            f"The limit {key} admits {row['per_minute']} jobs a minute, and {row['lately']} started in the last minute."
        )
        return _reason("rate", message, limit=key, per_minute=row["per_minute"], ahead=row["ahead"])
    if row["cut"]:
        message = f"The job waits at the limit {key}, which has admitted at least {MAX_COUNTED:,} jobs."
        return _reason("limit", message, limit=key, at_most=row["at_most"], ahead=row["ahead"])
    return _reason("limit_has_room", f"The limit {key} has room.", limit=key, ahead=row["ahead"])


def _step(row: Row) -> dict[str, Any]:
    step = row["step"]
    if row["status"] == "running":
        if row["lapsed"]:
            return _reason(
                "lease_lapsed", f"The lease on {step} has expired. Another worker takes {step} over.", step=step
            )
        return _reason("running", f"{step} is running.", step=step, worker=row["lease_owner"], until=row["lease_until"])
    if row["later"]:
        return _later(row)
    queue = row["queue"]
    if row["paused_because"] is not None:
        return _reason("queue_paused", f"The queue {client_queue(queue)} is paused: {row['paused_because']}", step=step)
    if queue.startswith(EXTERNAL):
        message = f"{step} waits until an external worker claims tasks of the queue {client_queue(queue)}."
        return _reason("waiting_for_external_worker", message, step=step, queue=client_queue(queue))
    return _in_line(row)


def _in_line(row: Row) -> dict[str, Any]:
    step, queue, ahead = row["step"], row["queue"], row["ahead"]
    if not row["workers"]:
        return _reason("no_worker", f"No worker serves the queue {queue}.", step=step, queue=queue)
    count = f"at least {ahead}" if ahead >= row["most_ahead"] else str(ahead)
    return _reason("behind_others", f"{step} is runnable, behind {count} others.", step=step, queue=queue, ahead=ahead)


def _later(row: Row) -> dict[str, Any]:
    at: datetime | None = row["available_at"]
    if row["signals"]:
        names = " or ".join(row["signals"])
        message = f"{row['step']} waits for the signal {names}{'' if at is None else f', until {at.isoformat()}'}."
        return _reason("waiting_for_signal", message, step=row["step"], signals=row["signals"], until=at)
    if at is None:
        return _reason("waiting_for_steps", f"{row['step']} waits for steps that it started.", step=row["step"])
    if row["status"] == "retry":
        message = f"{row['step']} failed and is tried again at {at.isoformat()}."
        return _reason("retry_later", message, step=row["step"], until=at, error=row["failure"])
    return _reason("waiting_until", f"{row['step']} waits until {at.isoformat()}.", step=row["step"], until=at)


def _entry(row: Row) -> dict[str, Any]:
    entry = {name: row[name] for name in ("seq", "at", "kind", "step", "epoch", "outputs") if row[name] is not None}
    worker = (row["data"] or {}).get("worker")
    return entry | ({"worker": worker} if worker is not None else {})
