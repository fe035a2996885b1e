"""An API with every kind of work, a client of a tenant with all scopes, and a maker of jobs of each kind."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import httpx2
import pytest
from cryptography.fernet import Fernet
from pydantic import SecretStr

from leasehold.api.auth import security
from leasehold.db.database import Connection
from leasehold.pipelines.webhooks.pipeline import webhooks
from leasehold.security.credentials import create_key
from leasehold.settings import Settings
from leasehold.transitions import claims, jobs, notes, settlements
from leasehold.transitions.claims import Claimed
from leasehold.transitions.jobs import NewJob
from leasehold.transitions.settlements import Completion, Failure
from tests.api.conftest import Running, client_of, serving
from tests.api.driver import TERMS
from tests.api.media_api import MediaApi

SCOPES = frozenset(str(value) for name, value in vars(security).items() if name.isupper() and ":" in str(value))
TENANT_SCOPES = SCOPES - {security.OPERATE}
KINDS = ("media", "conversion", "generation", "run", "webhook")


@pytest.fixture
async def running(settings: Settings) -> AsyncIterator[Running]:
    configured = settings.model_copy(
        update={
            "sealing_keys": SecretStr(Fernet.generate_key().decode()),
            "generation_credentials": {"jimeng": SecretStr("id:secret")},
            "generation_provider": "jimeng",
            "egress_allow": "127.0.0.0/8",
        }
    )
    async with serving(configured) as running:
        yield running


MakeClient = Callable[..., Awaitable[httpx2.AsyncClient]]


@pytest.fixture
async def client_with(running: Running, rows: Connection) -> AsyncIterator[MakeClient]:
    """A client whose key has these scopes."""
    opened: list[httpx2.AsyncClient] = []

    async def make(*scopes: str, tenant: str = "acme") -> httpx2.AsyncClient:
        key = await create_key(rows, tenant_id=tenant, client_id="tests", scopes=scopes)
        opened.append(client_of(running.url, key.text))
        return opened[-1]

    yield make
    for client in opened:
        await client.aclose()


@pytest.fixture
async def client(client_with: MakeClient) -> httpx2.AsyncClient:
    return await client_with(*TENANT_SCOPES)


@dataclass
class Maker:
    """Makes a job of each kind as its clients do, and drives it as a worker does."""

    client: httpx2.AsyncClient
    rows: Connection

    async def make(self, kind: str, **more: Any) -> UUID:
        job_id: UUID = await getattr(self, f"_{kind}")(**more)
        return job_id

    async def _media(self, **more: Any) -> UUID:
        media = MediaApi(self.client)
        ticket = await media.upload()
        answer = await media.complete(ticket, **more)
        assert answer.status_code == 202, answer.text
        return UUID(answer.json()["job_id"])

    async def _conversion(self, **more: Any) -> UUID:
        tags = {"tags": json.dumps(more.pop("tags"))} if "tags" in more else {}
        form = {"user_id": str(uuid4()), "model_id": "1", "version": "0001", "platform": "720"} | tags | more
        answer = await self.client.post("/api/v1/jobs", data=form, files={"model": ("m.onnx", b"x")})
        assert answer.status_code == 201, answer.text
        return UUID(answer.json()["job_id"])

    async def _generation(self, **more: Any) -> UUID:
        headers = {"X-Provider-Credential": "id:sesame"}
        answer = await self.client.post("/v1/images/generations", json={"prompt": "x"} | more, headers=headers)
        assert answer.status_code == 202, answer.text
        return UUID(answer.json()["data"]["job_id"])

    async def _run(self, **more: Any) -> UUID:
        body = {"type": "outside", "steps": [{"id": "a", "queue": "q"}, {"id": "b", "queue": "q"}]}
        answer = await self.client.post("/v1/templates", json=body)
        assert answer.status_code in (201, 409), answer.text
        answer = await self.client.post("/v1/runs", json={"template": "outside"} | more)
        assert answer.status_code == 202, answer.text
        return UUID(answer.json()["id"])

    async def _webhook(self, **_more: Any) -> UUID:
        answer = await self.client.post("/v1/webhooks", json={"url": "http://127.0.0.1/hook"})
        assert answer.status_code == 201, answer.text
        event = {"type": "run.failed", "data": {"id": str(uuid4())}}
        new = NewJob(webhooks, "acme", params={"webhook_id": answer.json()["id"], "event": event})
        await jobs.submit(self.rows, [new])
        return new.id

    async def claim(self, job_id: UUID) -> Claimed:
        task_id = await self.rows.fetchval(
            "UPDATE task SET available_at = clock_timestamp() WHERE id = (SELECT id FROM task"
            " WHERE job_id = $1 AND status IN ('pending', 'retry', 'waiting') ORDER BY position LIMIT 1) RETURNING id",
            job_id,
        )
        (claimed,) = await claims.claim(self.rows, TERMS, [task_id])
        return claimed

    async def fail(self, job_id: UUID, code: str = "broken") -> None:
        claimed = await self.claim(job_id)
        await settlements.fail(self.rows, [Failure(claimed.lease, "error", code, "It did not work.", False, 0.0)])

    async def lose_order(self, job_id: UUID) -> None:
        """Fail a generation whose provider never answered the order."""
        claimed = await self.claim(job_id)
        await notes.remember(self.rows, claimed.lease, {"asked_at": "2026-11-22T10:00:00+00:00"})
        failure = Failure(claimed.lease, "error", "submit_outcome_unknown", "It did not work.", False, 0.0)
        await settlements.fail(self.rows, [failure])

    async def succeed_from(self, claimed: Claimed) -> None:
        """As `succeed`, of a job with a step that is claimed already."""
        await settlements.complete(self.rows, [Completion(claimed.lease, [], {"done": True})])
        await self.succeed(claimed.job_id)

    async def succeed(self, job_id: UUID) -> None:
        while await self.rows.fetchval("SELECT finished_at IS NULL FROM job WHERE id = $1", job_id):
            claimed = await self.claim(job_id)
            await settlements.complete(self.rows, [Completion(claimed.lease, [], {"done": True})])


@pytest.fixture
async def maker(client: httpx2.AsyncClient, rows: Connection) -> Maker:
    return Maker(client, rows)
