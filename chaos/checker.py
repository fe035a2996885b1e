"""Judges a history by the invariants I1 to I27 of docs/explanation/chaos.md. The function `i3` checks I3."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from chaos.checks import (
    accepted_jobs,
    acknowledgements,
    bulk_operations,
    cancels,
    epochs,
    event_numbers,
    expired_leases,
    failures,
    idempotency,
    lease_trust,
    leftovers,
    limits,
    objects,
    outbox,
    outputs,
    promotions,
    provider_orders,
    queues,
    schedules,
    settlements,
    state_changes,
    tenants,
    webhooks,
    workflow_calls,
)
from chaos.checks.verdict import NotApplicable, Observation
from chaos.history import History

#: A verdict shows the evidence of at most this many violations, and counts all.
_MOST_EVIDENCE = 10

Check = Callable[[History], Iterable[Observation]]
#: Invariant -> kind of thing that its check compares -> how many of them a history must have.
Floors = Mapping[str, Mapping[str, int]]

INVARIANTS: dict[str, Check] = {
    "I1": accepted_jobs.i1,
    "I2": idempotency.i2,
    "I3": state_changes.i3,
    "I4": state_changes.i4,
    "I5": epochs.i5,
    "I6": settlements.i6,
    "I7": expired_leases.i7,
    "I8": lease_trust.i8,
    "I9": acknowledgements.i9,
    "I10": outbox.i10,
    "I11": queues.i11,
    "I12": outputs.i12,
    "I13": objects.i13,
    "I14": objects.i14,
    "I15": cancels.i15,
    "I16": state_changes.i16,
    "I17": failures.i17,
    "I18": schedules.i18,
    "I19": webhooks.i19,
    "I20": event_numbers.i20,
    "I21": tenants.i21,
    "I22": provider_orders.i22,
    "I23": limits.i23,
    "I24": leftovers.i24,
    "I25": workflow_calls.i25,
    "I26": bulk_operations.i26,
    "I27": promotions.i27,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the check of one invariant. `number`: such as I3. `says`: the invariant in a sentence.

    `observed`: how many things of each kind were compared. `why`: the evidence of violations; or the kinds that were
    observed too rarely; or the reason why the invariant does not apply.
    """

    number: str
    says: str
    state: Literal["ok", "violated", "not observed", "not applicable"]
    observed: Mapping[str, int] = field(default_factory=dict)
    why: tuple[str, ...] = ()
    violations: int = 0

    @property
    def red(self) -> bool:
        """Whether the invariant was violated, or observed less often than the plan of the run demands: a rare
        observation proves nothing.
        """
        return self.state in ("violated", "not observed")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(history: History, floors: Floors) -> list[Verdict]:
    """The verdict of every invariant. `floors`: from chaos.checks.floors.floors_of, for the run's plan. An invariant
    without a floor still needs one observation.
    """
    return [_verdict(number, check, history, floors.get(number, {})) for number, check in INVARIANTS.items()]


def _verdict(number: str, check: Check, history: History, floors: Mapping[str, int]) -> Verdict:
    says = (check.__doc__ or "").partition("\n")[0]
    try:
        observations = list(check(history))
    except NotApplicable as reason:
        return Verdict(number, says, "not applicable", why=(str(reason),))
    observed = dict(sorted(Counter(observation.what for observation in observations).items()))
    wrong = [observation.wrong for observation in observations if observation.wrong]
    if wrong:
        return Verdict(number, says, "violated", observed, tuple(wrong[:_MOST_EVIDENCE]), len(wrong))
    too_rare = [
        f"{what}: {observed.get(what, 0)} observed, {floor} wanted"
        for what, floor in floors.items()
        if observed.get(what, 0) < floor
    ]
    if too_rare or not observed:
        return Verdict(number, says, "not observed", observed, tuple(too_rare) or ("nothing was observed",))
    return Verdict(number, says, "ok", observed)
