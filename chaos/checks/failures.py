"""Judges I17: each failed attempt is counted under its cause, within its limit, and work that cannot succeed fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from chaos.checks.excuses import MADE_TO_FAIL, excused
from chaos.checks.verdict import Observation, observed
from chaos.evidence import Row
from chaos.history import History
from leasehold.domain.states import JOB_TERMINAL

_CAUSES = ("error", "timeout", "crash", "loss")


def i17(history: History) -> Iterator[Observation]:
    """Attempts never exceed the maximum; poison ends FAILED with a cause; kinds of failure are counted apart."""
    causes = Counter((failure["task_id"], failure["cause"]) for failure in history.failures)
    for task in history.tasks:
        violations = [*_over_limits(history, task)]
        for cause, counter in (("crash", "crashes"), ("error", "errors")):
            recorded = causes[task["id"], cause] + (causes[task["id"], "timeout"] if cause == "error" else 0)
            total = task[counter] + _counted_before_replays(history, task, counter)
            if recorded != total:
                violations.append(
                    f"{history.name_of(task['id'])} counted {total} of {cause}, its failures say {recorded}"
                )
        if task["status"] == "failed" and not any(causes[task["id"], cause] for cause in _CAUSES):
            violations.append(f"{history.name_of(task['id'])} failed without a cause")
        yield observed("step", "; ".join(violations), good=not violations)
    for job in history.jobs:
        if job["pipeline"] in MADE_TO_FAIL and job["status"] in JOB_TERMINAL:
            yield Observation("job made to fail", _wrong_end(history, job))


def _counted_before_replays(history: History, task: Row, counter: str) -> int:
    """The sum of the step's counter before each replay of its job: a replay sets the counter back to zero."""
    changes = history.task_changes.get(task["id"], ())
    drops = (change.before[counter] - change.after[counter] for change in changes if change.before and change.after)
    return sum(drop for drop in drops if drop > 0)


def _over_limits(history: History, task: Row) -> Iterator[str]:
    limits = (
        ("errors", task["max_attempts"]), ("crashes", history.terms.max_crashes),
        ("losses", history.terms.max_losses + 1),
    )  # fmt: skip
    for counter, allowed in limits:
        if task[counter] > allowed:
            yield f"{history.name_of(task['id'])} has {task[counter]} {counter}, {allowed} are allowed"


def _wrong_end(history: History, job: Row) -> str:
    """The evidence against the end of a job that cannot succeed; "" if it failed as it must."""
    if job["status"] != "failed":
        return f"{job['pipeline']} {job['id']} cannot succeed, and ended {job['status']}"
    expected_code = MADE_TO_FAIL[job["pipeline"]]
    if expected_code is not None and (job["error"] or {}).get("code") != expected_code and not excused(history, job):
        return f"{job['pipeline']} {job['id']} failed by {job['error']} instead of {expected_code}"
    return ""
