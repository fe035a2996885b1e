"""What is counted on the hot path is told as Prometheus expects it."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY, Histogram
from prometheus_client.metrics_core import Metric

from leasehold.exporter.jobs import JOBS
from leasehold.telemetry.fast_metrics import FastCounter, FastHistogram
from leasehold.worker.metrics import ADOPTED, ATTEMPTS, WAIT

BOUNDS = (0.1, 1.0, 10.0)
VALUES = (0.05, 0.1, 0.5, 10.0, 11.0)


def samples(metric: Metric) -> dict[tuple[str, str | None], float]:
    return {(s.name.rpartition("_")[2], s.labels.get("le")): s.value for s in metric.samples}


def test_a_histogram_tells_what_the_client_librarys_own_would() -> None:
    ours, theirs = (
        FastHistogram("own_seconds", "m", ["x"], BOUNDS),
        Histogram("their_seconds", "m", ["x"], buckets=BOUNDS),
    )
    for value in VALUES:
        ours.labels("a").observe(value)
        theirs.labels("a").observe(value)
    (told,), (expected,) = list(ours.collect()), list(theirs.collect())
    known = {key: value for key, value in samples(expected).items() if key[0] != "created"}
    assert samples(told) == pytest.approx(known)
    for one in (ours, theirs):
        REGISTRY.unregister(one)


def test_the_last_example_of_a_bucket_is_told_with_it() -> None:
    histogram = FastHistogram("example_seconds", "m", [], BOUNDS)
    histogram.labels().observe(0.5, {"trace_id": "first"})
    histogram.labels().observe(0.6, {"trace_id": "second"})
    (metric,) = histogram.collect()
    assert [s.exemplar.labels for s in metric.samples if s.exemplar] == [{"trace_id": "second"}]
    REGISTRY.unregister(histogram)


def test_a_counter_adds_up_by_its_labels() -> None:
    counter = FastCounter("own_total", "m", ["x"])
    for word, amount in (("a", 1), ("b", 2), ("a", 3)):
        counter.labels(word).inc(amount)
    (metric,) = counter.collect()
    assert {(s.name, s.labels["x"]): s.value for s in metric.samples} == {
        ("leasehold_own_total", "a"): 4,
        ("leasehold_own_total", "b"): 2,
    }
    REGISTRY.unregister(counter)


def test_more_words_than_a_page_should_hold_become_one() -> None:
    """Tenants name their templates: a page must not grow with them."""
    histogram = FastHistogram("crowded_seconds", "m", ["x"], BOUNDS)
    for number in range(2 * FastHistogram.at_most):
        histogram.labels(f"word-{number}").observe(0.5)
    (metric,) = histogram.collect()
    counts = {s.labels["x"]: s.value for s in metric.samples if s.name.endswith("_count")}
    assert len(counts) == FastHistogram.at_most + 1
    assert counts["other"] == FastHistogram.at_most
    REGISTRY.unregister(histogram)


def test_a_fixed_word_is_told_also_beside_more_names_than_a_page_should_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FastCounter, "at_most", 3)
    counter = FastCounter("crowded_total", "m", ["name", "outcome"], words=["outcome"])
    for name in "abcde":
        counter.labels(name, "succeeded").inc()
    for name in "abc":
        counter.labels(name, "failed").inc()
    (metric,) = counter.collect()
    assert {(s.labels["name"], s.labels["outcome"]): s.value for s in metric.samples} == {
        **{(name, "succeeded"): 1 for name in "abc"},
        ("other", "succeeded"): 2,
        ("other", "failed"): 3,
    }
    REGISTRY.unregister(counter)


def test_the_alerts_see_what_happens_beside_more_names_than_a_page_should_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """`outcome` and `kind` are what the alerts and boards choose by: the names of tenants never hide them."""
    for metric, values, label in (
        (JOBS, ("template", "failed"), "outcome"),
        (ATTEMPTS, ("template", "step", "failed"), "outcome"),
        (WAIT, ("queue", "new"), "kind"),
    ):
        monkeypatch.setattr(metric, "_children", {})
        monkeypatch.setattr(metric, "at_most", 0)
        metric.labels(*values)
        (family,) = metric.collect()
        assert {sample.labels[label] for sample in family.samples} == {values[-1]}
        assert {v for s in family.samples for name, v in s.labels.items() if name not in (label, "le")} == {"other"}


def test_adopted_outputs_of_many_templates_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FastCounter, "at_most", 1)
    monkeypatch.setattr(ADOPTED, "_children", {})
    for template in ("first", "second", "third"):
        ADOPTED.labels(template, "resize").inc()
    (family,) = ADOPTED.collect()
    assert {sample.labels["pipeline"]: sample.value for sample in family.samples} == {"first": 1, "other": 2}
