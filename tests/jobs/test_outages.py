"""An outage while a request is answered: it is named by the part that is away, and never undoes what was committed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import Message

from leasehold.api.auth import security
from leasehold.api.conversion.result import _ArtifactStream, _end_download
from leasehold.api.http.responses import publish_and_admit
from leasehold.api.process import deadline
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services
from leasehold.api.process.tenant_pool import TenantPool, set_tenant
from leasehold.db.database import make_pool
from leasehold.db.pool_sizes import pool_of_api
from leasehold.domain.ids import new_id
from leasehold.limits import downloads
from leasehold.settings import Settings
from tests.api.conftest import Running, client_of, serving
from tests.api.media_api import problem
from tests.jobs.conftest import MakeClient

CALLER = Caller("acme", "tests", "abcdefghijkl", "abcdefghijkl", frozenset())
LIMIT = ("acme", "tenant")


@asynccontextmanager
async def no_connection_left(services: Services, settings: Settings) -> AsyncIterator[Services]:
    """The services of a process whose only connection is lent."""
    async with make_pool(settings, "tests", 1) as pool:
        busy = TenantPool(pool, 1, patience=0.05)
        async with busy.acquire():
            yield replace(services, pool=busy)


async def test_a_pool_without_a_connection_changes_no_answer_after_the_commit(
    running: Running, settings: Settings
) -> None:
    async with no_connection_left(running.services, settings) as services:
        await publish_and_admit(services, [], [LIMIT])
        await _end_download(services, CALLER, new_id(), 0)


async def test_a_request_without_time_left_changes_no_answer_after_the_commit(running: Running) -> None:
    deadline.begin(0.0)
    await publish_and_admit(running.services, [], [LIMIT])
    await _end_download(running.services, CALLER, new_id(), 0)


async def test_a_form_is_not_called_slow_while_the_database_is_away(running: Running, client_with: MakeClient) -> None:
    key = (await client_with(security.GENERATION_WRITE, tenant="third")).headers["authorization"].split()[1]
    settings = running.services.settings.model_copy(update={"database_timeout": 5.0})
    async with serving(settings) as impatient, client_of(impatient.url, key) as http, AsyncExitStack() as lent:
        problem(await http.post("/v1/images/generations", json={}), 422, "invalid_request")  # the key is remembered
        for number in range(pool_of_api(settings)):
            set_tenant("first" if number else "second")
            await lent.enter_async_context(impatient.services.pool.acquire())
        answer = await http.post("/v1/upload/images", files={"image": ("a.jpg", b"x")})
        problem(answer, 503, "database_unavailable")


async def test_a_download_that_is_cut_at_its_time_limit_is_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "MAX_SECONDS", 0.05)
    ends: list[tuple[int, str]] = []

    async def pieces() -> Any:
        yield b"a"
        await asyncio.sleep(30)
        yield b"b"

    async def record_end(sent_bytes: int, outcome: str) -> None:
        ends.append((sent_bytes, outcome))

    async def receive() -> Message:
        await asyncio.sleep(30)
        raise AssertionError("the download ends first")

    async def send(_message: Message) -> None:
        return

    await _ArtifactStream(pieces(), b"x", 3, record_end)({}, receive, send)
    assert ends == [(2, "aborted")]
