"""The servers of the bench, private and durable. Every measurement has a new database and new queues on them."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import aio_pika
import asyncpg
import orjson

from leasehold.cli.installation import default_isolation
from leasehold.db.database import migrate
from leasehold.embedded.process import RunAs, Server
from leasehold.embedded.rabbitmq_install import install_rabbitmq
from leasehold.embedded.stack import EmbeddedStack
from leasehold.settings import Settings

_TEMPLATE = "bench_template"
_START_SECONDS = 60.0
_STOP_SECONDS = 40.0


class Testbed:
    """`async with Testbed() as testbed`: the servers run inside the block, with a migrated database as a template.

    `settings`: the settings of every installation, which its own settings override.
    """

    __test__ = False  # else pytest would collect this class, because of its name

    def __init__(self, **settings: object) -> None:
        self._settings = settings
        self._open = AsyncExitStack()
        self._filled: dict[str, Installation] = {}

    async def __aenter__(self) -> Self:
        self._stack = EmbeddedStack(durable=True, rabbitmq=await install_rabbitmq())
        async with AsyncExitStack() as opening:
            await opening.enter_async_context(self._stack)
            await self._administer(f"CREATE DATABASE {_TEMPLATE}")
            await migrate(self._url_of(_TEMPLATE))
            self._open = opening.pop_all()
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    @asynccontextmanager
    async def installation(self, **settings: object) -> AsyncIterator[Installation]:
        """An installation with an empty database, own queues, and no process yet. `settings`: LEASEHOLD_{NAME}."""
        name = f"bench_{secrets.token_hex(4)}"
        await self._administer(f"CREATE DATABASE {name} TEMPLATE {_TEMPLATE}")
        environment = self._stack.environment | {
            "LEASEHOLD_DATABASE_URL": self._url_of(name),
            "LEASEHOLD_AMQP_QUEUE_PREFIX": name,
            "LEASEHOLD_PIPELINES": "leasehold.pipelines:with_demonstrations",
            "LEASEHOLD_WORK_DIR": str(self._stack.directory / "work"),
            "LEASEHOLD_ISOLATION": default_isolation(),
            **_variables({**self._settings, **settings}),
        }
        async with AsyncExitStack() as processes:
            try:
                yield Installation(environment, self._stack.directory, processes)
            finally:
                await processes.aclose()
                await self._administer(f"DROP DATABASE {name} WITH (FORCE)")

    async def filled(
        self, name: str, fill: Callable[[Installation], Awaitable[None]], **settings: object
    ) -> Installation:
        """An installation that `fill` has filled; it lasts until the end of the testbed. The figures of one command
        share it by `name`, because `fill` may need minutes.
        """
        if name not in self._filled:
            installation = await self._open.enter_async_context(self.installation(**settings))
            await fill(installation)
            await self.checkpoint()
            self._filled[name] = installation
        return self._filled[name]

    @property
    def s3_endpoint(self) -> str:
        return self._stack.environment["LEASEHOLD_S3_ENDPOINT"]

    async def servers(self) -> dict[str, str]:
        """The versions of the servers, and their settings for durability."""
        assert self._stack.rabbitmq is not None
        versions = {"python": sys.version.split()[0], "rabbitmq": await _rabbitmq_version(self._stack.rabbitmq.url)}
        for setting in ("server_version", "fsync", "synchronous_commit", "full_page_writes", "wal_sync_method"):
            versions[f"postgresql {setting}"] = str(await self._administer(f"SHOW {setting}"))
        return versions

    async def kill_postgres(self) -> None:
        assert self._stack.postgres is not None
        await self._stack.postgres.kill()

    async def start_postgres(self) -> None:
        assert self._stack.postgres is not None
        await self._stack.postgres.start()

    async def flush_rabbitmq(self) -> None:
        """Write the declared queues to disk, so that they survive a kill."""
        assert self._stack.rabbitmq is not None
        await self._stack.rabbitmq.flush_definitions()

    async def kill_rabbitmq(self) -> None:
        assert self._stack.rabbitmq is not None
        await self._stack.rabbitmq.kill()

    async def start_rabbitmq(self) -> None:
        assert self._stack.rabbitmq is not None
        await self._stack.rabbitmq.start()

    async def checkpoint(self) -> None:
        """Write the dirty pages of earlier work to disk, so that this run does not pay for them."""
        await self._administer("CHECKPOINT")

    def _url_of(self, database: str) -> str:
        assert self._stack.postgres is not None
        return self._stack.postgres.url_of(database)

    async def _administer(self, statement: str) -> object:
        connection = await asyncpg.connect(self._url_of("postgres"))
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()


class Installation:
    """An installation with a database of its own: starts its processes, and connects to its database."""

    def __init__(self, environment: dict[str, str], directory: Path, processes: AsyncExitStack) -> None:
        self.environment = environment
        self._directory = directory
        self._processes = processes

    @property
    def settings(self) -> Settings:
        values = {
            name.removeprefix("LEASEHOLD_").lower(): orjson.loads(value) if value.startswith("{") else value
            for name, value in self.environment.items()
        }
        return Settings(_env_file=None, **values)  # type: ignore[arg-type]  # pydantic reads the text of each

    @property
    def url(self) -> str:
        return self.environment["LEASEHOLD_DATABASE_URL"]

    async def start(self, module: str, **settings: object) -> Server:
        """Run `python -m leasehold.{module}`. Settings that the bench does not choose have their defaults."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
        server = await Server.start(
            module,
            [sys.executable, "-m", f"leasehold.{module}"],
            log=self._directory / f"{module}-{secrets.token_hex(4)}.log",
            env={**inherited, **self.environment, **_variables(settings)},
            cwd=self._directory,
            run_as=RunAs(),
            last_signal=signal.SIGTERM,
        )
        self._processes.push_async_callback(server.stop, signal.SIGTERM, grace=_STOP_SECONDS)
        return server

    async def start_worker(self, **settings: object) -> Server:
        """Start a worker, and wait until it serves. Raises EmbeddedError if it does not start."""
        server = await self.start("worker", **settings)
        async with asyncio.timeout(_START_SECONDS):
            while b'"serving"' not in await asyncio.to_thread(server.log.read_bytes):
                if not server.running:
                    raise server.failure("did not start")
                await asyncio.sleep(0.05)
        return server

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
        connection = await asyncpg.connect(self.url)
        try:
            yield connection
        finally:
            await connection.close()


def _variables(settings: Mapping[str, object]) -> dict[str, str]:
    return {f"LEASEHOLD_{name.upper()}": str(value) for name, value in settings.items()}


async def _rabbitmq_version(url: str) -> str:
    async with await aio_pika.connect(url) as connection:
        transport = connection.transport
        assert transport is not None
        version = (transport.connection.server_properties or {}).get("version", b"unknown")
        return version.decode() if isinstance(version, bytes) else str(version)
