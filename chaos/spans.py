"""The time span of each fault of a run. From the spans the record counts which faults overlapped.

The span of a failpoint lasts from its line in the journal until the process that it hit works again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from chaos.plan import Plan

#: About the time after a SIGKILL until the slot's next process serves. A cut connection is back sooner.
_RECOVERY_SECONDS = 2.0
#: How long each act of a failpoint holds its process, beside the recovery.
_ACT_SECONDS = {"stop": 6.4, "sleep": 7.0}


class Span(NamedTuple):
    """Seconds since the load began."""

    fault: str
    since: float
    until: float


def spans_of(
    plan: Plan, blows: Iterable[tuple[str, float, float]], journal: Sequence[dict[str, Any]], began: float
) -> list[Span]:
    """The spans of the faults that fired. `blows`: (fault, since, until) for each blow that fired. `began`: when the
    load began. The times of all three arguments are in seconds since 1970.
    """
    spans = [Span(name, since - began, max(until, since + _RECOVERY_SECONDS) - began) for name, since, until in blows]
    for fault in plan.armed:
        point, _, act = fault.name.partition(" ")[2].partition(":")
        for line in journal:
            acted_there = line["what"] == "failpoint" and line["process"].partition(".")[0] == fault.target
            if acted_there and (line["name"], line["act"]) == (point, act):
                since = line["at"] - began
                spans.append(Span(fault.name, since, since + max(_ACT_SECONDS.get(act, 0.0), _RECOVERY_SECONDS)))
    return sorted(spans, key=lambda span: span.since)


def pairs(spans: Iterable[Span]) -> set[tuple[str, str]]:
    """The pairs of faults that overlapped, each in alphabetical order."""
    return {
        (min(one.fault, other.fault), max(one.fault, other.fault))
        for one, other in combinations(spans, 2)
        if one.fault != other.fault and one.since < other.until and other.since < one.until
    }
