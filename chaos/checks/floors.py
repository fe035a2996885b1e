"""The floors of a run: how many things of each kind a check must compare. Below a floor, the verdict is `not observed`.

Some floors are a rate for each second of load: about a third of what a slow machine reaches. Other floors are a count
that holds for every plan. In a short run, the floor of a rare kind is 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from chaos.catalogue import APIS
from chaos.checks.idempotency import ENDPOINTS
from chaos.plan import Plan

_ENDPOINTS = {f"key at {endpoint}": 0.05 for endpoint in ENDPOINTS}
#: Invariant -> kind -> observations in a second of load.
_PER_SECOND: dict[str, dict[str, float]] = {
    "I1": {"accepted job": 3, "schedule": 0.2},
    "I2": {"picture": 0.1, "job": 3, "repeated answer": 0.3, **_ENDPOINTS},
    "I3": {"step": 8},
    "I4": {"change of state": 20, "job": 3, "step": 8},
    "I5": {"claim": 5, "step": 8},
    "I6": {"settlement": 5, "completion": 3, "result": 3},
    "I7": {"step at rest": 8},
    "I8": {"run": 5},
    "I10": {"hint written": 5},
    "I12": {"output": 3, "reference": 2},
    "I13": {"object": 3},
    "I15": {"cancelled job": 0.05, "running job": 0.05, "workflow that saw its cancel": 0.1},
    "I16": {"start": 2},
    "I17": {"step": 8, "job made to fail": 0.4},
    "I18": {"tick": 0.2},
    "I19": {"end of a run": 0.2, "message": 0.2},
    "I20": {"numbers of a job": 3, "stream": 0.1},
    "I21": {
        "task": 8,
        "event": 20,
        "media": 0.15,
        "output": 2,
        "run": 0.2,
        "foreign conversion": 0.05,
        "foreign generation": 0.05,
        "foreign template": 0.05,
    },
    "I22": {"generation": 0.05, "order": 0.05},
    "I25": {"call": 0.1},
    "I26": {"target": 0.05},
    "I23": {"admission to a limit": 0.1, "admission at a rate": 0.05},
}
_WITH_BROKER = {"I9": {"ACK": 3.0}, "I10": {"hint dropped": 5.0}}
#: Invariant -> kind -> observations in any run.
_ALWAYS: dict[str, dict[str, int]] = {
    "I7": {"look at leases": 1},
    "I10": {"outbox at rest": 1},
    "I21": {f"foreign {kind}": 1 for kind in ("media", "job", "run", "schedule", "webhook")},
    "I24": {"directory": 1, "sessions": 1, "locks": 1},
}
_ALWAYS_WITH_BROKER = {"I11": {"queue ready": 3, "queue held": 3}}


def floors_of(plan: Plan, *, broker: bool) -> dict[str, dict[str, int]]:
    """The floors of a run of `plan`; `broker`: whether it has RabbitMQ."""
    floors: dict[str, dict[str, int]] = {}
    rates: Iterable[tuple[str, dict[str, float]]] = [*_PER_SECOND.items(), *(_WITH_BROKER.items() if broker else ())]
    for number, kinds in rates:
        floors.setdefault(number, {}).update({what: int(rate * plan.seconds) for what, rate in kinds.items()})
    counts = [*_ALWAYS.items(), *(_ALWAYS_WITH_BROKER.items() if broker else ())]
    for number, minimum in counts:
        floors.setdefault(number, {}).update(minimum)
    floors["I24"]["process"] = len(plan.workers) + len(APIS)
    if plan.has_only_failovers:
        floors["I27"] = {"promotion": len(plan.blows), "step": int(8 * plan.seconds)}
    return floors
