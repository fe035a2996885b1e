"""A provider that calls when it is done is polled then, and is believed nothing but that it is time to ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest
from pydantic import SecretStr

from leasehold.db.database import Connection
from leasehold.domain.ids import new_id
from leasehold.pipelines.generation.callbacks import callback_url, is_genuine
from leasehold.security.credentials import create_key
from leasehold.security.sealing import Sealing
from leasehold.settings import Settings
from leasehold.worker.worker import Worker
from tests.api.conftest import client_of, serving
from tests.api.media_api import problem
from tests.generation.conftest import SCOPES, SECONDS, Client
from tests.generation.simulator.server import Simulator

HOUR = 3600.0


@pytest.fixture
async def patient(generation_settings: Settings) -> Settings:
    """Polls so seldom that within a test only a call can be the reason."""
    return generation_settings.model_copy(
        update={"generation_image_poll_seconds": HOUR, "generation_video_poll_seconds": HOUR}
    )


@asynccontextmanager
async def reachable(settings: Settings, connection: Connection) -> AsyncIterator[tuple[Client, Worker]]:
    """An API, and a worker that knows where providers reach it."""
    key = await create_key(connection, tenant_id="acme", client_id="t", scopes=SCOPES)
    async with (
        serving(settings) as running,
        client_of(running.url, key.text) as http,
        Worker(settings.model_copy(update={"public_url": running.url})) as worker,
    ):
        yield Client(http), worker


def address_given(simulator: Simulator) -> str:
    return str(simulator.requests[0].json["tell"])


async def polls(simulator: Simulator, number: int) -> None:
    async with asyncio.timeout(SECONDS):
        while simulator.bought[0].polls < number:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("seconds", ["0.5", "0"])
@pytest.mark.parametrize(("provider", "kind"), [("ark", "video"), ("gateway", "images")])
async def test_a_provider_that_calls_is_polled_at_once(
    patient: Settings, connection: Connection, simulator: Simulator, provider: str, kind: str, seconds: str
) -> None:
    """Also when it calls before we have written down that it took the order."""
    async with reachable(patient, connection) as (client, _):
        task = await client.ordered(f"a wave #news={seconds}", kind, provider=provider, model="m")
        done = await client.ended(task, kind)
    assert done["status_text"] == "completed"
    assert simulator.bought[0].polls == 1
    async with asyncio.timeout(SECONDS):
        while 204 not in [status for _, status in simulator.studio.told]:  # its answer may come after the end
            await asyncio.sleep(0.02)
    assert [status for _, status in simulator.studio.told][-1] == 204


async def test_a_call_ahead_of_time_changes_nothing(
    patient: Settings, connection: Connection, simulator: Simulator
) -> None:
    async with reachable(patient, connection) as (client, _), httpx2.AsyncClient(timeout=SECONDS) as provider:
        task = await client.ordered("slow #never")
        await client.until(task, "polling")
        for number in (1, 2):
            said = {"status": "succeeded", "output": "http://evil"}
            async with asyncio.timeout(SECONDS):  # a busy machine may still be writing down the poll before
                while (answer := await provider.post(address_given(simulator), json=said)).status_code == 503:
                    await asyncio.sleep(0.02)
            assert answer.status_code == 204
            await polls(simulator, number)
        assert (await client.look(task))["status_text"] == "polling"


async def test_who_has_not_got_the_address_from_us_makes_nobody_ask(
    patient: Settings, connection: Connection, simulator: Simulator
) -> None:
    async with reachable(patient, connection) as (client, _), httpx2.AsyncClient(timeout=SECONDS) as stranger:
        task = await client.ordered("slow #never")
        await client.until(task, "polling")
        given = address_given(simulator)
        before, signature = given.rsplit("/", 1)
        job = before.rsplit("/", 1)[1]
        for forged in (
            f"{before}/{signature[:-2]}xx",
            f"{before}/x",
            f"{before}/%C3%A9",
            before.replace(job, str(new_id())) + f"/{signature}",
        ):
            problem(await stranger.post(forged), 404, "task_not_found")
        assert simulator.bought[0].polls == 0


async def test_a_call_after_the_end_is_thanked_for(
    patient: Settings, connection: Connection, simulator: Simulator
) -> None:
    async with reachable(patient, connection) as (client, _), httpx2.AsyncClient(timeout=SECONDS) as provider:
        await client.ended(await client.ordered("quick #news=0.2"))
        assert (await provider.post(address_given(simulator))).status_code == 204
    assert simulator.bought[0].polls == 1


async def test_without_an_address_of_its_own_the_installation_gives_none(
    client: Client, worker: Worker, simulator: Simulator
) -> None:
    await client.ended(await client.ordered("a cat"))
    assert "tell" not in simulator.requests[0].json


def test_an_older_key_still_proves_an_address_and_another_proves_none(generation_settings: Settings) -> None:
    job = new_id()
    settings = generation_settings.model_copy(update={"public_url": "https://api.example/"})
    url = callback_url(settings, Sealing(settings), job)
    assert url is not None
    assert url.startswith("https://api.example/v1/generations/callbacks/")
    signature = url.rsplit("/", 1)[1]
    assert is_genuine(Sealing(settings), job, signature)
    assert not is_genuine(Sealing(settings), new_id(), signature)
    assert not is_genuine(Sealing(settings.model_copy(update={"sealing_keys": SecretStr("")})), job, signature)
