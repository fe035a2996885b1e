"""What only the database knows of a kind of work: asked by the one process that leads the exporter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from leasehold.domain.kind import Kind
from leasehold.kinds.loading import load

#: Counts are exact up to this number, and stay there beyond it: ten thousand or a million are the same news, and shall
#: cost the same.
CAP = 10_000


@dataclass(frozen=True, slots=True)
class Question:
    """A statement, its parameters, and the metrics that its rows amount to.

    The exporter asks every ten seconds and gives a statement three seconds: it must read a small index, never a table,
    and stop counting at CAP. A question that the database refuses is left out, and the others are asked.
    """

    name: str
    statement: str
    values: tuple[object, ...]
    families: Callable[[Sequence[Mapping[str, Any]]], Iterator[Metric]]


def questions_of(kinds: Iterable[Kind]) -> list[Question]:
    """Those of all `kinds`, in their order."""
    return [question for kind in kinds if kind.questions is not None for question in load(kind.questions)()]


def gauge(name: str, meaning: str, value: float) -> Metric:
    """`leasehold_{name}`, without labels."""
    return GaugeMetricFamily(f"leasehold_{name}", meaning, value=value)


def labelled(name: str, meaning: str, labels: Sequence[str], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    """`leasehold_{name}`, with a value for each tuple of label values. Bound how many there are."""
    family = GaugeMetricFamily(f"leasehold_{name}", meaning, labels=labels)
    for words, value in values:
        family.add_metric(words, value)
    return family
