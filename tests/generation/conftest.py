"""An API, a worker and a client of the generation endpoints, and every provider simulated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from leasehold.api.auth.security import GENERATION_READ, GENERATION_WRITE
from leasehold.db.database import Connection
from leasehold.pipelines.generation.pipeline import GenerationParams, generation
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.transitions.jobs import NewJob
from leasehold.worker.worker import Worker
from tests.api.conftest import client_of, serving
from tests.factories import Rows
from tests.generation.simulator.protocols import BEARER, VOLCENGINE
from tests.generation.simulator.server import Simulator

SCOPES = (GENERATION_READ, GENERATION_WRITE)
SECONDS = 60.0
#: Providers that take no token from us, and one that does.
PLAIN, TOKEN = "jimeng", "gateway"
CREDENTIALS = {"jimeng": VOLCENGINE, "ark": BEARER, "replicate": BEARER, "fal": BEARER, "gateway": BEARER}


def buying(simulator: Simulator) -> dict[str, Any]:
    return {
        **simulator.settings(),
        "generation_credentials": orjson.dumps(CREDENTIALS).decode(),
        "worker_queues": "generation",
        "poll_seconds": 0.1,
    }


def ordered(
    provider: str, prompt: str, *, model: str | None = None, resubmit: bool = False, poll_seconds: float = 0.1
) -> NewJob:
    deadline = datetime.now(UTC) + timedelta(hours=1)
    params = GenerationParams(
        kind="image", provider=provider, model=model, prompt=prompt, deadline_at=deadline, poll_seconds=poll_seconds,
        resubmit=resubmit,
    )  # fmt: skip
    return NewJob(generation, "t", params=params.model_dump(mode="json"))


@dataclass
class Client:
    """What a client of the generation endpoints does."""

    http: httpx2.AsyncClient

    async def order(self, prompt: str, kind: str = "images", **body: Any) -> httpx2.Response:
        return await self.http.post(f"/v1/{kind}/generations", json={"prompt": prompt} | body)

    async def ordered(self, prompt: str, kind: str = "images", **body: Any) -> str:
        answer = await self.order(prompt, kind, **body)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["data"]["task_id"])

    async def look(self, task_id: str, kind: str = "images", **query: Any) -> dict[str, Any]:
        answer = await self.http.get(f"/v1/{kind}/query", params={"task_id": task_id} | query)
        assert answer.status_code == 200, answer.text
        said: dict[str, Any] = answer.json()["data"]
        return said

    async def ended(self, task_id: str, kind: str = "images") -> dict[str, Any]:
        async with asyncio.timeout(SECONDS):
            while (said := await self.look(task_id, kind))["status"] == 0:
                await asyncio.sleep(0.02)
        return said

    async def until(self, task_id: str, word: str, kind: str = "images") -> dict[str, Any]:
        async with asyncio.timeout(SECONDS):
            while (said := await self.look(task_id, kind))["status_text"] != word:
                await asyncio.sleep(0.02)
        return said


@pytest.fixture
async def simulator() -> AsyncIterator[Simulator]:
    async with Simulator() as running:
        yield running


@pytest.fixture
def generation_settings(settings: Settings, tmp_path: Path, simulator: Simulator) -> Settings:
    return settings.model_copy(
        update={
            **simulator.settings(),
            "generation_provider": "gateway",
            "generation_credentials": {name: SecretStr(text) for name, text in CREDENTIALS.items()},
            "generation_image_poll_seconds": 0.05,
            "generation_video_poll_seconds": 0.05,
            "generation_per_server": 0,
            "generation_image_max_bytes": 2 * 1024 * 1024,
            "sealing_keys": SecretStr(Fernet.generate_key().decode()),
            "work_dir": str(tmp_path),
            "poll_seconds": 0.1,
            "sweep_seconds": 0.2,
            "worker_children": 1,
            "worker_queues": "generation",
        }
    )


@pytest.fixture
async def client(generation_settings: Settings, connection: Connection) -> AsyncIterator[Client]:
    key = await create_key(connection, tenant_id="acme", client_id="t", scopes=SCOPES)
    async with serving(generation_settings) as running, client_of(running.url, key.text) as http:
        yield Client(http)


@pytest.fixture
async def worker(generation_settings: Settings) -> AsyncIterator[Worker]:
    async with Worker(generation_settings) as running:
        yield running


@pytest.fixture
def rows(connection: Connection) -> Rows:
    return Rows(connection)
