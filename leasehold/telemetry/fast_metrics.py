"""Counters and histograms for the hot path. A metric has a child for each combination of labels, as in
prometheus_client.

prometheus_client locks each value, and goes through a histogram's buckets one by one. Here a count is one addition, and
an observation is one search and two additions, without a lock. So only one thread may write to a child. The thread that
renews leases writes to the children with the label value `renew`, and the event loop's thread to all others. The scrape
(Prometheus's request for the metrics) runs in another thread, so its numbers may be from slightly different moments.
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


class _CounterChild:
    """A child of a counter: one number."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, amount: int = 1) -> None:
        self.value += amount


class _HistogramChild:
    """A child of a histogram: how many values are in each bucket, and the sum of the values."""

    __slots__ = ("bounds", "counts", "examples", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        #: Index of a bucket -> its latest example: labels, value and time.
        self.examples: dict[int, tuple[Mapping[str, str], float, float]] = {}

    def observe(self, value: float, example: Mapping[str, str] | None = None) -> None:
        """Add a value. `example`: labels that lead to an example of the value (a trace). Each bucket keeps only its
        latest example.
        """
        index = bisect_left(self.bounds, value)
        self.counts[index] += 1
        self.total += value
        if example is not None:
            self.examples[index] = (example, value, time())

    def buckets(self) -> Iterator[tuple[str, float] | tuple[str, float, Exemplar]]:
        """For each bucket: its upper bound, how many values are at most the bound, and the example of the bucket, if
        any.
        """
        for index, count in enumerate(accumulate(self.counts)):
            bound = str(float(self.bounds[index])) if index < len(self.bounds) else "+Inf"
            example = self.examples.get(index)
            if example is None:
                yield bound, float(count)
            else:
                labels, value, when = example
                yield bound, float(count), Exemplar(dict(labels), value, when)


_Child = TypeVar("_Child", _CounterChild, _HistogramChild)


class _Family(Collector, Generic[_Child]):
    """A metric, with its children by the values of their labels. Tenants choose the names of templates and queues, so
    the number of children is bounded. After about `at_most` children, the labels of every new combination become
    `other`.

    `words`: the labels whose values are a few fixed words, such as an outcome. These labels keep their values, so that
    an alert also sees failures of jobs whose template counts as `other`.
    """

    at_most = 300

    def __init__(self, name: str, meaning: str, labels: Sequence[str], words: Sequence[str] = ()) -> None:
        self._name, self._meaning, self._labels = f"leasehold_{name}", meaning, labels
        self._words = frozenset(words)
        self._children: dict[tuple[str, ...], _Child] = {}
        REGISTRY.register(self)

    def labels(self, *values: str) -> _Child:
        child = self._children.get(values)
        if child is None:
            if len(self._children) >= self.at_most:
                values = tuple(
                    value if label in self._words else "other"
                    for label, value in zip(self._labels, values, strict=True)
                )
            child = self._children.setdefault(values, self._new_child())
        return child

    def _new_child(self) -> _Child:
        raise NotImplementedError


class FastCounter(_Family[_CounterChild]):
    """A counter."""

    def _new_child(self) -> _CounterChild:
        return _CounterChild()

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._meaning, labels=self._labels)
        for values, child in list(self._children.items()):
            family.add_metric(values, child.value)
        yield family


class FastHistogram(_Family[_HistogramChild]):
    """A histogram. `bounds`: the upper bounds of its buckets, ascending, without infinity."""

    at_most = 60  # each child has a line for each bucket

    def __init__(
        self, name: str, meaning: str, labels: Sequence[str], bounds: Sequence[float], words: Sequence[str] = ()
    ) -> None:
        self._bounds = bounds
        super().__init__(name, meaning, labels, words)

    def _new_child(self) -> _HistogramChild:
        return _HistogramChild(self._bounds)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._meaning, labels=self._labels)
        for values, child in list(self._children.items()):
            family.add_metric(values, list(child.buckets()), child.total)
        yield family
