"""A real server on a real socket, a client with a key, and a look at the rows behind them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx2
import pytest
import uvicorn
from fastapi import APIRouter
from prometheus_client import Gauge

from leasehold.api.app import make_app
from leasehold.api.auth.security import MEDIA_READ, MEDIA_WRITE
from leasehold.api.http.connections import guarded
from leasehold.api.process.services import Services
from leasehold.db.database import Connection
from leasehold.security.credentials import NewKey, create_key
from leasehold.settings import Settings
from tests.api.media_api import MediaApi


class QuietServer(uvicorn.Server):
    """Leaves the process's signals to pytest, and stops when it is told, not a tenth of a second later."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which sleeps a tenth of a second first; whole processes are stopped by uvicorn's own."""
        for listener in self.servers:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:
            await asyncio.sleep(0.005)
        for listener in self.servers:
            await listener.wait_closed()
        await self.lifespan.shutdown()

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()


@dataclass
class Running:
    """A server that answers; `services` is its inside, for tests that look at it."""

    url: str
    services: Services


@asynccontextmanager
async def serving(settings: Settings, *routers: APIRouter) -> AsyncIterator[Running]:
    """With `routers` beside the shipped ones."""
    app = make_app(settings)
    for router in routers:
        app.include_router(router)
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        log_config=None,
        access_log=False,
        http=guarded(settings),
        ws="none",
        proxy_headers=False,
        timeout_keep_alive=30,  # as the program's: after uvicorn's own 5 s a client gives up its connection, too
    )
    server = QuietServer(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        if task.done():
            await task
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Running(f"http://127.0.0.1:{port}", app.state.services)
    finally:
        app.state.services.drain()
        server.stop()
        await task


@pytest.fixture
async def api(settings: Settings) -> AsyncIterator[Running]:
    async with serving(settings) as running:
        yield running


MakeKey = Callable[..., Any]


@pytest.fixture
def make_key(rows: Connection) -> MakeKey:
    async def make(
        tenant_id: str = "acme", scopes: tuple[str, ...] = (MEDIA_WRITE, MEDIA_READ), **columns: Any
    ) -> NewKey:
        return await create_key(rows, tenant_id=tenant_id, client_id="tests", scopes=scopes, **columns)

    return make


@pytest.fixture
async def media_api(api: Running, make_key: MakeKey) -> AsyncIterator[MediaApi]:
    """The media endpoints as a client of the tenant `acme` uses it."""
    key = await make_key()
    async with client_of(api.url, key.text) as client:
        yield MediaApi(client)


def client_of(url: str, key: str | None = None) -> httpx2.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    return httpx2.AsyncClient(base_url=url, headers=headers, timeout=40)


def value_of(gauge: Gauge) -> float:
    return next(sample.value for metric in gauge.collect() for sample in metric.samples)


async def count(rows: Connection, table: str) -> int:
    return int(await rows.fetchval(f"SELECT count(*) FROM {table}"))


async def job_of(rows: Connection, media_id: str) -> UUID:
    found: UUID = await rows.fetchval("SELECT job_id FROM media WHERE id = $1", UUID(media_id))
    return found
