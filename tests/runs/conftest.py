"""An API, a worker and a client with a key, for one tenant; and a second tenant that must see nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from leasehold.api.auth.security import (
    EXTERNAL_WORK,
    MEDIA_WRITE,
    OPERATE,
    RUNS_READ,
    RUNS_WRITE,
    TEMPLATES_WRITE,
    WEBHOOKS_WRITE,
)
from leasehold.db.database import Connection
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.worker.worker import Worker
from tests.api.conftest import Running, client_of, serving

SCOPES = (RUNS_READ, RUNS_WRITE, TEMPLATES_WRITE, EXTERNAL_WORK, OPERATE, WEBHOOKS_WRITE, MEDIA_WRITE)
SECONDS = 60.0


@dataclass
class Client:
    """What a client of the runs endpoints does."""

    http: httpx2.AsyncClient

    async def start(self, template: str = "scripted", **body: Any) -> str:
        answer = await self.submit(template, **body)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    async def submit(self, template: str = "scripted", **body: Any) -> httpx2.Response:
        return await self.http.post("/v1/runs", json={"template": template} | body)

    async def look(self, run: str, **params: Any) -> dict[str, Any]:
        answer = await self.http.get(f"/v1/runs/{run}", params=params)
        assert answer.status_code == 200, answer.text
        said: dict[str, Any] = answer.json()
        return said

    async def until(self, run: str, *statuses: str) -> dict[str, Any]:
        async with asyncio.timeout(SECONDS):
            while (said := await self.look(run))["status"] not in statuses:
                await asyncio.sleep(0.02)
        return said

    async def until_step(self, run: str, step: str, state: str) -> dict[str, Any]:
        async with asyncio.timeout(SECONDS):
            while step_of(said := await self.look(run), step)["state"] != state:
                await asyncio.sleep(0.02)
        return said

    async def post(self, path: str, **body: Any) -> httpx2.Response:
        return await self.http.post(path, json=body)


def step_of(said: dict[str, Any], step: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in said["progress"]["steps"] if one["id"] == step)
    return found


@pytest.fixture
def runs_settings(settings: Settings, tmp_path: Path) -> Settings:
    return settings.model_copy(
        update={
            "pipelines": "tests.runs.work:pipelines",
            "work_dir": str(tmp_path),
            "poll_seconds": 0.1,
            "sweep_seconds": 0.2,
            "worker_children": 1,
            "renew_seconds": 0.5,
            "evaluation_wall_seconds": 60.0,
        }
    )


@pytest.fixture
async def running(runs_settings: Settings) -> AsyncIterator[Running]:
    async with serving(runs_settings) as running:
        yield running


@pytest.fixture
async def client(running: Running, rows: Connection) -> AsyncIterator[Client]:
    key = await create_key(rows, tenant_id="acme", client_id="tests", scopes=SCOPES)
    async with client_of(running.url, key.text) as http:
        yield Client(http)


@pytest.fixture
async def stranger(running: Running, rows: Connection) -> AsyncIterator[Client]:
    """The same rights, in another tenant."""
    key = await create_key(rows, tenant_id="other", client_id="tests", scopes=SCOPES)
    async with client_of(running.url, key.text) as http:
        yield Client(http)


@pytest.fixture
async def worker(runs_settings: Settings) -> AsyncIterator[Worker]:
    async with Worker(runs_settings) as worker:
        yield worker
