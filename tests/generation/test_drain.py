"""A worker that drains gives an order the time to be answered: an answer that nobody records is lost."""

from __future__ import annotations

import asyncio

from leasehold.domain.pipeline import Step
from leasehold.pipelines.generation.pipeline import generation
from leasehold.settings import Settings
from leasehold.worker.attempts.runner import LONGEST_TO_FINISH_SECONDS, _may_finish
from leasehold.worker.worker import Worker
from tests.factories import Rows, assert_histories
from tests.generation.conftest import SECONDS, Client
from tests.generation.simulator.server import Simulator


async def test_an_order_that_is_answered_after_the_time_to_drain_is_bought_once_and_recorded(
    client: Client, generation_settings: Settings, simulator: Simulator, rows: Rows
) -> None:
    """Ark answers an order of images when they are finished."""
    prompt = "a cat #slow=4"
    hasty = generation_settings.model_copy(update={"drain_seconds": 0.5})
    async with Worker(hasty) as worker, asyncio.timeout(SECONDS):
        task = await client.ordered(prompt, provider="ark", model="m")
        while not simulator.studio.attempts[prompt]:
            await asyncio.sleep(0.02)
        await worker.drain()
    assert await rows.connection.fetchval("SELECT status FROM task WHERE step = 'submit'") == "succeeded"
    async with Worker(generation_settings):
        assert (await client.ended(task))["status_text"] == "completed"
    assert simulator.studio.attempts[prompt] == 1
    await assert_histories(rows.connection)


def test_a_drain_waits_for_an_order_but_for_no_step_that_is_long_or_may_be_stopped() -> None:
    order = generation.by_name["submit"]
    assert _may_finish(order, order.timeout.total_seconds())
    assert not _may_finish(Step("long", cancelable=False), LONGEST_TO_FINISH_SECONDS + 0.1)
    assert not _may_finish(Step("short"), 1.0)
