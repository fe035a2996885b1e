"""Whoever ends a run, it is counted once: a client that cancels it, an external worker, a run that replaces it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import REGISTRY

from tests.runs.conftest import Client
from tests.telemetry.page import Page

Declare = Callable[..., Awaitable[str]]


def ended(template: str) -> dict[str, float]:
    """How many runs of the template ended with which outcome, as a scrape of this process tells."""
    return {
        sample.labels["outcome"]: sample.value
        for sample in Page(REGISTRY.collect()).samples
        if sample.name == "leasehold_jobs_finished_total" and sample.labels["pipeline"] == template
    }


@pytest.fixture
def outside(client: Client) -> Declare:
    async def declare(template: str, **terms: object) -> str:
        steps = [{"id": "only", "queue": template}]
        answer = await client.post("/v1/templates", type=template, steps=steps, **terms)
        assert answer.status_code == 201, answer.text
        return template

    return declare


async def _take(client: Client, template: str) -> tuple[str, dict[str, object]]:
    (task,) = (await client.post("/v1/external/claim", worker_id="w", queues=[template], wait=5)).json()["tasks"]
    return f"/v1/external/tasks/{task['task_id']}", {"worker_id": "w", "epoch": task["epoch"]}


async def test_a_run_that_is_cancelled_before_it_starts(client: Client, outside: Declare) -> None:
    run = await client.start(await outside("counted-cancel"))
    for _ in range(2):  # the second changes nothing
        await client.post(f"/v1/runs/{run}/cancel")
    assert ended("counted-cancel") == {"cancelled": 1}


async def test_runs_that_an_external_worker_ends(client: Client, outside: Declare) -> None:
    template = await outside("counted-outside")
    for verb, body in (
        ("complete", {}),
        ("fail", {"code": "broken", "message": "no", "retryable": False}),
    ):
        await client.start(template)
        at, held = await _take(client, template)
        assert (await client.post(f"{at}/{verb}", **held, **body)).status_code == 200
    run = await client.start(template)
    at, held = await _take(client, template)
    await client.post(f"/v1/runs/{run}/cancel")
    assert (await client.post(f"{at}/acknowledge-cancel", **held)).status_code == 200
    assert ended(template) == {"succeeded": 1, "rejected": 1, "cancelled": 1}


async def test_a_run_that_another_replaces(client: Client, outside: Declare) -> None:
    template = await outside("counted-replaced", concurrency_policy="replace_same_scope")
    for _ in range(2):
        await client.start(template)
    assert ended(template) == {"cancelled": 1}
