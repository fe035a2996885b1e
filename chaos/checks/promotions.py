"""Judges I27: after a failover, steps are claimed again soon, and no step is charged a loss.

In these runs each commit waits for the standby that is then promoted.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator

from chaos.checks.verdict import NotApplicable, Observation, observed
from chaos.history import History, is_external
from chaos.row_changes import Change, seconds
from chaos.settings import GRACE_SECONDS
from chaos.starvation import OURSELVES

#: A failover may cause a loss from this long before the promotion on: the primary is silent then.
_SILENCE_SECONDS = 8.0
#: A failover may cause a loss until this long after the promotion: a lease of 4 s that nobody could renew, and the
#: grace of 10 s, have passed by then.
_LEASES_SECONDS = 16.0
#: A worker needs at most this long to reach the new primary and to renew its leases there.
_RETURN_SECONDS = 3.0
#: A worker may fail to renew its lease if it, or the proxy before the database, waits for a processor for this part of
#: the lease. On a machine with little other work they wait for a fifth.
_STARVED_PART = 0.5
#: The longest time from a promotion to the next claim.
_CLAIM_SECONDS = 3.0


def i27(history: History) -> Iterator[Observation]:
    """After a promotion steps are claimed again within 3 s, and a failover charges no step a loss.

    So a session leaves a primary that fell silent or serves on (leasehold/db/failover.py). A worker that a fault kept
    from each primary for longer than its leases and their grace may be charged.
    """
    if not history.has_only_failovers:
        raise NotApplicable("the plan has other faults than failovers, or no faults")
    for failover, waited in zip(history.failovers, until_claims(history), strict=True):
        starved = history.starvation.longest_wait(failover.promoted_at, failover.promoted_at + waited)
        sentence = f"the first claim came {waited:.1f} s after the promotion, where {_CLAIM_SECONDS:.1f} s are allowed"
        yield observed("promotion", sentence, good=waited - starved <= _CLAIM_SECONDS or starved > waited / 2)
    for task, charges in charges_of(history).items():
        unexcused = [charge for charge in charges if not _was_kept_away(history, task, charge)]
        all_starved = all(_was_starved(history, task, charge) for charge in unexcused)
        sentence = f"{history.name_of(task)} was charged {len(unexcused)} losses for a failover"
        what = "step charged, without a processor" if unexcused else "step charged, cut off" if charges else "step"
        yield observed(what if all_starved else "step", sentence, good=all_starved)


def until_claims(history: History) -> list[float]:
    """Seconds from each promotion to the next claim; infinite if no claim came."""
    claims = sorted(claim.at for claimed in history.claims.values() for claim in claimed)
    promotions = [failover.promoted_at for failover in history.failovers]
    nexts = [bisect_right(claims, promoted_at) for promoted_at in promotions]
    return [
        claims[index] - promoted_at if index < len(claims) else math.inf
        for promoted_at, index in zip(promotions, nexts, strict=True)
    ]


def charges_of(history: History) -> dict[str, list[Change]]:
    """Task -> the changes that charge it a loss for a failover, of every task that this platform's workers do: external
    workers fall silent whatever the plan.
    """
    return {
        task: [change for change in changes if _is_charge(history, change)]
        for task, changes in history.task_changes.items()
        if not is_external(changes[0].row)
    }


def _was_kept_away(history: History, task: str, charge: Change) -> bool:
    """Whether the faults kept the owner of the charged lease from each primary for longer than the lease and its
    grace, and then left it no time to come back.
    """
    owner, ended_at = _owner(history, task, charge), seconds((charge.before or {})["lease_until"])
    since = ended_at - history.terms.lease_seconds
    kept_away = sum(
        max(0.0, min(failover.reached_at, charge.at) - max(failover.silent_since, since))
        for failover in history.failovers
        if failover.silent_since is not None and owner.partition(".")[0] in failover.cut_off
    )
    return charge.at - ended_at > GRACE_SECONDS and charge.at - since - kept_away < _RETURN_SECONDS


def _was_starved(history: History, task: str, charge: Change) -> bool:
    lease = history.terms.lease_seconds
    waits = (
        history.starvation.wait_of(process, charge.at - lease, charge.at)
        for process in (_owner(history, task, charge), OURSELVES)
    )
    return max(waits) > _STARVED_PART * lease


def _owner(history: History, task: str, charge: Change) -> str:
    """The process that had the charged lease."""
    epoch = (charge.before or {})["epoch"]
    return next((claim.process for claim in history.claims.get(task, ()) if claim.epoch == epoch), "")


def _is_charge(history: History, change: Change) -> bool:
    """Whether the change charges the task a loss that a failover can have caused."""
    before, after = change.before, change.after
    if not before or not after or after["losses"] <= before["losses"]:
        return False
    return any(-_SILENCE_SECONDS < change.at - failover.promoted_at < _LEASES_SECONDS for failover in history.failovers)
