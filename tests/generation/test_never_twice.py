"""Nothing is bought twice: whoever dies, and whatever answer is lost."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from leasehold.pipelines.generation.pipeline import BACKSTOP, generation
from leasehold.settings import Settings
from leasehold.transitions import jobs
from leasehold.worker.worker import Worker
from tests.factories import Rows
from tests.generation.conftest import PLAIN, TOKEN, Client, buying, ordered
from tests.generation.simulator.server import Simulator
from tests.scenarios.fleet import Fleet, Process, open_fleet

PATIENCE = 90.0


@pytest.fixture
async def fleet(settings: Settings, tmp_path: Path) -> AsyncIterator[Fleet]:
    opened = await open_fleet(settings, tmp_path)
    yield opened
    await opened.close()
    await opened.rows.connection.close()


async def ended(fleet: Fleet, job_id: UUID) -> dict[str, Any]:
    async def over() -> bool:
        return (await fleet.rows.job(job_id))["finished_at"] is not None

    await fleet.until(over)
    return await fleet.rows.job(job_id)


@pytest.mark.parametrize(
    ("point", "provider", "resubmit", "bought", "outcome"),
    [
        ("after_intent", TOKEN, False, 1, None),
        ("after_intent", PLAIN, False, 0, "submit_outcome_unknown"),
        ("after_intent", PLAIN, True, 1, None),
        ("after_purchase", TOKEN, False, 1, None),
        ("after_purchase", PLAIN, False, 1, "submit_outcome_unknown"),
    ],
)
async def test_a_worker_killed_around_the_purchase_leaves_a_known_state(
    fleet: Fleet, simulator: Simulator, point: str, provider: str, resubmit: bool, bought: int, outcome: str | None
) -> None:  # fmt: skip
    new = ordered(provider, "a cat", resubmit=resubmit)
    await jobs.submit(fleet.rows.connection, [new])
    victim = await fleet.start("worker", failpoints=f"{point}:kill", **buying(simulator))
    assert await victim.wait() == -signal.SIGKILL
    await fleet.worker(**buying(simulator))
    job = await ended(fleet, new.id)
    assert (job["error"] or {}).get("code") == outcome
    assert simulator.purchases("a cat") == bought


async def test_who_may_have_ordered_is_told_so_and_not_that_the_credential_is_missing(
    fleet: Fleet, simulator: Simulator
) -> None:
    """Whoever reads another code orders again, and buys twice."""
    new = ordered(PLAIN, "a cat")
    await jobs.submit(fleet.rows.connection, [new])
    victim = await fleet.start("worker", failpoints="after_purchase:kill", **buying(simulator))
    assert await victim.wait() == -signal.SIGKILL
    await fleet.worker(**buying(simulator) | {"generation_credentials": "{}"})
    error = (await ended(fleet, new.id))["error"]
    assert error["code"] == "submit_outcome_unknown"
    assert "There is no credential for jimeng." in error["message"]


def test_an_order_that_is_sent_just_before_the_deadline_is_answered_before_the_job_expires() -> None:
    """The platform ends the job then, and refuses the answer: the order would be one that nobody knows."""
    assert generation.by_name["submit"].timeout + timedelta(minutes=1) <= BACKSTOP


@pytest.mark.timeout(600)
async def test_a_thousand_generations_under_random_kills_are_each_bought_once(
    fleet: Fleet, simulator: Simulator
) -> None:
    """A worker dies eight times, each in the middle of buying an eighth."""
    chance = random.Random(20261121)
    workers = [await fleet.worker(**buying(simulator)) for _ in range(2)]
    async with asyncio.timeout(4 * PATIENCE):  # ten workers start, one after the other
        for begun in range(0, 1000, 125):
            lot = [ordered(TOKEN, f"picture {begun + n} #slow=0.02", poll_seconds=0.5) for n in range(125)]
            await jobs.submit(fleet.rows.connection, lot)
            enough = begun + chance.randrange(1, 100)
            while len(simulator.bought) < enough:
                await asyncio.sleep(0.002)
            workers.append(await _replaced(fleet, workers.pop(chance.randrange(2)), simulator))
        await fleet.until(partial(_finished, fleet))
    outcomes = Counter(row["status"] for row in await fleet.rows.connection.fetch("SELECT status FROM job"))
    assert outcomes == {"succeeded": 1000}
    bought = Counter(one.prompt for one in simulator.bought)
    assert len(bought) == 1000
    assert set(bought.values()) == {1}
    assert sum(simulator.studio.attempts.values()) >= 1000


async def _finished(fleet: Fleet) -> bool:
    left: int = await fleet.rows.connection.fetchval("SELECT count(*) FROM job WHERE finished_at IS NULL")
    return not left


async def _replaced(fleet: Fleet, victim: Process, simulator: Simulator) -> Process:
    await victim.kill()
    return await fleet.worker(**buying(simulator))  # one that has begun nothing would die for nothing


async def test_a_lost_answer_is_asked_for_again_where_that_buys_nothing(
    client: Client, worker: Worker, simulator: Simulator
) -> None:
    """The first answer after five seconds of the ladder."""
    done = await client.ended(await client.ordered("a cat #lost"))
    assert done["status"] == -1
    assert simulator.purchases("a cat #lost") == 1
    assert simulator.studio.attempts["a cat #lost"] == 2


@pytest.mark.parametrize(
    ("prompt", "change"),
    [
        ("a cat #down=9", "UPDATE task SET errors = 3 WHERE step = 'submit'"),
        ("a cat #lost", "UPDATE job SET params = params || jsonb_build_object('deadline_at', clock_timestamp())"),
        ("a cat #lost #then=401", "SELECT 1"),
        ("a cat #lost #then=400", "SELECT 1"),
        ("a cat #lost #then=429", "SELECT 1"),
    ],
    ids=["attempts", "deadline", "no access", "rejected", "busy"],
)
async def test_what_may_have_been_bought_before_is_not_forgotten_when_the_last_attempt_buys_nothing(
    client: Client, worker: Worker, rows: Rows, simulator: Simulator, prompt: str, change: str
) -> None:
    """Of a provider that takes a token: the step orders again, and in the end gives up."""
    task = await client.ordered(prompt, provider=TOKEN)
    async with asyncio.timeout(PATIENCE):
        while await rows.connection.fetchval("SELECT status FROM task WHERE step = 'submit'") != "retry":
            await asyncio.sleep(0.02)
        await rows.connection.execute(change)
        await rows.connection.execute("UPDATE task SET available_at = now() WHERE step = 'submit'")
        if "429" in prompt:
            while await rows.connection.fetchval("SELECT status FROM task WHERE step = 'submit'") != "waiting":
                await asyncio.sleep(0.02)
            await rows.connection.execute(
                "UPDATE job SET params = params || jsonb_build_object('deadline_at', clock_timestamp())"
            )
            await rows.connection.execute("UPDATE task SET available_at = now() WHERE step = 'submit'")
    said = await client.ended(task)
    assert (said["error"]["code"], said["error"]["retryable"]) == ("submit_outcome_unknown", False)
    assert (await rows.connection.fetchval("SELECT error ->> 'code' FROM job")) == "submit_outcome_unknown"


@pytest.mark.parametrize("word", ["#lost", "#garbled", "#down=1"])
async def test_where_it_could_buy_again_the_caller_is_told_that_nobody_knows(
    client: Client, worker: Worker, simulator: Simulator, word: str
) -> None:
    said = await client.ended(await client.ordered(f"a cat {word}", provider=PLAIN))
    assert (said["status"], said["error"]["code"]) == (-2, "submit_outcome_unknown")
    assert simulator.studio.attempts[f"a cat {word}"] == 1


@pytest.mark.parametrize("provider", [PLAIN, TOKEN])
async def test_a_busy_provider_is_asked_again_and_no_attempt_is_lost(
    client: Client, worker: Worker, simulator: Simulator, provider: str
) -> None:
    task = await client.ordered("a cat #busy=6", provider=provider)
    assert (await client.ended(task))["status"] == -1
    assert simulator.purchases("a cat #busy=6") == 1


async def test_a_provider_that_is_ill_for_a_while_delays_and_fails_nothing(
    client: Client, worker: Worker, simulator: Simulator
) -> None:
    done = await client.ended(await client.ordered("a cat #ill=5 #work=6"))
    assert done["status"] == -1
    assert simulator.bought[0].polls == 7


async def test_what_the_provider_refuses_fails_at_once_with_its_own_code(
    client: Client, worker: Worker, simulator: Simulator
) -> None:
    said = await client.ended(await client.ordered("#refused", provider=PLAIN))
    assert (said["error"]["code"], said["error"]["fail_code"]) == ("content_refused", "50411")
    said = await client.ended(await client.ordered("a cat #fail=50511", provider=PLAIN))
    assert (said["error"]["code"], said["error"]["fail_code"]) == ("output_refused", "50511")
    assert said["metadata"]["successful_uploads"] == 0
