"""Metrics of this process's own connections to the broker. They show whether the connections are up, and how often they
were opened. They also count the messages that were not valid hints (messages about due tasks), and the hints for which
the broker had no queue.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from leasehold.broker.base import Broker


class BrokerMetrics(Collector):
    """At each scrape, reads the counts that the object `broker` of this process keeps."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def describe(self) -> list[Metric]:
        return []  # without this method, the registry would call `collect` when it registers the collector

    def collect(self) -> Iterator[Metric]:
        counts = self._broker.describe()
        up = GaugeMetricFamily(
            "leasehold_broker_up",
            "1 while the process can send hints and, if it is a worker, receive them",
            labels=["broker"],
        )
        up.add_metric([self._broker.name], float(counts["connected"]))
        yield up
        connects = CounterMetricFamily(
            "leasehold_broker_connects", "Connections to the broker. Each reconnection counts, too", labels=["end"]
        )
        for end, count in counts["connects"].items():  # "publish" and "consume"
            connects.add_metric([end], count)
        yield connects
        garbage = CounterMetricFamily("leasehold_broker_garbage", "Messages that are not valid hints", labels=["kind"])
        for kind, count in counts.get("garbage", {}).items():
            garbage.add_metric([kind], count)
        yield garbage
        yield CounterMetricFamily(
            "leasehold_broker_unroutable",
            "Hints for which the broker had no queue. The process then declares the queue again",
            counts.get("unroutable", 0),
        )
