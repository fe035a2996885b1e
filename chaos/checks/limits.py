"""Judges I23: a limit of a tenant admits no more jobs at once, or in a minute, than it allows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from chaos.checks.verdict import Observation, observed
from chaos.evidence import Bound
from chaos.history import History
from chaos.row_changes import seconds

_MINUTE = 60.0


def i23(history: History) -> Iterator[Observation]:
    """No more jobs are admitted and unfinished than a limit allows, and no more are admitted in a minute."""
    bounds: dict[tuple[str, str], list[Bound]] = defaultdict(list)
    for bound in history.bounds:
        bounds[bound.tenant, bound.key].append(bound)
    inside: dict[tuple[str, str], set[str]] = defaultdict(set)
    admitted: dict[tuple[str, str], list[float]] = defaultdict(list)  # times of the database's clock, as in a rate
    for change in history.changes:
        if change.kind != "gate_job":
            continue
        limit, job = (change.row["tenant_id"], change.row["key"]), change.row["job_id"]
        now_inside = bool(change.after and change.after["admitted_at"])
        was_inside = bool(change.before and change.before["admitted_at"])
        if not now_inside:
            inside[limit].discard(job)
        elif not was_inside:
            inside[limit].add(job)
            moment = seconds((change.after or {})["admitted_at"])
            admitted[limit].append(moment)
            in_last_minute = sum(moment - _MINUTE < other <= moment for other in admitted[limit])
            for bound in bounds[limit]:
                if bound.since <= change.at < bound.until:
                    yield _within(bound, len(inside[limit]), in_last_minute)


def _within(bound: Bound, inside: int, in_a_minute: int) -> Observation:
    if bound.at_most is not None:
        sentence = f"{inside} jobs of {bound.tenant} were admitted at {bound.key}, {bound.at_most} are allowed"
        return observed("admission to a limit", sentence, good=inside <= bound.at_most)
    allowed = bound.per_minute or 0
    sentence = f"{in_a_minute} jobs of {bound.tenant} were admitted at {bound.key} in a minute, {allowed} are allowed"
    return observed("admission at a rate", sentence, good=in_a_minute <= allowed)
