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
from leasehold.transitions import claims, jobs, settlements
from leasehold.transitions.settlements import Completion
from leasehold.worker.worker import Worker
from tests.api.conftest import client_of, serving
from tests.api.media_api import problem
from tests.factories import Rows, assert_histories
from tests.generation.conftest import PLAIN, TOKEN, ordered
from tests.generation.simulator.server import Simulator
from tests.generation.simulator.work import Script

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


async def test_the_result_of_a_retry_is_found_although_somebody_has_consumed_the_failure(
    operator: httpx2.AsyncClient, worker: Worker
) -> None:
    async def status(**query: str) -> str:
        answer = await operator.get("/v1/images/query", params={"task_id": "order-1", **query})
        text: str = answer.json()["data"]["status_text"]
        return text

    body = {"task_id": "order-1", "provider": PLAIN, "prompt": "a cat #poor=1"}
    job_id = UUID((await operator.post("/v1/images/generations", json=body)).json()["data"]["job_id"])
    assert await ended(operator, job_id) == ("failed", "provider_payment_required")
    assert [await status(consume="true"), await status()] == ["failed", "unknown"]
    assert await retried(operator, job_id) == ("succeeded", None)
    assert await status() == "completed"


@pytest.mark.parametrize(
    ("prompt", "body", "deadline"),
    [
        ("a cat #poor=1", {}, "(params ->> 'deadline_at')::timestamptz + interval '5 minutes'"),
        ("a cat #file=html", {"from_step": "poll"}, "(params ->> 'deadline_at')::timestamptz + interval '5 minutes'"),
        ("a cat #file=html", {}, "now() + interval '4 hours'"),
    ],
)
async def test_a_retried_job_has_the_time_that_the_settings_now_give_it_and_made_files_the_time_to_be_stored(
    generation_settings: Settings,
    connection: Connection,
    simulator: Simulator,
    prompt: str,
    body: dict[str, str],
    deadline: str,
) -> None:
    key = await create_key(connection, tenant_id="t", client_id="anna", scopes=SCOPES)
    short, longer = (generation_settings.model_copy(update={"generation_image_seconds": n}) for n in (60, 600))
    async with serving(short) as running, client_of(running.url, key.text) as client:
        answer = await client.post("/v1/images/generations", json={"provider": PLAIN, "prompt": prompt})
        job_id = UUID(answer.json()["data"]["job_id"])
        async with Worker(generation_settings):
            assert (await ended(client, job_id))[0] == "failed"
    async with serving(longer) as running, client_of(running.url, key.text) as client:
        assert (await client.post(f"/v1/jobs/{job_id}/retry", json=body)).status_code == 202
    apart = f"SELECT abs(extract(epoch FROM deadline_at - ({deadline}))) FROM job WHERE id = $1"
    assert await connection.fetchval(apart, job_id) < (SECONDS if "now()" in deadline else 0.001)
    left = "SELECT extract(epoch FROM (params ->> 'deadline_at')::timestamptz - now()) FROM job WHERE id = $1"
    assert 600 - SECONDS < await connection.fetchval(left, job_id) <= 600


async def test_a_refusal_without_a_code_of_the_provider_does_not_show_the_code_of_the_refusal_before(
    operator: httpx2.AsyncClient, worker: Worker, rows: Rows
) -> None:
    job_id = await submitted(rows, PLAIN, "a cat #poor=2")
    assert await ended(operator, job_id) == ("failed", "provider_payment_required")
    await rows.connection.execute('UPDATE note SET value = \'{"fail_code": "50411"}\'')
    assert await retried(operator, job_id) == ("failed", "provider_payment_required")
    assert await rows.connection.fetchval("SELECT value ->> 'fail_code' FROM note") is None


