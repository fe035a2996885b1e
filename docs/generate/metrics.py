"""The page of metrics: those that each process counts, and those that the elected exporter reads from the database."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric

from docs.generate.tables import code, codes, table
from leasehold.domain.registry import Pipelines
from leasehold.exporter.broker_metrics import BrokerMetrics
from leasehold.exporter.exporter import families
from leasehold.kinds.metrics import questions_of
from leasehold.pipelines import kinds_of
from leasehold.settings import Settings
from leasehold.telemetry.meters import Described, described

_ROOT = Path(__file__).parents[2]
_INTRODUCTION = """# Metrics

What they are for, where they are served and what they cost: [Observability](../operations/observability.md). Counters
end with `_total`; a histogram has `_bucket`, `_count` and `_sum`. Labels are bounded: a value is a declared name or one
of a few words, never a job or a worker. A tenant stands only in the name of a queue of external workers, which is
`ext:TENANT:QUEUE`.
"""
_OWN = """## Of each process

Sum them over all processes.
"""
_ELECTED = """## Of the database

One elected process reads them from PostgreSQL every 10 seconds. Take the maximum over all processes: around a change of
the elected process, two processes serve the same metrics.
"""


def page() -> str:
    own = sorted({*_process_metrics(), *_broker_metrics()})
    return "\n\n".join([_INTRODUCTION, _OWN, _table(own), _ELECTED, _table(sorted(_database_metrics()))])


def _table(metrics: list[Described]) -> str:
    rows = [(code(metric.name), metric.kind, codes(metric.labels), metric.meaning) for metric in metrics]
    return table(["metric", "kind", "labels", "meaning"], rows)


def _process_metrics() -> list[Described]:
    """Import every module that declares a metric. Returns the descriptions, which the declarations have recorded."""
    for folder in ("leasehold", "api", "worker"):
        for path in sorted((_ROOT / folder).rglob("*.py")):
            if path.name != "__main__.py" and "telemetry.meters import" in path.read_text():
                parts = path.relative_to(_ROOT).with_suffix("").parts
                import_module(".".join(parts if folder == "leasehold" else ("leasehold", *parts)))
    return described


class _Row(dict[str, Any]):
    """A row that has every column, so that every metric can be made from it. The page shows no values."""

    def __missing__(self, key: str) -> int:
        return 0


class _Rows(dict[str, list[_Row]]):
    """Has one row for each question of the exporter."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> list[_Row]:
        return [_Row()]


class _Broker:
    name = ""

    def describe(self) -> dict[str, Any]:
        return {"connected": True, "connects": {}}


def _database_metrics() -> Iterator[Described]:
    kind_questions = questions_of(kinds_of(Pipelines.from_source(Settings(_env_file=None).pipelines)))
    yield from map(_describe, families(_Rows(), kind_questions))


def _broker_metrics() -> Iterator[Described]:
    yield from map(_describe, BrokerMetrics(_Broker()).collect())  # type: ignore[arg-type]  # two members of a Broker are enough


def _describe(family: Metric) -> Described:
    labels: tuple[str, ...] = tuple(getattr(family, "_labelnames", ()))  # the library has no public name for them
    suffix = "_total" if family.type == "counter" else ""
    return Described(f"{family.name}{suffix}", family.type, labels, family.documentation)
