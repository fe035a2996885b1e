"""Counts and histograms for the hot path: counted by one thread, the event loop's, and folded when they are scraped.

The client library locks every value and walks a histogram's buckets. Here counting is an addition, and a histogram a
search and two. A scrape, which is another thread's, reads numbers that may be a moment apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from time import time
from typing import Generic, TypeVar

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar


class Tally:
    """One count."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, amount: int = 1) -> None:
        self.value += amount


class Spread:
    """How many values fell between which bounds, and their sum."""

    __slots__ = ("bounds", "counts", "examples", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.examples: dict[int, tuple[Mapping[str, str], float, float]] = {}

    def observe(self, value: float, example: Mapping[str, str] | None = None) -> None:
        """`example`: what leads to an example of such a value; the last one of a bucket is kept."""
        at = bisect_left(self.bounds, value)
        self.counts[at] += 1
        self.total += value
        if example is not None:
            self.examples[at] = (example, value, time())

    def buckets(self) -> Iterator[tuple[str, float] | tuple[str, float, Exemplar]]:
        """Upper bound, how many values were not above it, and an example of those of this bucket alone, if any."""
        for at, count in enumerate(accumulate(self.counts)):
            bound = str(float(self.bounds[at])) if at < len(self.bounds) else "+Inf"
            example = self.examples.get(at)
            if example is None:
                yield bound, float(count)
            else:
                labels, value, when = example
                yield bound, float(count), Exemplar(dict(labels), value, when)


_Child = TypeVar("_Child", Tally, Spread)


class _Family(Collector, Generic[_Child]):
    """Children by their labels' values; beyond `most` of them (tenants name templates and queues) all are `other`."""

    most = 300

    def __init__(self, name: str, meaning: str, labels: Sequence[str]) -> None:
        self._name, self._meaning, self._labels = f"leasehold_{name}", meaning, labels
        self._children: dict[tuple[str, ...], _Child] = {}
        REGISTRY.register(self)

    def labels(self, *values: str) -> _Child:
        found = self._children.get(values)
        if found is None:
            if len(self._children) >= self.most:
                values = ("other",) * len(values)
            found = self._children.setdefault(values, self._new())
        return found

    def _new(self) -> _Child:
        raise NotImplementedError


class Tallies(_Family[Tally]):
    """A counter."""

    def _new(self) -> Tally:
        return Tally()

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._meaning, labels=self._labels)
        for values, tally in list(self._children.items()):
            family.add_metric(values, tally.value)
        yield family


class Spreads(_Family[Spread]):
    """A histogram. `bounds` ascend."""

    most = 60  # each is a line a bucket

    def __init__(self, name: str, meaning: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._bounds = bounds
        super().__init__(name, meaning, labels)

    def _new(self) -> Spread:
        return Spread(self._bounds)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._meaning, labels=self._labels)
        for values, spread in list(self._children.items()):
            family.add_metric(values, list(spread.buckets()), spread.total)
        yield family
