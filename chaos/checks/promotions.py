"""What a failover may cost, where each commit waits for the standby that is promoted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from chaos.audit import Change
from chaos.checks.verdict import NotApplicable, Observation, observed
from chaos.history import History, is_external

#: How long a primary is silent before the promotion, and how long after it the last lease may end that nobody could
#: renew: 4 s, and the grace of 10 s.
_SILENCE_SECONDS, _LEASES_SECONDS = 8.0, 16.0
#: A worker that waited so long for a processor, while a lease lasts, may not have renewed it.
_STARVED_SECONDS = 1.0
#: Steps are claimed again this much after the promotion.
_GO_ON_SECONDS = 3.0


def i27(history: History) -> Iterator[Observation]:
    """After a promotion steps are claimed again within 3 s, and a failover charges no step a loss."""
    if not history.has_only_failovers:
        raise NotApplicable("the plan has other faults than failovers, or none")
    claims = sorted(claim.at for claimed in history.claims.values() for claim in claimed)
    for promoted in history.promotions:
        after = claims[bisect_right(claims, promoted) :]
        waited = after[0] - promoted if after else float("inf")
        starved = history.starvation.of_any(promoted, promoted + waited)
        sentence = f"the first claim came {waited:.1f} s after the promotion"
        yield observed("promotion", sentence, good=waited - starved <= _GO_ON_SECONDS or starved > waited / 2)
    for task, changes in history.task_changes.items():
        if is_external(changes[0].row):  # external workers fall silent whatever the plan
            continue
        charges = [change for change in changes if _is_charge(history, change)]
        lease = history.terms.lease_seconds
        starved = all(history.starvation.of_any(one.at - lease, one.at) > _STARVED_SECONDS for one in charges)
        sentence = f"{history.name_of(task)} was charged {len(charges)} losses for a failover"
        yield observed("step charged, without a processor" if charges and starved else "step", sentence, good=starved)


def _is_charge(history: History, change: Change) -> bool:
    """Whether it charges a loss while the failover can be its cause: from the silence before to the last lease that a
    worker could not renew.
    """
    before, after = change.before, change.after
    if not before or not after or after["losses"] <= before["losses"]:
        return False
    return any(-_SILENCE_SECONDS < change.at - promoted < _LEASES_SECONDS for promoted in history.promotions)
