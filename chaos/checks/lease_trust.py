"""Judges I8: from its claim until its trust in the lease ends, a worker acts on a task, and no other worker does.

The trust ends before `lease_until`, by the margin of the settings. The database's clock counts, because another
worker's claim compares with it. A worker that lost its lease stops. Until it knows of the loss, its handler may run
beside the handler of the next owner, but it commits nothing (I6).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from chaos.checks.verdict import Observation, observed
from chaos.evidence import Row
from chaos.history import Claim, History, Run
from chaos.row_changes import Change, seconds

#: How far apart, in seconds, the proxy and the database may see the same end of a session.
_SAME_MOMENT = 1.0
_HEARTBEAT = "leasehold heartbeat"
#: One tick of the heartbeat and some work of two event loops. The handler's writes in this time are refused (I6, I12).
_LAG_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Tenure:
    """One claim and the end of its lease. `until`: when the row was settled, or another worker took it.
    `trusted_until`: the end of trust that the last renewal gave.
    """

    claim: Claim
    until: float
    trusted_until: float
    settled: bool  # by the worker itself


def i8(history: History) -> Iterator[Observation]:
    """Trusted intervals of two workers never overlap, a worker stops when its trust ends, and one claim is one run."""
    tenures = {task: list(_tenures(history, task)) for task in history.claims}
    for task, changes in history.task_changes.items():
        for change in changes:
            claim = _owner(history, task, change)
            if claim is not None and _takes_away(change, claim):
                # By the database's clock, which set `lease_until`.
                has_passed = seconds((change.before or {})["lease_until"]) <= change.at + change.ahead
                sentence = (
                    f"{history.name_of(task)} was taken from {claim.process}, whose session was open and whose lease"
                    " had not passed"
                )
                yield observed(
                    "taking",
                    sentence,
                    good=has_passed or not _session_was_open(history, claim.process, claim.at, change.at),
                )
    earlier_runs: dict[str, list[Run]] = defaultdict(list)
    for run in history.handler_runs:
        if run.claim is None:
            yield Observation("run", f"{history.name_of(run.task)} ran in {run.process}, which had not claimed it")
            continue
        ran_before = any(other.claim and other.claim.epoch == run.claim.epoch for other in earlier_runs[run.task])
        sentence = f"{history.name_of(run.task)} ran twice by the claim of epoch {run.claim.epoch}"
        yield observed("run", sentence, good=not ran_before)
        earlier_runs[run.task].append(run)
        yield from _check_overrun(history, run, tenures[run.task])


def _tenures(history: History, task: str) -> Iterator[_Tenure]:
    changes = history.task_changes[task]
    for claim in history.claims[task]:
        until, last, settled = float("inf"), claim.at, False
        for change in changes:
            row = change.row
            if change.number < claim.change_number:
                continue
            if change.after is None or row["status"] != "running" or row["epoch"] != claim.epoch:
                until, settled = change.at, change.process == claim.process and not _lost(change)
                break
            last = seconds(row["lease_until"]) - change.ahead  # the worker's own clock does not jump
        yield _Tenure(claim, until, last - history.terms.trust_margin_seconds, settled)


def _check_overrun(history: History, run: Run, tenures: list[_Tenure]) -> Iterator[Observation]:
    """Check how long a handler worked on after its worker had settled the lease, or its trust had ended."""
    tenure = next(tenure for tenure in tenures if tenure.claim is run.claim)
    end = min(tenure.until, tenure.trusted_until) if tenure.settled else tenure.trusted_until
    if run.last <= end:
        return
    allowed_seconds = history.terms.trust_margin_seconds + _LAG_SECONDS
    worked = history.seconds_worked(run.process, end, run.last)
    # It worked on for too long by the clock, but not if the time without a processor is left out.
    by_clock = history.seconds_worked(run.process, end, run.last, allow_starvation=False)
    was_starved = by_clock > allowed_seconds >= worked
    why = "the worker had settled it" if tenure.settled and tenure.until == end else "its trust had ended"
    sentence = (
        f"{history.name_of(run.task)}, claimed by {run.process} at epoch {tenure.claim.epoch}, worked on for"
        f" {worked:.1f} s after {why}"
    )
    if run.process in history.of_release:  # nobody can mend the release; the schema's guards refuse its late writes
        yield Observation("lost lease of the release")
        return
    what = "lost lease, without a processor" if was_starved else "lost lease"
    yield observed(what, sentence, good=worked <= allowed_seconds)


def _owner(history: History, task: str, change: Change) -> Claim | None:
    """The claim whose lease was in force before the change; None: the task had no lease."""
    before = change.before
    if not before or not change.after or before["status"] != "running":
        return None
    return next((claim for claim in history.claims.get(task, ()) if claim.epoch == before["epoch"]), None)


def _takes_away(change: Change, claim: Claim) -> bool:
    """Whether the change took the lease of `claim` from its owner. A settlement or a next claim by the owner takes
    nothing away, and neither does the end of the whole job.
    """
    after: Row = change.after or {}
    is_unchanged = (after["lease_owner"], after["epoch"]) == (claim.owner, claim.epoch)
    if is_unchanged or after["status"] in ("cancelled", "skipped") or claim.owner == after["lease_owner"]:
        return False
    return _lost(change) or change.process != claim.process


def _lost(change: Change) -> bool:
    return bool(change.before and change.after and change.after["losses"] > change.before["losses"])


def _session_was_open(history: History, process: str, since: float, until: float) -> bool:
    """Whether one session of the process's heartbeat was certainly open all that time. The session must reach beyond
    both ends by _SAME_MOMENT: the sweeper frees the tasks of a session a little after the session has ended.
    """
    return any(
        session.since < since - _SAME_MOMENT and session.until > until + _SAME_MOMENT
        for session in history.sessions
        if session.process == process and session.label == _HEARTBEAT and session.present
    )
