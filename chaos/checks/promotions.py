"""Judges I27: after a failover, steps are claimed again soon, and no step is charged a loss.

In these runs each commit waits for the standby that is then promoted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from chaos.audit import Change
from chaos.checks.verdict import NotApplicable, Observation, observed
from chaos.history import History, is_external

#: A failover may cause a loss from this long before the promotion on: the primary is silent then.
_SILENCE_SECONDS = 8.0
#: A failover may cause a loss until this long after the promotion: a lease of 4 s that nobody could renew, and the
#: grace of 10 s, have passed by then.
_LEASES_SECONDS = 16.0
#: A worker that waits this long for a processor may fail to renew its lease.
_STARVED_SECONDS = 1.0
#: The longest time from a promotion to the next claim.
_CLAIM_SECONDS = 3.0


def i27(history: History) -> Iterator[Observation]:
    """After a promotion steps are claimed again within 3 s, and a failover charges no step a loss."""
    if not history.has_only_failovers:
        raise NotApplicable("the plan has other faults than failovers, or none")
    claims = sorted(claim.at for claimed in history.claims.values() for claim in claimed)
    for promoted_at in history.promotions:
        later_claims = claims[bisect_right(claims, promoted_at) :]
        waited = later_claims[0] - promoted_at if later_claims else float("inf")
        starved = history.starvation.longest_wait(promoted_at, promoted_at + waited)
        sentence = f"the first claim came {waited:.1f} s after the promotion"
        yield observed("promotion", sentence, good=waited - starved <= _CLAIM_SECONDS or starved > waited / 2)
    for task, changes in history.task_changes.items():
        if is_external(changes[0].row):  # the load's external workers fall silent without any fault
            continue
        charges = [change for change in changes if _is_charge(history, change)]
        lease = history.terms.lease_seconds
        all_starved = all(
            history.starvation.longest_wait(charge.at - lease, charge.at) > _STARVED_SECONDS for charge in charges
        )
        sentence = f"{history.name_of(task)} was charged {len(charges)} losses for a failover"
        what = "step charged, without a processor" if charges and all_starved else "step"
        yield observed(what, sentence, good=all_starved)


def _is_charge(history: History, change: Change) -> bool:
    """Whether the change charges the task a loss that a failover can have caused."""
    before, after = change.before, change.after
    if not before or not after or after["losses"] <= before["losses"]:
        return False
    return any(-_SILENCE_SECONDS < change.at - promoted_at < _LEASES_SECONDS for promoted_at in history.promotions)
