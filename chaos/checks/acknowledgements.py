"""Judges I9: a worker acknowledges a hint only after the commit that makes the hint unnecessary."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from chaos.amqp_tap import HintEvent, HintRecord
from chaos.checks.verdict import NotApplicable, Observation, observed
from chaos.evidence import Row
from chaos.history import Failover, History
from chaos.row_changes import Change, seconds
from chaos.settings import GRACE_SECONDS
from leasehold.transitions.jobs.records import EXTERNAL

#: The clocks of the proxy and of the triggers that record changes of rows may differ by this many seconds.
_CLOCK_DIFFERENCE = 0.005
#: For this long the new primary may have taken writes when its promotion is recorded: pg_promote() looks every 0.1 s.
_PROMOTING_SECONDS = 0.2
_RUNNABLE = ("pending", "retry", "waiting")


def i9(history: History) -> Iterator[Observation]:
    """The ACK of a hint is later than the commit that made the hint unnecessary.

    Two exceptions:
    - After a failover, a process that has a session with the old primary may ask it as long as it serves. It knows
      neither new tasks nor new claims.
    - A jump of the database's clock may end the lease of a living worker. Until that worker learns of it, a hint of the
      task seems a duplicate to it. The task then waits for the next poll.
    """
    if not history.has_broker:
        raise NotApplicable("the run has no broker")
    for record in history.hint_records:
        changes = history.task_changes.get(record.task)
        if record.event is not HintEvent.ACKED or not changes:
            continue
        is_beside_old = any(_had_old_session(history, record, failover) for failover in history.failovers)
        closed = history.closed_at.get(changes[0].row["job_id"], float("inf"))
        yield observed(
            "ACK beside an old primary" if is_beside_old else "ACK",
            f"{record.process} acknowledged the hint of {history.name_of(record.task)}"
            f" {1000 * (record.at - record.since):.0f} ms after its delivery, although the task could be claimed all"
            " the time",
            good=is_beside_old
            or closed <= record.at + _CLOCK_DIFFERENCE
            or _believes_in_lease(history, changes, record)
            or not _was_claimable_throughout(history, changes, record),
        )


def _had_old_session(history: History, record: HintRecord, failover: Failover) -> bool:
    """Whether the process had a session with the old primary after the promotion, while it held the hint."""
    if failover.silent_since is None:  # the old primary had ended before
        return False
    since = max(record.since, failover.promoted_at - _PROMOTING_SECONDS)
    until = min(record.at, failover.ended_at)
    return since < until and any(
        session.since < until and session.until > since
        for session in history.sessions
        if (session.process, session.port) == (record.process, failover.old_port)
    )


def _believes_in_lease(history: History, changes: list[Change], record: HintRecord) -> bool:
    """Whether the process could still trust a lease of the task that a jump of the database's clock has ended."""
    terms = history.terms
    trusted_seconds = terms.lease_seconds - terms.trust_margin_seconds
    return any(
        change.at <= record.at <= change.at + trusted_seconds
        and _ended_a_lease_of(history, change, record.process)
        and any(change.at - terms.lease_seconds <= jumped_at <= change.at for jumped_at, _ in history.jumps)
        for change in changes
    )


def _ended_a_lease_of(history: History, change: Change, process: str) -> bool:
    """Whether the change took the task from the process, and charged the task a loss."""
    before, after = change.before, change.after
    if not before or not after or before["status"] != "running" or after["losses"] <= before["losses"]:
        return False
    return any(
        (claim.epoch, claim.process) == (before["epoch"], process) for claim in history.claims.get(before["id"], ())
    )


def _was_claimable_throughout(history: History, changes: list[Change], record: HintRecord) -> bool:
    """Whether a worker could claim the task at every moment between the delivery and the ACK of its hint. It could not
    while a transaction that changed it had not ended. Nor could it if a transaction that changed it later had begun,
    because that may have locked the task. A claim that began meanwhile claims nothing, and such a transaction writes a
    hint of its own if the task stays due (I10).
    """
    if changes[0].row["queue"].startswith(EXTERNAL):  # only an external worker may claim it, which gets no hints
        return False
    start = max(0, bisect_right([change.at for change in changes], record.since - _CLOCK_DIFFERENCE) - 1)
    for index in range(start, len(changes)):
        if changes[index].at > record.at + _CLOCK_DIFFERENCE:
            return history.begun.get(changes[index].xact, float("inf")) > record.at
        if history.locked_until(changes[index]) > max(changes[index].at, record.since):
            return False
        until = changes[index + 1].at if index + 1 < len(changes) else record.at
        if not _is_claimable(history, changes[index].row, min(until, record.at)):
            return False
        if not _is_claimable(history, changes[index].row, max(changes[index].at, record.since)):
            return False
    return True


def _is_claimable(history: History, task: Row, at: float) -> bool:
    """Whether a worker could claim the task by both clocks: the true one and the database's. A jump of the database's
    clock may end a lease early, and the holder of the lease cannot know that.
    """
    at = min(at, history.database_time(at))
    if task["status"] == "running":  # after `max_losses` lost workers the task fails, and no worker may claim it
        # After a failover or a restart of the database a lease lasts longer, until its owner has come back.
        grace = GRACE_SECONDS if any(restart <= at for restart in history.restarts) else 0.0
        return seconds(task["lease_until"]) + grace < at and task["losses"] < history.terms.max_losses
    return task["status"] in _RUNNABLE and seconds(task["available_at"]) <= at
