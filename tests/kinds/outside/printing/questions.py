"""One metric: leasehold_printing_orders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.metrics_core import Metric

from leasehold.kinds.metrics import CAP, Question, gauge


def questions() -> list[Question]:
    statement = "SELECT count(*)::int AS n FROM (SELECT FROM print_order LIMIT $1) AS counted"
    return [Question("prints", statement, (CAP,), _families)]


def _families(rows: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    yield gauge("printing_orders", f"Orders; counted up to {CAP}", rows[0]["n"])
