"""Makes metrics, and serves them over HTTP (`expose`). The name of each metric begins with `leasehold_`, the number of
values of each label is bounded, and the setting `metrics` can switch all metrics off.

The values of a label are names (pipelines, steps, queues, codes) or a few fixed words, and never ids. Two kinds of
names need a bound. `Bounded` bounds the number of names that handlers choose. Tenants choose the names of templates and
queues; the metrics with such labels are fast metrics, which are bounded themselves (fast_metrics.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NamedTuple

import structlog
from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics import MetricWrapperBase

from leasehold.settings import Settings
from leasehold.telemetry.fast_metrics import FastCounter, FastHistogram
from leasehold.telemetry.listener import Health, listen

log = structlog.get_logger(__name__)

#: The upper bounds of a histogram's buckets, in seconds. QUICK is for quick operations, SLOW for work and waits.
QUICK = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SLOW = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200, 86_400)
#: The most values of a label whose values handlers choose. Further values become `other`.
MAX_LABEL_VALUES = 100

# All metrics that this module has made; `switch_off` needs them.
_metrics: list[MetricWrapperBase | FastCounter | FastHistogram] = []


class Described(NamedTuple):
    """A metric as docs/reference/metrics.md lists it. `kind`: counter, gauge or histogram."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


#: Every metric of the modules that are loaded.
described: list[Described] = []


def _describe(name: str, kind: str, labels: Sequence[str], meaning: str) -> str:
    # Add the metric to `described`. Returns its full name.
    full_name = f"leasehold_{name}"
    described.append(Described(full_name, kind, tuple(labels), meaning))
    return full_name


def counter(name: str, meaning: str, labels: Sequence[str] = ()) -> Counter:
    metric = Counter(_describe(name, "counter", labels, meaning), meaning, labels)
    _metrics.append(metric)
    return metric


def gauge(name: str, meaning: str, labels: Sequence[str] = ()) -> Gauge:
    metric = Gauge(_describe(name, "gauge", labels, meaning), meaning, labels)
    _metrics.append(metric)
    return metric


def histogram(name: str, meaning: str, labels: Sequence[str] = (), *, buckets: Sequence[float] = SLOW) -> Histogram:
    metric = Histogram(_describe(name, "histogram", labels, meaning), meaning, labels, buckets=buckets)
    _metrics.append(metric)
    return metric


def fast_counter(name: str, meaning: str, labels: Sequence[str], words: Sequence[str] = ()) -> FastCounter:
    """Make a counter for the hot path. It costs less per increment than prometheus_client's (see fast_metrics.py).
    `words`: the labels whose values are a few fixed words. When a metric has too many combinations of values, these
    labels keep their values, and all other labels get the value `other`.
    """
    _describe(name, "counter", labels, meaning)
    metric = FastCounter(name, meaning, labels, words)  # the short name: a FastCounter adds `leasehold_` itself
    _metrics.append(metric)
    return metric


def fast_histogram(
    name: str, meaning: str, labels: Sequence[str], bounds: Sequence[float] = SLOW, words: Sequence[str] = ()
) -> FastHistogram:
    """Make a histogram of seconds for the hot path. It costs less per observation than prometheus_client's (see
    fast_metrics.py). `words`: as for `fast_counter`.
    """
    _describe(name, "histogram", labels, meaning)
    metric = FastHistogram(name, meaning, labels, bounds, words)
    _metrics.append(metric)
    return metric


class Bounded:
    """Returns each of the first `at_most` different words unchanged, and `other` for every further word."""

    def __init__(self, at_most: int = MAX_LABEL_VALUES) -> None:
        self._at_most = at_most
        self._words: set[str] = set()

    def __call__(self, word: str) -> str:
        if word not in self._words:
            if len(self._words) >= self._at_most:
                return "other"
            self._words.add(word)
        return word


_BUILD = gauge(
    "build_info",
    "Always 1. The labels name the role, the version and the Python of the process",
    ["role", "version", "python"],
)


def expose(settings: Settings, role: str, health: Health | None = None) -> int | None:
    """Record the build, and serve /metrics and the probes on the port `metrics_port` if it is set. If metrics are off,
    only the probes are served. The main function of a process calls `expose` once.

    `health`: what the probes of a worker read; None: the process has no probes here. Returns the port, or None if no
    port is set or there is nothing to serve. Raises OSError when the address is not free.
    """
    if not settings.metrics:
        switch_off()
        if health is None or settings.metrics_port is None:
            return None
        port = listen(settings.metrics_host, settings.metrics_port, health, has_metrics=False)
        log.info("probes are served", address=f"http://{settings.metrics_host}:{port}/readyz")
        return port
    # `_created` samples would be a third of all lines, and nothing reads them.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    _BUILD.labels(role, version("leasehold"), sys.version.split()[0]).set(1)
    if settings.metrics_port is None:
        return None
    port = listen(settings.metrics_host, settings.metrics_port, health)
    log.info("metrics are served", address=f"http://{settings.metrics_host}:{port}/metrics")
    return port


class _NoMetric:
    """The methods of a metric that is switched off, and of its children. They do nothing."""

    def labels(self, *_values: str) -> _NoMetric:
        return self

    def inc(self, _amount: float = 1, _exemplar: object = None) -> None:
        return

    dec = set = inc

    def observe(self, _value: float, _exemplar: object = None) -> None:
        return

    def set_function(self, _function: object) -> None:
        return


def switch_off() -> None:
    """Let all metrics of the platform do nothing. Nothing switches them on again, because counts would have a gap."""
    no_metric = _NoMetric()
    for metric in _metrics:
        for name in ("labels", "inc", "dec", "set", "observe", "set_function"):
            setattr(metric, name, getattr(no_metric, name))
