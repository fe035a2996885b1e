"""The servers of chaos runs. They start once, for all runs of a process. Each run has a database, a virtual host and a
bucket of its own in them, and its faults break them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import asyncpg

from chaos import memory, replicas, row_changes
from chaos.catalogue import BROKER, CLOCK, MEMORY, MOUNTS, STANDBY
from chaos.clock import DatabaseClock, find_library
from chaos.disk import Volume
from chaos.orphans import adopting
from chaos.proxy import Link
from chaos.release import Release
from leasehold.db.database import migrate
from leasehold.embedded.guard import descendants
from leasehold.embedded.postgres import Postgres
from leasehold.embedded.postgres_programs import find_postgres
from leasehold.embedded.process import EmbeddedError, unprivileged
from leasehold.embedded.rabbitmq import RabbitMQ
from leasehold.embedded.rabbitmq_install import install_rabbitmq
from leasehold.embedded.stack import EmbeddedStack
from leasehold.runtime.transient import TRY_AGAIN, until_answered

_TEMPLATE, _OF_RELEASE = "chaos_template", "chaos_template_of_release"
_RESTARTS = 60
_RECOVERY_SECONDS = 20.0
#: The errors of a server that is not back yet.
_NOT_BACK: tuple[type[BaseException], ...] = (EmbeddedError, *TRY_AGAIN)
#: Enough for the WAL that PostgreSQL keeps until a checkpoint, and for the databases of many runs.
_VOLUME_MEGABYTES = 3072


class Servers:
    """`async with Servers() as servers`: PostgreSQL, S3 and, if this machine can install it, RabbitMQ.

    `abilities`: those of chaos.catalogue.EVERYTHING that the machine has. `postgres`: the primary. `standby`: its copy,
    which exists between `add_standby` and `remove_standby`.
    """

    def __init__(self, *, broker: bool = True) -> None:
        self._with_broker = broker
        self.abilities: frozenset[str] = frozenset()
        self.clock: DatabaseClock | None = None
        self.standby: Postgres | None = None
        self._replication: Link | None = None
        self._mode = ""
        self._release: Release | None = None
        self._has_template_of_release = False
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            rabbitmq = await install_rabbitmq() if self._with_broker else None
        except EmbeddedError:
            rabbitmq = None
        async with AsyncExitStack() as opening:
            opening.enter_context(adopting())
            self.stack = await opening.enter_async_context(EmbeddedStack(postgres=False, rabbitmq=rabbitmq))
            assert self.stack.s3 is not None
            self.s3 = self.stack.s3
            self.postgres = await self._start_postgres(opening)
            self.abilities = frozenset(self._abilities())
            await self.administer(f"CREATE DATABASE {_TEMPLATE}")
            await migrate(self.postgres.url_of(_TEMPLATE))
            await self._install_triggers(_TEMPLATE)
            self._open = opening.pop_all()
        return self

    async def _start_postgres(self, opening: AsyncExitStack) -> Postgres:
        """Start PostgreSQL on a disk and with a clock of its own, if this machine can make them."""
        self.volume = Volume(self.directory / "postgres", megabytes=_VOLUME_MEGABYTES)
        opening.push_async_callback(self.volume.unmount)
        await self.volume.mount()
        programs = await find_postgres(unprivileged())
        if library := await find_library():
            self.clock = DatabaseClock(self.directory / "clock", library, programs)
            programs = self.clock.programs
        self._programs = programs
        postgres = self._server_at("a")
        opening.push_async_callback(self._end_postgres)
        await postgres.start()
        return postgres

    def _server_at(self, name: str) -> Postgres:
        return Postgres(self.directory / "postgres" / name, durable=True, programs=self._programs)

    async def _end_postgres(self) -> None:
        await self.postgres.stop()
        await self.postgres.forget()

    def _abilities(self) -> Iterator[str]:
        if self.rabbitmq is not None:
            yield BROKER
        if self.volume.mounted:
            yield MOUNTS
        if self.clock is not None:
            yield CLOCK
        if memory.is_possible():
            yield MEMORY
        yield STANDBY

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    @property
    def rabbitmq(self) -> RabbitMQ | None:
        return self.stack.rabbitmq

    @property
    def directory(self) -> Path:
        return self.stack.directory

    @property
    def postgres_log(self) -> Path:
        return self.postgres.directory / "postgres.log"

    async def administer(self, statement: str, database: str = "postgres") -> None:
        connection = await asyncpg.connect(self.postgres.url_of(database))
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    async def add_database(self, name: str, *, of_release: bool = False) -> None:
        """Make a database with this code's schema; `of_release`: with the release's schema."""
        if of_release:
            await self._make_template_of_release()
        template = _OF_RELEASE if of_release else _TEMPLATE
        await self.administer(f"CREATE DATABASE {name} TEMPLATE {template}")

    async def release(self) -> Release:
        """The published release. The first call unpacks it."""
        if self._release is None:
            release = Release(self.directory / "release")
            await release.unpack()
            self._release = release
        return self._release

    async def _make_template_of_release(self) -> None:
        if self._has_template_of_release:
            return
        await self.administer(f"CREATE DATABASE {_OF_RELEASE}")
        await (await self.release()).migrate(self.postgres.url_of(_OF_RELEASE))
        await self._install_triggers(_OF_RELEASE)
        self._has_template_of_release = True

    async def _install_triggers(self, database: str) -> None:
        await self.administer(row_changes.install(self.clock.file if self.clock else None), database)

    async def drop_database(self, name: str) -> None:
        statement = f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"
        await until_answered(lambda: self.administer(statement), within=_RECOVERY_SECONDS)

    async def add_standby(self, mode: str) -> None:
        """Give the primary a standby for which each commit waits. `mode`: as for replicas.make_synchronous."""
        self._mode = mode
        await replicas.retry_often(self.postgres)
        self.standby = self._server_at("b" if self.postgres.directory.name == "a" else "a")
        await self._copy()

    async def _copy(self) -> None:
        """Copy the primary to the standby, which then follows it. The replication has a link that a fault can cut."""
        assert self.standby is not None
        self._replication = Link(("127.0.0.1", self.postgres.port))
        await self._replication.open()
        await replicas.copy(self.postgres, self.standby, port=self._replication.port)
        await self.standby.start()
        await replicas.make_synchronous(self.postgres, self._mode)

    def cut_replication(self) -> None:
        """Hold the link of the replication: the standby gets nothing more, and commits of the primary wait."""
        assert self._replication is not None
        self._replication.hold()

    async def promote(self) -> Postgres:
        """Make the standby the primary. Returns the old primary, which may run on."""
        assert self.standby is not None
        await replicas.promote(self.standby)
        self.postgres, self.standby = self.standby, self.postgres
        return self.standby

    async def copy_anew(self) -> float:
        """End the old primary, and make it a standby of the new one. Returns when it had ended, as a Unix time."""
        await self._end_standby()
        ended_at = time.time()
        await self._copy()
        return ended_at

    async def remove_standby(self) -> None:
        """End the standby. Commits no longer wait for one."""
        await until_answered(lambda: replicas.make_asynchronous(self.postgres), within=_RECOVERY_SECONDS)
        await self._end_standby()
        self.standby = None

    async def _end_standby(self) -> None:
        if self._replication is not None:
            await self._replication.close()
            self._replication = None
        if self.standby is not None:
            await replicas.discard(self.standby)

    async def mend(self) -> None:
        """End every fault of the servers: each runs again, at its old address and with its old data."""
        await self.volume.thaw()
        self.volume.empty()
        if self.clock is not None:
            self.clock.jump(0)
        self.signal("postgres", signal.SIGCONT)
        self.signal("rabbitmq", signal.SIGCONT)
        await self.restart_postgres()
        if self.rabbitmq is not None:
            await self.rabbitmq.start()

    async def restart_postgres(self) -> None:
        """Start PostgreSQL and its standby, if they do not run, and wait until PostgreSQL answers. This may take
        several tries: a killed server may still hold its lock, and a crashed server recovers first, or may end
        meanwhile.

        Raises EmbeddedError, or one of TRY_AGAIN, if a server does not come back.
        """
        for tries_left in reversed(range(_RESTARTS)):
            try:
                await self.postgres.start()
                await self.administer("SELECT 1")
                if self.standby is not None:
                    await self.standby.start()
            except _NOT_BACK:
                if not tries_left:
                    raise
                await asyncio.sleep(0.2)
            else:
                return

    def blocked(self, name: str) -> set[int]:
        """The server's processes that wait in the kernel for their disk."""
        return {pid for pid in self.processes(name) if _state(pid) == "D"}

    def signal(self, name: str, number: signal.Signals) -> int:
        """Send a signal to every process of a server. Returns how many got it: a process may just have ended."""
        reached = 0
        for pid in self.processes(name):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                reached += 1
        return reached

    def processes(self, name: str) -> list[int]:
        """The processes of the server `postgres` or `rabbitmq`, without its guard: those with its directory in the
        command line, and their descendants. `postgres` means the standby, too; `postgres/a` is one of the two.
        """
        directory = str(self.directory / name).encode()
        lines = {pid: command_line(pid) for pid in descendants(os.getpid())}
        roots = [pid for pid, line in lines.items() if directory in line and b"guard.py" not in line]
        return sorted({*roots, *(below for root in roots for below in descendants(root))})


def command_line(pid: int) -> bytes:
    """The command line of a process, with a zero byte after each word; empty if the process has ended."""
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def _state(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended
        return ""
