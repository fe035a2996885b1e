"""The judge: each invariant of RELIABILITY.md section 5 is a function named by its number, and looks at a history."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Literal

from chaos.checks import hints, jobs, leases, outputs, story, surroundings
from chaos.checks.verdict import NotApplicable
from chaos.history import History

#: Of more violations than this only the number is told.
_MOST_EVIDENCE = 10

Check = Callable[[History], Iterable[str]]

INVARIANTS: dict[str, Check] = {
    "I1": jobs.i1, "I2": jobs.i2, "I3": story.i3, "I4": story.i4, "I5": leases.i5, "I6": leases.i6,
    "I7": leases.i7, "I8": leases.i8, "I9": hints.i9, "I10": hints.i10, "I11": hints.i11, "I12": outputs.i12,
    "I13": outputs.i13, "I14": outputs.i14, "I15": jobs.i15, "I16": story.i16, "I17": jobs.i17,
    "I18": surroundings.i18, "I19": surroundings.i19, "I20": story.i20, "I21": surroundings.i21,
    "I22": surroundings.i22, "I23": surroundings.i23, "I24": surroundings.i24,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """`why`: the evidence of a violation, or the reason why the invariant does not apply."""

    number: str
    says: str
    state: Literal["ok", "violated", "not applicable"]
    why: tuple[str, ...] = ()
    violations: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(history: History) -> list[Verdict]:
    return [_verdict(number, check, history) for number, check in INVARIANTS.items()]


def _verdict(number: str, check: Check, history: History) -> Verdict:
    says = (check.__doc__ or "").partition("\n")[0]
    try:
        found = list(check(history))
    except NotApplicable as reason:
        return Verdict(number, says, "not applicable", (str(reason),))
    if found:
        return Verdict(number, says, "violated", tuple(islice(found, _MOST_EVIDENCE)), len(found))
    return Verdict(number, says, "ok")
