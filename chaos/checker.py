"""Judges a history by the invariants I1 to I26 of docs/explanation/chaos.md. The function `i3` checks I3."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from chaos.checks import (
    cancels,
    hints,
    jobs,
    keys,
    leases,
    limits,
    operations,
    outputs,
    promotions,
    story,
    surroundings,
    trust,
)
from chaos.checks.verdict import NotApplicable, Observation
from chaos.history import History

#: A verdict has the evidence of at most this many violations. It only counts the others.
_MOST_EVIDENCE = 10

Check = Callable[[History], Iterable[Observation]]
#: Invariant -> kind of thing that its check compares -> how many of them a history must have.
Floors = Mapping[str, Mapping[str, int]]

INVARIANTS: dict[str, Check] = {
    "I1": jobs.i1, "I2": keys.i2, "I3": story.i3, "I4": story.i4, "I5": leases.i5, "I6": leases.i6,
    "I7": leases.i7, "I8": trust.i8, "I9": hints.i9, "I10": hints.i10, "I11": hints.i11, "I12": outputs.i12,
    "I13": outputs.i13, "I14": outputs.i14, "I15": cancels.i15, "I16": story.i16, "I17": jobs.i17,
    "I18": surroundings.i18, "I19": surroundings.i19, "I20": story.i20, "I21": surroundings.i21,
    "I22": limits.i22, "I23": limits.i23, "I24": surroundings.i24,
    "I25": operations.i25, "I26": operations.i26, "I27": promotions.i27,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """`observed`: how many things of each kind were compared. `why`: the evidence of violations, the kinds that were
    observed too rarely, or the reason why the invariant does not apply.
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
    """`floors`: chaos.checks.floors.floors_of(plan). An invariant without a floor there still needs one observation."""
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
        f"{what}: {observed.get(what, 0)} observed, {least} wanted"
        for what, least in floors.items()
        if observed.get(what, 0) < least
    ]
    if too_rare or not observed:
        return Verdict(number, says, "not observed", observed, tuple(too_rare) or ("nothing was observed",))
    return Verdict(number, says, "ok", observed)
