"""What real processes tell on their own listeners."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

import httpx2
import pytest

from grafana.alerts import OBJECTIVES, all_alerts
from leasehold.embedded.ports import free_port
from tests import pictures
from tests.scenarios.fleet import Fleet, Process
from tests.telemetry.page import scrape

PICTURE = pictures.encoded(pictures.corners(), "JPEG")


async def counted(fleet: Fleet, worker: Process, jobs: int, attempts: int) -> None:
    """Wait for as many: a worker counts after the commit by which the client sees the end of the job."""

    async def is_counted() -> bool:
        page = await scrape(worker.metrics_port)
        ended = page["leasehold_jobs_finished_total"], page["leasehold_attempts_total"]
        return all((value or 0) >= wanted for value, wanted in zip(ended, (jobs, attempts), strict=True))

    await fleet.until(is_counted, worker)


async def test_several_api_processes_and_workers_tell_each_its_own_and_their_sum_is_the_whole(fleet: Fleet) -> None:
    processes = [await fleet.worker(metrics_port=0)]
    for _ in range(2):
        processes.append(await fleet.api(metrics_port=0))
        await fleet.finished((await fleet.send(PICTURE))["media_id"])
    await counted(fleet, processes[0], jobs=2, attempts=6)
    worker, *apis = [await scrape(process.metrics_port) for process in processes]
    submitted = [api["leasehold_jobs_submitted_total", {"pipeline": "media"}] for api in apis]
    assert submitted == [1, 1]
    assert worker["leasehold_jobs_finished_total", {"pipeline": "media", "outcome": "succeeded"}] == 2
    assert worker["leasehold_attempts_total", {"pipeline": "media", "outcome": "succeeded"}] == 6
    assert worker["leasehold_task_wait_seconds_count", {"kind": "new"}] == 6
    assert worker["leasehold_job_duration_seconds_count", {"pipeline": "media"}] == 2
    assert worker["leasehold_child_memory_peak_bytes_count", {"pipeline": "media"}] == 6
    assert worker["leasehold_broker_up"] == 1
    assert worker["leasehold_database_up"] == 1
    for page, role in zip((worker, *apis), ("worker", "api", "api"), strict=True):
        assert page["leasehold_build_info", {"role": role}] == 1


async def test_a_picture_that_nothing_can_help_is_a_rejected_job_and_a_dead_letter(fleet: Fleet) -> None:
    worker = await fleet.worker(metrics_port=0)
    await fleet.api()
    broken = PICTURE[: len(PICTURE) // 2]
    await fleet.finished((await fleet.send(broken))["media_id"], "FAILED")
    await counted(fleet, worker, jobs=1, attempts=1)
    page = await scrape(worker.metrics_port)
    assert page["leasehold_jobs_finished_total", {"outcome": "rejected"}] == 1
    assert page["leasehold_job_outcomes_total", {"outcome": "rejected"}] == 1
    assert page["leasehold_job_outcomes_total"] == 1
    assert page["leasehold_dead_letters_total", {"pipeline": "media", "step": "resize"}] == 1
    assert page["leasehold_pipeline_dead_letters_total", {"pipeline": "media"}] == 1
    assert page["leasehold_pipeline_dead_letters_total"] == 1


#: `rate` or `increase`, the counter, and what it is chosen by.
_COUNTED = re.compile(r"\b(?:rate|increase)\((leasehold_\w+)(?:\{([^}]*)\})?\[")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"((?:[^"\\]|\\.)*)"')
#: What is missing of a divisor hides nothing: the share is larger.
DIVISORS = {"leasehold_http_request_duration_seconds_count"}
#: Of counters that an alert sums by a label: the values of the label.
EACH = {
    ("leasehold_pipeline_dead_letters_total", "pipeline"): {"media", "conversion", "generation", "other"},
    ("leasehold_child_crashes_total", "how"): {
        "SIGKILL",
        "SIGSEGV",
        "SIGSYS",
        "SIGXCPU",
        "out_of_memory",
        "exit",
        "other",
    },
    ("leasehold_attempts_without_child_total", "pipeline"): {"media"},
    ("leasehold_duty_errors_total", "duty"): {"exporter", "takeover", "relay", "retention", "schedules"},
    ("leasehold_units_stuck_total", "duty"): {"takeover", "schedules", "retention"},
    ("leasehold_store_request_duration_seconds_count", "operation"): {
        "put",
        "get",
        "head",
        "delete",
        "list",
        "readiness",
    },
    ("leasehold_exporter_refused_total", "question"): {"queues", "backlog", "snapshots", "database"},
    ("leasehold_task_wait_seconds_count", "queue"): {"default", "media"},
    ("leasehold_job_outcomes_total", "outcome"): {"succeeded", "failed", "expired", "rejected", "cancelled"},
}


async def test_what_an_alert_counts_is_there_at_0_before_its_first_event(fleet: Fleet) -> None:
    """PromQL's `increase()` does not count the events with which a counter appears, however many they are."""
    worker, api = await fleet.worker(metrics_port=0), await fleet.api(metrics_port=0)
    pages = [await scrape(process.metrics_port) for process in (worker, api)]
    counted = {found for alert in all_alerts() for found in _COUNTED.findall(alert.expression)}
    counted |= {found for objective in OBJECTIVES for found in _COUNTED.findall(objective.ratio)}
    assert len(counted) > 10
    for name, chosen_by in counted:
        samples = [sample for page in pages for sample in page.samples if sample.name == name]
        found = [sample for sample in samples if is_chosen(sample.labels, chosen_by)]
        assert bool(found) is (name not in DIVISORS), (name, chosen_by)
    for (name, label), values in EACH.items():
        assert name in {one for one, _ in counted}
        found_values = {sample.labels[label] for page in pages for sample in page.samples if sample.name == name}
        assert values <= found_values, (name, found_values)
    for page in pages:  # each process counts jobs that end in it
        assert page["leasehold_job_outcomes_total", {"outcome": "failed"}] == 0


def is_chosen(labels: Mapping[str, str], chosen_by: str) -> bool:
    """Whether PromQL's selector chooses a series with these labels."""
    return all(
        (re.fullmatch(value, labels[label]) is not None if "~" in relation else labels[label] == value)
        is not relation.startswith("!")
        for label, relation, value in _MATCHER.findall(chosen_by)
    )


async def test_with_metrics_off_nothing_of_the_api_listens(fleet: Fleet) -> None:
    port = free_port()
    api = await fleet.api(metrics_port=port, metrics="false")
    async with httpx2.AsyncClient(timeout=40) as client:
        with pytest.raises(httpx2.ConnectError):
            await client.get(f"http://127.0.0.1:{port}/metrics")
    api.signal(signal.SIGTERM)
    assert await api.wait() == 0


async def test_with_metrics_off_a_worker_still_answers_its_probes(fleet: Fleet) -> None:
    """Or the kubelet would restart it for ever."""
    port = free_port()
    worker = await fleet.worker(metrics_port=port, metrics="false")
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=40) as client:

        async def is_ready() -> bool:
            return (await client.get("/readyz")).status_code == 200

        await fleet.until(is_ready, worker)
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/metrics")).status_code == 404
    worker.signal(signal.SIGTERM)
    assert await worker.wait() == 0
