"""Says which jobs may end without success: made to fail, cancelled, or robbed of their attempts by faults."""

from __future__ import annotations

from chaos.evidence import Row
from chaos.history import History

#: Kind of job that is made to fail -> the code of its failure. None: any code.
MADE_TO_FAIL = {"hopeless": "not_now", "wrong": "refused", "poison": None, "broken": "broken"}
#: Codes of failures that faults cause, and never the step's own work. A good job may fail with one of them once its
#: attempts are used up.
_CAUSED_BY_FAULTS = {"worker_lost", "store_unavailable", "input_corrupt", "disk_full"}
#: The code of a generation whose order may or may not have reached the provider: ordering again might buy twice.
_UNKNOWN_OUTCOME = "submit_outcome_unknown"


def excused(history: History, job: Row) -> bool:
    """Whether the job may have ended without success: a client cancelled it, or the faults used up its attempts."""
    if job["status"] == "cancelled":
        by_client = any(request.kind == "cancel" and request.job == job["id"] for request in history.requests)
        return by_client or job["id"] in history.cancelled_in_bulk
    code = (job["error"] or {}).get("code")
    if code == _UNKNOWN_OUTCOME and job["pipeline"] == "generation":
        return True
    failed = [task for task in history.tasks if task["job_id"] == job["id"] and task["status"] == "failed"]
    used_up = all(
        task["errors"] >= task["max_attempts"] or task["losses"] > history.terms.max_losses for task in failed
    )
    crashed = all(task["crashes"] >= history.terms.max_crashes for task in failed)
    return bool(failed) and (
        (used_up and code in _CAUSED_BY_FAULTS) or (crashed and history.children_killed >= history.terms.max_crashes)
    )