@pytest.mark.parametrize(
    ("prompt", "code", "fail_code", "own_code"),
    [
        ("#refused", "content_refused", "50411", "credential_unreadable"),
        ("#fail=50511", "output_refused", "50511", "deadline_exceeded"),
    ],
    ids=["submit", "poll"],
)
async def test_a_failure_of_our_own_does_not_show_the_providers_code_of_the_failure_before(
    operator: httpx2.AsyncClient, worker: Worker, rows: Rows, prompt: str, code: str, fail_code: str, own_code: str
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
    assert (await operator.post(f"/v1/jobs/{job_id}/retry")).status_code == 202
    if own_code == "deadline_exceeded":  # the retry has moved the deadline
        late = "UPDATE job SET params = params || jsonb_build_object('deadline_at', clock_timestamp())"
        await rows.connection.execute(late)
        await rows.connection.execute("UPDATE task SET available_at = now() WHERE status = 'waiting'")
    assert await ended(operator, job_id) == ("failed", own_code)
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


async def past_its_deadline(
    operator: httpx2.AsyncClient, rows: Rows, settings: Settings, prompt: str
) -> tuple[UUID, UUID]:
    """A generation that failed at its deadline, and its withdrawal. The provider is too busy to withdraw the order now:
    no worker runs, and the next attempt is far away.
    """
    async with Worker(settings), asyncio.timeout(SECONDS):
        body = {"provider": TOKEN, "prompt": f"{prompt} #never #wait=3600"}
        ordered = await operator.post("/v1/images/generations", json=body)
        job_id = UUID(ordered.json()["data"]["job_id"])
        while await rows.connection.fetchval("SELECT status FROM task WHERE step = 'poll'") != "waiting":
            await asyncio.sleep(0.02)
        late = "UPDATE job SET params = params || jsonb_build_object('deadline_at', clock_timestamp()) WHERE id = $1"
        await rows.connection.execute(late, job_id)
        assert await ended(operator, job_id) == ("failed", "deadline_exceeded")
        withdrawn = "SELECT job_id FROM task WHERE step = 'withdraw' AND status = 'retry'"
        while (withdrawal_id := await rows.connection.fetchval(withdrawn)) is None:
            await asyncio.sleep(0.02)
    return job_id, withdrawal_id


async def test_a_retry_at_the_deadline_goes_on_with_the_order_that_was_to_be_withdrawn(
    operator: httpx2.AsyncClient, generation_settings: Settings, simulator: Simulator, rows: Rows
) -> None:
    job_id, withdrawal_id = await past_its_deadline(operator, rows, generation_settings, "a cat")
    assert (await operator.post(f"/v1/jobs/{job_id}/retry")).status_code == 202
    assert (await rows.job(withdrawal_id))["status"] == "cancelled"
    await assert_histories(rows.connection)
    (bought,) = simulator.bought
    bought.script = Script("")  # from now on, it is made
    async with Worker(generation_settings):
        assert await ended(operator, job_id) == ("succeeded", None)
    assert not bought.cancelled
    assert simulator.studio.attempts[bought.prompt] == 1


@pytest.mark.parametrize("body", [{}, {"from_step": "poll"}])
async def test_an_order_that_a_worker_withdraws_just_now_is_not_gone_on_with(
    operator: httpx2.AsyncClient, generation_settings: Settings, rows: Rows, body: dict[str, str]
) -> None:
    job_id, withdrawal_id = await past_its_deadline(operator, rows, generation_settings, "a cat")
    await rows.connection.execute("UPDATE task SET available_at = now() WHERE step = 'withdraw'")
    (claimed,) = await claims.claim_due(rows.connection, rows.terms, ["generation"], 10)
    assert claimed.job_id == withdrawal_id
    refused = await operator.post(f"/v1/jobs/{job_id}/retry", json=body)
    problem(refused, 409, "order_being_withdrawn")
    assert int(refused.headers["retry-after"]) > 0
    assert (await rows.job(job_id))["status"] == "failed"
    assert await rows.statuses(withdrawal_id) == {"withdraw": "running"}
    await settlements.complete(rows.connection, [Completion(claimed.lease, value={"stopped": True})])
    assert (await operator.post(f"/v1/jobs/{job_id}/retry", json=body)).status_code == 202


async def test_a_retry_waits_for_nobody_who_holds_the_withdrawal(
    operator: httpx2.AsyncClient, generation_settings: Settings, rows: Rows
) -> None:
    """Whoever holds it may wait for the generation, which the retry holds."""
    job_id, withdrawal_id = await past_its_deadline(operator, rows, generation_settings, "a cat")
    async with rows.connection.transaction():
        await rows.connection.execute("SELECT FROM job WHERE id = $1 FOR UPDATE", withdrawal_id)
        problem(await operator.post(f"/v1/jobs/{job_id}/retry"), 409, "order_being_withdrawn")
    assert (await operator.post(f"/v1/jobs/{job_id}/retry")).status_code == 202


async def test_nothing_is_bought_again_until_the_first_order_is_withdrawn(
    operator: httpx2.AsyncClient, generation_settings: Settings, rows: Rows
) -> None:
    """Afterwards nobody would know the first order."""
    job_id, withdrawal_id = await past_its_deadline(operator, rows, generation_settings, "a cat")
    again = {"from_step": "submit"}
    problem(await operator.post(f"/v1/jobs/{job_id}/retry", json=again), 409, "order_being_withdrawn")
    assert (await rows.job(job_id))["status"] == "failed"
    assert await rows.statuses(withdrawal_id) == {"withdraw": "retry"}
    assert (await operator.post(f"/v1/jobs/{withdrawal_id}/cancel")).status_code == 202
    assert (await operator.post(f"/v1/jobs/{job_id}/retry", json=again)).status_code == 202


@pytest.mark.parametrize("body", [{}, {"from_step": "submit"}])
async def test_an_order_of_unknown_outcome_is_bought_again_only_by_who_settles_it(
    operator: httpx2.AsyncClient, worker: Worker, simulator: Simulator, rows: Rows, body: dict[str, str]
) -> None:
    job_id = await submitted(rows, PLAIN, "a cat #lost")
    assert await ended(operator, job_id) == ("failed", "submit_outcome_unknown")
    assert await retried(operator, job_id, **body) == ("failed", "submit_outcome_unknown")
    assert simulator.studio.attempts["a cat #lost"] == 1
    assert [item["job_id"] for item in (await operator.get("/v1/unsettled")).json()["items"]] == [str(job_id)]
