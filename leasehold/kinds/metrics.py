"""The hook `Kind.questions`: metrics that a kind of work reads from the database. Of all processes with an exporter,
only one, the leader, runs these queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from leasehold.domain.kind import Kind
from leasehold.kinds.loading import load

#: A statement stops counting at this number, so that its cost is bounded. For an operator, ten thousand means the same
#: as a million.
CAP = 10_000


@dataclass(frozen=True, slots=True)
class Question:
    """A statement, its parameters (`values`), and the function that makes metrics of its rows (`to_metrics`).

    The exporter runs all questions in one round every 10 to 60 s, and stops each statement after 3 s. So the statement
    must read a small index, never a table, and stop counting at CAP. If one statement is stopped or refused, or
    `to_metrics` raises, the exporter leaves out the metrics of this question only. But if two statements of a round are
    stopped, the round ends, and the exporter discards all its answers. It then exports the answers of the previous
    round, until these are too old. `name`: no other question of a kind or of the platform may have this name.
    """

    name: str
    statement: str
    values: tuple[object, ...]
    to_metrics: Callable[[Sequence[Mapping[str, Any]]], Iterator[Metric]]


def questions_of(kinds: Iterable[Kind]) -> list[Question]:
    """The questions of all `kinds`, in their order."""
    return [question for kind in kinds if kind.questions is not None for question in load(kind.questions)()]


def gauge(name: str, meaning: str, value: float) -> Metric:
    """The gauge `leasehold_{name}`, without labels."""
    return GaugeMetricFamily(f"leasehold_{name}", meaning, value=value)


def labelled_gauge(
    name: str, meaning: str, labels: Sequence[str], values: Iterable[tuple[tuple[str, ...], float]]
) -> Metric:
    """The gauge `leasehold_{name}`, with a value for each tuple of label values. The caller must bound the number of
    tuples.
    """
    family = GaugeMetricFamily(f"leasehold_{name}", meaning, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family
