"""A restart of a server leaves two lines in the log of each process, and not two hundred."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from leasehold.db.database import migrate
from leasehold.embedded.postgres import Postgres
from leasehold.settings import Settings
from leasehold.telemetry import outages
from leasehold.worker.worker import Worker
from tests.api.conftest import client_of, serving
from tests.support.broker_node import BrokerNode
from tests.support.now import now

AWAY = 3.0
SECONDS = 60.0


@pytest.fixture(autouse=True)
def no_reminders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load a server may need minutes to start, and each minute of an outage has a line (tests/unit)."""
    monkeypatch.setattr(outages, "REMINDER_SECONDS", float("inf"))


@pytest.fixture
async def server(run_directory: Path) -> AsyncIterator[Postgres]:
    server = Postgres(run_directory / "postgres-of-an-outage", durable=False)
    await server.start()
    yield server
    await server.stop("immediate")
    shutil.rmtree(server.directory)


@pytest.mark.usefixtures("patient_readiness")  # else the store may count as away, too
async def test_a_restart_of_the_database_is_one_line_when_it_goes_and_one_when_it_is_back(
    server: Postgres, settings: Settings, tmp_path: Path
) -> None:
    await migrate(server.url)
    changes = {"database_url": SecretStr(server.url), "broker": "postgres", "pipelines": "tests.runs.work:pipelines"}
    changed = settings.model_copy(update={**changes, "work_dir": str(tmp_path), "poll_seconds": 0.1})
    async with serving(changed) as running, client_of(running.url, "lh_none_none") as http, Worker(changed) as worker:
        await worker.complete.wait()
        async with asyncio.timeout(SECONDS):
            while now(outages.DATABASE.lasts):  # an outage of another test ends with the first answers
                await asyncio.sleep(0.05)
        with capture_logs() as lines:
            await server.stop("fast")
            until = asyncio.get_running_loop().time() + AWAY
            async with asyncio.timeout(SECONDS):
                while (
                    asyncio.get_running_loop().time() < until
                    or not {"heartbeat", "readiness"} <= outages.DATABASE._noticed_by
                ):
                    await http.get("/readyz")
                    await asyncio.sleep(0.1)
            assert now(outages.DATABASE.lasts)
            await server.start()
            async with asyncio.timeout(SECONDS):
                while outages.DATABASE.lasts:
                    await asyncio.sleep(0.05)
            await asyncio.sleep(2)
    said = [line for line in lines if line["event"] not in ("request", "self-check")]
    assert [line["event"] for line in said] == [
        "the database is away; trying again until it is back",
        "the database is back",
    ], said
    assert {"heartbeat", "readiness"} <= set(said[1]["noticed_by"])


async def test_a_restart_of_the_broker_is_one_line_when_it_goes_and_one_when_it_is_back(
    rabbitmq_node: BrokerNode, settings: Settings, tmp_path: Path
) -> None:
    changes = {
        "amqp_url": SecretStr(rabbitmq_node.url),
        "pipelines": "tests.runs.work:pipelines",
        "amqp_silence_seconds": SECONDS,  # a node that stands still for a moment is not away
    }
    changed = settings.model_copy(update={**changes, "work_dir": str(tmp_path)})
    async with Worker(changed) as worker:
        async with asyncio.timeout(SECONDS):
            await worker.complete.wait()
            while now(outages.BROKER.lasts) or not now(worker.parts.broker.connected):
                await asyncio.sleep(0.05)
        with capture_logs() as lines:
            await rabbitmq_node.kill()
            await asyncio.sleep(AWAY)
            async with asyncio.timeout(SECONDS):
                while not now(outages.BROKER.lasts):
                    await asyncio.sleep(0.05)
            await rabbitmq_node.start()
            async with asyncio.timeout(SECONDS):
                while outages.BROKER.lasts or not worker.parts.broker.connected:
                    await asyncio.sleep(0.05)
    events = [line["event"] for line in lines if line["event"] != "self-check"]
    assert events == ["the broker is away; trying again until it is back", "the broker is back"], events
