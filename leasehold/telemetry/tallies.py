"""Counters and histograms for the hot path. Each child is used by one thread; a scrape adds the counts up.

The client library locks every value and walks a histogram's buckets. Here a count is an addition, and an observation a
search and two additions, without a lock. So two threads must not count into one child. The event loop's thread uses all
children except `renew`, into which the heartbeat's thread counts. The scrape runs in another thread: its numbers may be
from slightly different moments.
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
    """One value of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, amount: int = 1) -> None:
        self.value += amount


class Spread:
    """One value of a histogram: counts by bucket, and the sum of the values."""

    __slots__ = ("bounds", "counts", "examples", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.examples: dict[int, tuple[Mapping[str, str], float, float]] = {}

    def observe(self, value: float, example: Mapping[str, str] | None = None) -> None:
        """`example`: labels that lead to an example of the value (a trace); each bucket keeps the last one."""
        at = bisect_left(self.bounds, value)
        self.counts[at] += 1
        self.total += value
        if example is not None:
            self.examples[at] = (example, value, time())

    def buckets(self) -> Iterator[tuple[str, float] | tuple[str, float, Exemplar]]:
        """For each bucket: its upper bound, how many values are not above it, and its own example, if any."""
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
    """Values by labels. `at_most` combinations of labels are kept; further ones count as `other`, because tenants
    choose the names of templates and queues.
    """

    at_most = 300

    def __init__(self, name: str, meaning: str, labels: Sequence[str]) -> None:
        self._name, self._meaning, self._labels = f"leasehold_{name}", meaning, labels
        self._children: dict[tuple[str, ...], _Child] = {}
        REGISTRY.register(self)

    def labels(self, *values: str) -> _Child:
        child = self._children.get(values)
        if child is None:
            if len(self._children) >= self.at_most:
                values = ("other",) * len(values)
            child = self._children.setdefault(values, self._new())
        return child

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

    at_most = 60  # each child has a line for each bucket

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
