"""The faults of servers: the broker and the database killed, stopped, emptied, or made to refuse."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import UUID

import aio_pika

from chaos.plan import Fault
from chaos.stack import Installation
from leasehold.broker.base import Hint
from leasehold.broker.envelope import encode
from leasehold.runtime.transient import until_answered

_RECOVERY_SECONDS = 20.0
#: How long queues that are gone may take to be declared anew.
_DECLARE_SECONDS = 10.0


class ServerFaults:
    """Each returns whether the fault happened."""

    def __init__(self, installation: Installation, rng: random.Random) -> None:
        self._it = installation
        self._rng = rng
        self._broken = asyncio.Lock()  # one server at a time is away

    @property
    def by_prefix(self) -> Mapping[str, Callable[[Fault], Awaitable[bool]]]:
        return {
            "F13": self._kill_broker,
            "F14": self._kill_declaring_broker,
            "F15": self._stop_broker,
            "F16": self._kill_broker,
            "F17": self._alarm,
            "F18": self._lose_hints,
            "F20": self._send_garbage,
            "F21": self._terminate_sessions,
            "F22": self._kill_backend,
            "F23": self._kill_database,
            "F24": self._kill_database,
            "F25": self._lock_job,
            "F26": self._read_only,
        }

    # --- the broker

    async def _kill_broker(self, fault: Fault) -> bool:
        rabbitmq = self._it.servers.rabbitmq
        assert rabbitmq is not None
        async with self._broken:
            await rabbitmq.kill()
            await asyncio.sleep(fault.seconds)
            await rabbitmq.start()
        return True

    async def _kill_declaring_broker(self, fault: Fault) -> bool:
        """What has just been declared anew is not yet on the broker's disk, and may be gone afterwards."""
        rabbitmq = self._it.servers.rabbitmq
        assert rabbitmq is not None
        async with self._broken:
            if not await self._lose_hints(fault):
                return False
            deadline = time.monotonic() + _DECLARE_SECONDS
            while not (declared := await self._queues()) and time.monotonic() < deadline:  # noqa: ASYNC110 - only asking tells
                await asyncio.sleep(0.05)
            await rabbitmq.kill()
            await rabbitmq.start()
        return bool(declared)

    async def _queues(self) -> list[dict[str, Any]]:
        rabbitmq = self._it.servers.rabbitmq
        assert rabbitmq is not None
        queues: list[dict[str, Any]] = await rabbitmq.management.call("GET", f"/api/queues/{self._it.name}")
        return queues

    async def _stop_broker(self, fault: Fault) -> bool:
        async with self._broken:
            hit = self._it.servers.signal("rabbitmq", signal.SIGSTOP)
            await asyncio.sleep(fault.seconds)
            self._it.servers.signal("rabbitmq", signal.SIGCONT)
        return hit > 0

    async def _alarm(self, fault: Fault) -> bool:
        """The broker reads nothing more from those who publish, until it has memory, or disk, again."""
        rabbitmq = self._it.servers.rabbitmq
        assert rabbitmq is not None
        async with self._broken:
            limit, too_little = (
                (rabbitmq.allow_memory, "1MB") if "memory" in fault.name else (rabbitmq.need_free_disk, "100000GB")
            )
            await limit(too_little)
            try:
                await asyncio.sleep(fault.seconds)
                return await rabbitmq.management.has_alarm()
            finally:
                await limit()

    async def _lose_hints(self, fault: Fault) -> bool:
        rabbitmq = self._it.servers.rabbitmq
        assert rabbitmq is not None
        what = "/contents" if "purge" in fault.name else ""
        try:
            queues = await self._queues()
            for queue in queues:
                await rabbitmq.management.call("DELETE", f"/api/queues/{self._it.name}/{queue['name']}{what}")
        except OSError:
            return False  # the broker is away
        return bool(queues)

    async def _send_garbage(self, _fault: Fault) -> bool:
        """Hints five times over, of tasks that are done or that nobody knows, and what is no hint at all."""
        async with self._it.connection() as connection:
            rows = await connection.fetch("SELECT id, queue FROM task ORDER BY random() LIMIT 5")
        known = [encode(Hint(row["id"], row["queue"], tenant="chaos")) for row in rows] * 5
        unknown = encode(Hint(UUID("00000000-0000-7000-8000-000000000000"), "chaos"))
        bodies = [
            *known,
            unknown,
            b"",
            b"{}",
            b"\xff" * 10_000,
            unknown.replace(b'"v":', b'"v":9'),
        ]
        self._rng.shuffle(bodies)
        try:
            async with await aio_pika.connect(self._it.amqp_url, timeout=3) as broker:
                channel = await broker.channel()
                for body in bodies:
                    message = aio_pika.Message(body)
                    await channel.default_exchange.publish(message, "leasehold.chaos.normal", timeout=3)
        except (OSError, TimeoutError, aio_pika.exceptions.AMQPError):
            return False
        return True

    # --- the database

    async def _terminate_sessions(self, _fault: Fault) -> bool:
        async with self._it.connection() as connection:
            rows = await connection.fetch(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid() ORDER BY random() LIMIT 8"
            )
        return bool(rows)

    async def _kill_backend(self, _fault: Fault) -> bool:
        """The server takes this for a crash and starts again, all sessions gone."""
        async with self._broken, self._it.connection() as connection:
            pid = await connection.fetchval(
                "SELECT pid FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid() LIMIT 1"
            )
            if pid in self._it.servers.processes("postgres"):
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    async def _kill_database(self, fault: Fault) -> bool:
        postgres = self._it.servers.postgres
        async with self._broken:
            await (postgres.kill() if "kill" in fault.name else postgres.stop("immediate"))
            await asyncio.sleep(fault.seconds)
            await self._it.servers.restart_postgres()
        return True

    async def _lock_job(self, fault: Fault) -> bool:
        async with self._it.connection() as connection, connection.transaction():
            job = await connection.fetchval(
                "SELECT id FROM job WHERE status = 'running' ORDER BY id DESC LIMIT 1 FOR UPDATE"
            )
            await asyncio.sleep(fault.seconds)
        return job is not None

    async def _read_only(self, fault: Fault) -> bool:
        await self._set_read_only("on")
        await asyncio.sleep(fault.seconds)
        await self._set_read_only("off")
        return True

    async def _set_read_only(self, value: str) -> None:
        servers, name = self._it.servers, self._it.name

        async def set_it() -> None:
            await servers.administer(f"ALTER DATABASE {name} SET default_transaction_read_only = {value}")
            await servers.administer(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")

        async with self._broken:
            await until_answered(set_it, within=_RECOVERY_SECONDS)  # a backend that was killed takes the server along
