"""Reading a /metrics page as Prometheus does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import httpx2
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


class Page:
    """`page[name, {labels}]` is the sum of the samples that have these labels, None without any."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self.samples = [sample for family in families for sample in family.samples]

    def __getitem__(self, wanted: str | tuple[str, Mapping[str, str]]) -> float | None:
        name, labels = (wanted, {}) if isinstance(wanted, str) else wanted
        found = [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        return sum(found) if found else None

    @property
    def names(self) -> set[str]:
        return {sample.name for sample in self.samples}


async def scrape(port: int) -> Page:
    async with httpx2.AsyncClient(timeout=60) as client:
        answer = await client.get(f"http://127.0.0.1:{port}/metrics")
    assert answer.status_code == 200, answer.text
    return Page(text_string_to_metric_families(answer.text))
