"""A failed generation that is retried goes on where it can, and buys again only what somebody asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import httpx2
import pytest

from leasehold.db.database import Connection
from leasehold.domain.states import JOB_TERMINAL
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.transitions import jobs
from leasehold.worker.worker import Worker
from tests.api.conftest import client_of, serving
from tests.factories import Rows
from tests.generation.conftest import PLAIN, ordered
from tests.generation.simulator.server import Simulator

SCOPES = ("generation:read", "generation:write", "jobs:read", "jobs:operate")
SECONDS = 60.0


@pytest.fixture
async def operator(generation_settings: Settings, connection: Connection) -> AsyncIterator[httpx2.AsyncClient]:
    key = await create_key(connection, tenant_id="t", client_id="anna", scopes=SCOPES)
    async with serving(generation_settings) as running, client_of(running.url, key.text) as client:
        yield client


async def submitted(rows: Rows, provider: str, prompt: str, **terms: Any) -> UUID:
    new = ordered(provider, prompt, **terms)
    await jobs.submit(rows.connection, [new])
    return new.id


async def ended(operator: httpx2.AsyncClient, job_id: UUID) -> tuple[str, str | None]:
    """The status of the ended job, and the code of its error."""
    async with asyncio.timeout(SECONDS):
        while (job := (await operator.get(f"/v1/jobs/{job_id}")).json())["status"] not in JOB_TERMINAL:
            await asyncio.sleep(0.02)
    return job["status"], (job.get("error") or {}).get("code")


async def retried(operator: httpx2.AsyncClient, job_id: UUID, **body: str) -> tuple[str, str | None]:
    answer = await operator.post(f"/v1/jobs/{job_id}/retry", json=body)
    assert answer.status_code == 202, answer.text
    return await ended(operator, job_id)


async def test_an_order_that_was_refused_without_a_code_of_the_provider_is_sent_again_by_a_retry(
    operator: httpx2.AsyncClient, worker: Worker, simulator: Simulator, rows: Rows
) -> None:
    """Somebody pays the provider meanwhile."""
    job_id = await submitted(rows, "replicate", "a cat #poor=1", model="owner/name")
    assert await ended(operator, job_id) == ("failed", "provider_payment_required")
    assert simulator.purchases("a cat #poor=1") == 0
    assert await retried(operator, job_id) == ("succeeded", None)
    assert simulator.purchases("a cat #poor=1") == 1


async def test_a_refusal_without_a_code_of_the_provider_does_not_show_the_code_of_the_refusal_before(
    operator: httpx2.AsyncClient, worker: Worker, rows: Rows
) -> None:
    job_id = await submitted(rows, PLAIN, "a cat #poor=2")
    assert await ended(operator, job_id) == ("failed", "provider_payment_required")
    await rows.connection.execute('UPDATE note SET value = \'{"fail_code": "50411"}\'')
    assert await retried(operator, job_id) == ("failed", "provider_payment_required")
    assert await rows.connection.fetchval("SELECT value ->> 'fail_code' FROM note") is None


@pytest.mark.parametrize(
    ("prompt", "code", "fail_code"),
    [("#refused", "content_refused", "50411"), ("#fail=50511", "output_refused", "50511")],
    ids=["submit", "poll"],
)
async def test_a_failure_of_our_own_does_not_show_the_providers_code_of_the_failure_before(
    operator: httpx2.AsyncClient, worker: Worker, rows: Rows, prompt: str, code: str, fail_code: str
) -> None:
    async def error() -> dict[str, Any]:
        answer = await operator.get("/v1/images/query", params={"task_id": "order-1"})
        shown: dict[str, Any] = answer.json()["data"]["error"]
        return shown

    body = {"task_id": "order-1", "provider": PLAIN, "prompt": prompt}
    ordered = await operator.post("/v1/images/generations", json=body)
    job_id = UUID(ordered.json()["data"]["job_id"])
    assert await ended(operator, job_id) == ("failed", code)
    assert (await error())["fail_code"] == fail_code
    await rows.connection.execute('UPDATE job SET params = params || \'{"credential": "of a lost key"}\'')
    assert await retried(operator, job_id) == ("failed", "credential_unreadable")
    assert (await error())["fail_code"] is None


async def test_an_order_of_unknown_outcome_does_not_show_the_providers_code_of_the_refusal_before(
    operator: httpx2.AsyncClient, worker: Worker, simulator: Simulator, rows: Rows
) -> None:
    job_id = await submitted(rows, PLAIN, "a cat #poor=1 #lost")
    assert await ended(operator, job_id) == ("failed", "provider_payment_required")
    await rows.connection.execute('UPDATE note SET value = \'{"fail_code": "50411"}\'')
    assert await retried(operator, job_id) == ("failed", "submit_outcome_unknown")
    note = await rows.connection.fetchval("SELECT value FROM note")
    assert note["asked_at"]
    assert "fail_code" not in note


async def test_a_retry_from_the_purchase_on_buys_again_and_polls_the_new_order(
    operator: httpx2.AsyncClient, worker: Worker, simulator: Simulator, rows: Rows
) -> None:
    """The first order failed at the provider, so its outcome is known."""
    job_id = await submitted(rows, PLAIN, "a cat #broken=1")
    assert await ended(operator, job_id) == ("failed", "output_refused")
    assert await retried(operator, job_id) == ("failed", "output_refused"), "the same order was polled again"
    assert simulator.purchases("a cat #broken=1") == 1
    assert await retried(operator, job_id, from_step="submit") == ("succeeded", None)
    assert simulator.purchases("a cat #broken=1") == 2


async def test_an_order_that_may_be_bought_again_is_polled_by_its_new_id(
    operator: httpx2.AsyncClient, worker: Worker, simulator: Simulator, rows: Rows
) -> None:
    job_id = await submitted(rows, PLAIN, "a cat #broken=1", resubmit=True)
    assert await ended(operator, job_id) == ("failed", "output_refused")
    assert await retried(operator, job_id, from_step="submit") == ("succeeded", None)
    assert simulator.purchases("a cat #broken=1") == 2


@pytest.mark.parametrize("body", [{}, {"from_step": "submit"}])
async def test_an_order_of_unknown_outcome_is_bought_again_only_by_who_settles_it(
    operator: httpx2.AsyncClient, worker: Worker, simulator: Simulator, rows: Rows, body: dict[str, str]
) -> None:
    job_id = await submitted(rows, PLAIN, "a cat #lost")
    assert await ended(operator, job_id) == ("failed", "submit_outcome_unknown")
    assert await retried(operator, job_id, **body) == ("failed", "submit_outcome_unknown")
    assert simulator.studio.attempts["a cat #lost"] == 1
    assert [item["job_id"] for item in (await operator.get("/v1/unsettled")).json()["items"]] == [str(job_id)]
