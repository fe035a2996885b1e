"""Starts and stops the private servers of one installation together, for `leasehold dev`, the demo and the tests."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from leasehold.embedded.directories import RunDirectory
from leasehold.embedded.postgres import Postgres
from leasehold.embedded.rabbitmq import RabbitMQ
from leasehold.embedded.rabbitmq_install import RabbitServer
from leasehold.embedded.s3 import S3
from leasehold.settings import as_variables, servers_of_database


class EmbeddedStack:
    """`async with EmbeddedStack(...) as stack:` runs the chosen servers.

    Args:
        data: a directory that keeps the data; None: the data is deleted when the servers are stopped
        durable: whether PostgreSQL waits for the disk at each commit; tests do not need this
        postgres: run PostgreSQL
        s3: run an S3 server
        rabbitmq: the server to run, from `find_rabbitmq()` or `await install_rabbitmq()`; None: run no RabbitMQ

    Raises:
        EmbeddedError: on entering, if a server cannot run. The other servers are then stopped.
    """

    def __init__(
        self,
        data: Path | None = None,
        *,
        durable: bool = True,
        postgres: bool = True,
        s3: bool = True,
        rabbitmq: RabbitServer | None = None,
    ) -> None:
        self.directory = Path()
        self.postgres: Postgres | None = None
        self.s3: S3 | None = None
        self.rabbitmq: RabbitMQ | None = None
        self._data = data
        self._durable = durable
        self._options = (postgres, s3, rabbitmq)
        self._cleanup = AsyncExitStack()  # stops the servers and removes the directory

    @property
    def environment(self) -> dict[str, str]:
        """The variables `LEASEHOLD_*` with which a process of the platform uses these servers. They hold secrets."""
        variables = {"LEASEHOLD_BROKER": "amqp" if self.rabbitmq else "postgres"}
        if self.postgres:
            variables |= as_variables(servers_of_database(self.postgres.url))
        if self.rabbitmq:
            variables["LEASEHOLD_AMQP_URL"] = self.rabbitmq.url
        if self.s3:
            variables["LEASEHOLD_S3_ENDPOINT"] = variables["LEASEHOLD_S3_PUBLIC_ENDPOINT"] = self.s3.endpoint
            variables["LEASEHOLD_S3_BUCKET"] = self.s3.bucket
            variables["LEASEHOLD_S3_ACCESS_KEY"] = self.s3.access_key
            variables["LEASEHOLD_S3_SECRET_KEY"] = self.s3.secret_key
            variables["LEASEHOLD_S3_ADDRESSING"] = "path"  # a bucket's name cannot stand before an IP address
        return variables

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:
            self.directory = opening.enter_context(RunDirectory(self._data)).path
            opening.push_async_callback(self._stop_all)
            self._make_servers()
            await self._start_all()
            self._cleanup = opening.pop_all()  # from now on `__aexit__` stops the servers, and this block does not
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._cleanup.aclose()

    def _make_servers(self) -> None:
        postgres, s3, rabbitmq = self._options
        if rabbitmq:  # first, because it takes seconds to start
            self.rabbitmq = RabbitMQ(self.directory / "rabbitmq", rabbitmq)
        if postgres:
            self.postgres = Postgres(self.directory / "postgres", durable=self._durable)
        if s3:
            self.s3 = S3(self.directory / "s3")

    async def _start_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as starting:
                for server in self._servers:
                    starting.create_task(server.start())
        except ExceptionGroup as failures:  # the first error is the cause, because it cancelled the other starts
            raise failures.exceptions[0] from failures

    @property
    def _servers(self) -> list[RabbitMQ | Postgres | S3]:
        return [server for server in (self.rabbitmq, self.postgres, self.s3) if server is not None]

    async def _stop_all(self) -> None:
        # An orderly stop of RabbitMQ takes 6 s. So RabbitMQ is killed instead if its data is deleted anyway. An orderly
        # stop of PostgreSQL takes 30 ms, and frees its shared memory.
        for server in self._servers:
            if server is self.rabbitmq and self._data is None:
                await server.kill()
            else:
                await server.stop()
        if self.postgres:
            await self.postgres.forget()
