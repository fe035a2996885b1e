"""A provider that refuses the installation says nothing about an order that it has accepted: what is paid for is not
given up.
"""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from leasehold.db.database import Connection
from leasehold.domain.backoff import delay_after
from leasehold.pipelines.generation.pipeline import withdrawal
from leasehold.settings import Settings
from leasehold.worker.worker import Worker
from tests.factories import assert_histories
from tests.generation.conftest import PLAIN, SECONDS, TOKEN, Client
from tests.generation.simulator.server import Simulator
from tests.generation.simulator.work import Script

#: The message of the poll, and the settings that cause it.
_LOSSES: dict[str, dict[str, Any]] = {
    "There is no credential for gateway.": {"generation_credentials": {}},
    "This installation has no provider 'gateway'.": {
        "generation_http_providers": "",
        "generation_credentials": {},
        "generation_provider": PLAIN,
    },
    "The host has an address that is not public.": {"egress_allow": ""},
}


async def until_one(connection: Connection, sql: str) -> Any:
    """The value of the query, as soon as there is one."""
    async with asyncio.timeout(SECONDS):
        while (found := await connection.fetchval(sql)) is None:
            await asyncio.sleep(0.02)
    return found


@pytest.mark.parametrize("provider", [PLAIN, TOKEN])
async def test_an_order_is_polled_until_the_provider_accepts_the_credential_again(
    client: Client, worker: Worker, simulator: Simulator, provider: str
) -> None:
    task = await client.ordered("a cat #locked=2", provider=provider)
    assert (await client.ended(task))["status_text"] == "completed"
    assert simulator.studio.attempts["a cat #locked=2"] == 1


@pytest.mark.parametrize("status", [401, 402, 403])
async def test_a_result_that_the_provider_does_not_give_out_now_is_asked_for_again(
    client: Client, worker: Worker, simulator: Simulator, status: int
) -> None:
    """Fal says by one request that the order is finished, and gives the files out by another."""
    prompt = f"a cat #withheld={status}"
    task = await client.ordered(prompt, provider="fal", model="fal-ai/flux/dev")
    assert (await client.ended(task))["status_text"] == "completed"
    assert simulator.purchases(prompt) == 1


@pytest.mark.parametrize("complaint", _LOSSES)
async def test_an_order_waits_for_an_operator_who_mends_the_settings(
    client: Client, generation_settings: Settings, connection: Connection, simulator: Simulator, complaint: str
) -> None:
    async with Worker(generation_settings):
        task = await client.ordered("a cat #never")
        await until_one(connection, "SELECT 1 FROM task WHERE step = 'poll' AND status = 'waiting'")
    last_error = "SELECT value ->> 'last_error' FROM note WHERE value ? 'last_error'"
    async with Worker(generation_settings.model_copy(update=_LOSSES[complaint])):
        assert complaint in await until_one(connection, last_error)
    (bought,) = simulator.bought
    bought.script = Script("")  # from now on, it is made
    async with Worker(generation_settings):
        assert (await client.ended(task))["status_text"] == "completed"
    assert simulator.studio.attempts["a cat #never"] == 1


async def test_an_order_that_cannot_be_withdrawn_for_lack_of_access_is_withdrawn_later(
    client: Client, generation_settings: Settings, connection: Connection, simulator: Simulator
) -> None:
    async with Worker(generation_settings):
        task = await client.ordered("a cat #never")
        await until_one(connection, "SELECT 1 FROM task WHERE step = 'poll' AND status = 'waiting'")
    await connection.execute("UPDATE job SET params = params || jsonb_build_object('deadline_at', clock_timestamp())")
    async with Worker(generation_settings.model_copy(update={"generation_credentials": {}})):
        failed = await client.ended(task)
        assert failed["error"]["code"] == "deadline_exceeded"
        assert "There is no credential for gateway." in failed["metadata"]["fail_reason"]
        withdrawal: UUID = await until_one(
            connection, "SELECT job_id FROM task WHERE step = 'withdraw' AND status = 'retry'"
        )
    (bought,) = simulator.bought
    assert not bought.cancelled
    await connection.execute("UPDATE task SET available_at = now() WHERE job_id = $1", withdrawal)
    async with Worker(generation_settings):
        await until_one(connection, "SELECT 1 FROM task WHERE step = 'withdraw' AND status = 'succeeded'")
    assert simulator.bought[0].cancelled
    await assert_histories(connection)


class _Shortest(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return min(a, b)


def test_a_withdrawal_is_tried_for_as_long_as_any_order_may_take() -> None:
    """Somebody changes the key at the provider, or pays the bill, before the order is paid for in full."""
    step = withdrawal.by_name["withdraw"]
    pauses = [delay_after(failures, step.retry_ladder, _Shortest()) for failures in range(1, step.max_attempts)]
    assert sum(pauses, timedelta(0)) >= timedelta(seconds=Settings.model_fields["generation_video_seconds"].default)
    assert max(pauses) <= timedelta(minutes=30)
