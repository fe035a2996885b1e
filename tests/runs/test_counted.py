"""Whoever ends a run, it is counted once: a client that cancels it, an external worker, a run that replaces it. Each
job that a client submits is counted once, too, whatever the request was.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.fernet import Fernet
from prometheus_client import REGISTRY
from pydantic import SecretStr

from leasehold.db.database import Connection
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from tests.api.conftest import Running, client_of
from tests.runs.conftest import SCOPES, Client
from tests.telemetry.page import Page

Declare = Callable[..., Awaitable[str]]


def ended(template: str) -> dict[str, float]:
    """How many runs of the template ended with which outcome, as a scrape of this process tells."""
    return {
        sample.labels["outcome"]: sample.value
        for sample in Page(REGISTRY.collect()).samples
        if sample.name == "leasehold_jobs_finished_total" and sample.labels["pipeline"] == template
    }


def submitted(pipeline: str) -> float:
    """How many jobs of the pipeline were submitted, as a scrape of this process tells."""
    return REGISTRY.get_sample_value("leasehold_jobs_submitted_total", {"pipeline": pipeline}) or 0.0


@pytest.fixture
def runs_settings(runs_settings: Settings) -> Settings:
    changes = {
        "pipelines": "tests.runs.work:pipelines_and_webhooks",
        "egress_allow": "127.0.0.0/8",
        "sealing_keys": SecretStr(Fernet.generate_key().decode()),
    }
    return runs_settings.model_copy(update=changes)


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


async def test_a_run_whose_external_worker_comes_after_the_steps_limit(
    client: Client, outside: Declare, rows: Connection
) -> None:
    template = await outside("counted-late")
    await client.start(template)
    at, held = await _take(client, template)
    await rows.execute(
        "UPDATE task SET timeout_seconds = 1, started_at = started_at - interval '5 s', max_attempts = 1"
    )
    for _ in range(2):  # the second finds the run ended
        assert (await client.post(f"{at}/complete", **held)).status_code == 409
    assert ended(template) == {"failed": 1}


async def test_a_run_that_another_replaces(client: Client, outside: Declare) -> None:
    template = await outside("counted-replaced", concurrency_policy="replace_same_scope")
    for _ in range(2):
        await client.start(template)
    assert ended(template) == {"cancelled": 1}


async def test_runs_that_are_started_again_by_hand_or_in_bulk(client: Client, outside: Declare) -> None:
    template = await outside("counted-started")
    run = await client.start(template)
    schedule = (await client.post("/v1/schedules", template=template, cron="0 0 * * *")).json()["id"]
    noon = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0) - timedelta(days=1)
    past = {"start": (noon - timedelta(days=3)).isoformat(), "end": noon.isoformat()}
    for path, body, counted in (
        (f"/v1/runs/{run}/rerun", {}, 1),
        (f"/v1/schedules/{schedule}/run-now", {}, 1),
        (f"/v1/schedules/{schedule}/backfill", past, 3),
        (f"/v1/schedules/{schedule}/backfill", past, 0),  # each tick has its run
        ("/v1/runs/batch", {"template": template, "runs": [{}, {}]}, 2),
    ):
        before = submitted(template)
        # The repeated request gets the first answer, and submits nothing.
        for _ in range(2):
            answer = await client.http.post(path, json=body, headers={"Idempotency-Key": f"{path} {counted}"})
            assert answer.status_code == 202, answer.text
        assert submitted(template) - before == counted


async def test_deliveries_that_are_tested_or_repeated(client: Client) -> None:
    webhook = (await client.post("/v1/webhooks", url="https://127.0.0.1/")).json()["id"]
    before = submitted("webhook")
    answer = await client.post(f"/v1/webhooks/{webhook}/test")
    assert answer.status_code == 202, answer.text
    assert submitted("webhook") - before == 1
    delivery = answer.json()["id"]
    for _ in range(2):
        headers = {"Idempotency-Key": "again"}
        answer = await client.http.post(f"/v1/webhooks/{webhook}/deliveries/{delivery}/redeliver", headers=headers)
        assert answer.status_code == 202, answer.text
    assert submitted("webhook") - before == 2


async def test_bulk_operations(running: Running, rows: Connection) -> None:
    key = await create_key(rows, tenant_id="acme", client_id="bulk", scopes=(*SCOPES, "jobs:operate", "jobs:read"))
    async with client_of(running.url, key.text) as http:
        before = submitted("bulk_operation")
        for _ in range(2):
            body, headers = {"action": "cancel", "filter": "kind:run"}, {"Idempotency-Key": "once"}
            answer = await http.post("/v1/operations", json=body, headers=headers)
            assert answer.status_code == 202, answer.text
        assert submitted("bulk_operation") - before == 1
