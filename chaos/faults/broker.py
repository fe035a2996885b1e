"""Faults of the broker: it is killed, stopped or out of memory, its queues are emptied or deleted, or it gets foreign
messages. One fault also kills the database.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import aio_pika

from chaos.amqp_tap import HintEvent
from chaos.faults.effects import FaultMaker, TrafficWatch
from chaos.plan import Fault
from chaos.proxy import Link
from chaos.stack import Installation
from leasehold.broker.base import Hint
from leasehold.broker.envelope import encode
from leasehold.embedded.rabbitmq import RabbitMQ

#: The longest waits: until the platform declares deleted queues anew, and until a queue gets a message.
_DECLARE_SECONDS = 10.0
_FILL_SECONDS = 4.0


class BrokerFaults:
    """Each fault returns the number of connections that it broke, or of bytes or messages that it hit."""

    def __init__(self, installation: Installation, server_lock: asyncio.Lock, rng: random.Random) -> None:
        self._installation = installation
        self._rng = rng
        self._server_lock = server_lock

    @property
    def makers(self) -> Mapping[str, FaultMaker]:
        return {
            "F13": self._kill,
            "F14": self._kill_declaring,
            "F15": self._stop,
            "F16": self._kill,
            "F17": self._alarm,
            "F18 purge": self._purge,
            "F18 delete": self._delete_queues,
            "F20": self._send_garbage,
            "F39": self._kill_with_database,
        }

    @property
    def _rabbitmq(self) -> RabbitMQ:
        rabbitmq = self._installation.servers.rabbitmq
        assert rabbitmq is not None
        return rabbitmq

    @property
    def _links(self) -> list[Link]:
        return self._installation.links_to("amqp")

    async def _kill(self, fault: Fault) -> int:
        async with self._server_lock:
            hit = sum(link.open_connections for link in self._links)
            await self._rabbitmq.kill()
            await asyncio.sleep(fault.seconds)
            await self._rabbitmq.start()
        return hit

    async def _kill_declaring(self, fault: Fault) -> int:
        """Delete the queues, and kill the broker when the platform has just declared them anew. The broker has not yet
        written them to its disk: they may be gone when it is back.
        """
        async with self._server_lock:
            if not await self._delete_queues(fault):
                return 0
            deadline = time.monotonic() + _DECLARE_SECONDS
            while not (declared := await self._queues()) and time.monotonic() < deadline:  # noqa: ASYNC110 - RabbitMQ sends no event
                await asyncio.sleep(0.05)
            await self._rabbitmq.kill()
            await self._rabbitmq.start()
        return len(declared)

    async def _kill_with_database(self, fault: Fault) -> int:
        """Kill the database and the broker in the same moment. They come back in either order."""
        async with self._server_lock:
            links = [*self._links, *self._installation.links_to("postgres")]
            hit = sum(link.open_connections for link in links)
            await asyncio.gather(self._rabbitmq.kill(), self._installation.servers.postgres.kill())
            await asyncio.sleep(fault.seconds)
            await asyncio.gather(self._rabbitmq.start(), self._installation.servers.restart_postgres())
        return hit

    async def _queues(self) -> list[dict[str, Any]]:
        queues: list[dict[str, Any]] = await self._rabbitmq.management.call(
            "GET", f"/api/queues/{self._installation.name}"
        )
        return queues

    async def _stop(self, fault: Fault) -> int:
        async with self._server_lock:
            traffic = TrafficWatch(self._links)
            self._installation.servers.signal("rabbitmq", signal.SIGSTOP)
            await asyncio.sleep(fault.seconds)
            self._installation.servers.signal("rabbitmq", signal.SIGCONT)
        return traffic.since.sent

    async def _alarm(self, fault: Fault) -> int:
        """Make the broker believe that its memory or disk is full. Meanwhile it reads nothing from publishers."""
        rabbitmq = self._rabbitmq
        async with self._server_lock:
            set_limit, impossible = (
                (rabbitmq.allow_memory, "1MB") if "memory" in fault.name else (rabbitmq.need_free_disk, "100000GB")
            )
            await set_limit(impossible)
            try:
                records_before = len(self._installation.hint_records)
                await asyncio.sleep(fault.seconds)
                if not await rabbitmq.management.has_alarm():
                    return 0
                return self._unconfirmed(records_before)
            finally:
                await set_limit()

    def _unconfirmed(self, since: int) -> int:
        """How many hints were published and not confirmed, from the index `since` of `hint_records` on."""
        unconfirmed = 0
        for record in self._installation.hint_records[since:]:
            unconfirmed += (record.event is HintEvent.PUBLISHED) - (record.event is HintEvent.CONFIRMED)
        return max(0, unconfirmed)

    async def _delete_queues(self, _fault: Fault) -> int:
        try:
            queues = await self._queues()
            for queue in queues:
                await self._rabbitmq.management.call("DELETE", f"/api/queues/{self._installation.name}/{queue['name']}")
        except OSError:
            return 0  # the broker is away
        return len(queues)

    async def _purge(self, _fault: Fault) -> int:
        """Cut the workers off, so that the queues get messages: new hints, and the hints that the workers held. Then
        empty the queues.
        """
        links = [self._installation.links[worker, "amqp"] for worker in self._installation.plan.workers]
        for link in links:
            link.hold()
            link.reset()
        try:
            return await self._purge_until_lost()
        except (OSError, TimeoutError, aio_pika.exceptions.AMQPError):
            return 0
        finally:
            for link in links:
                link.heal()

    async def _purge_until_lost(self) -> int:
        """Purge the queues again and again, until messages were lost. Returns their number."""
        lost, until = 0, time.monotonic() + _FILL_SECONDS
        names = [queue["name"] for queue in await self._queues()]
        async with await aio_pika.connect(self._installation.amqp_url, timeout=3) as broker:
            channel = await broker.channel()
            while not lost and time.monotonic() < until:
                for name in names:
                    queue = await channel.get_queue(name, ensure=False)
                    lost += (await queue.purge(timeout=3)).message_count or 0
                await asyncio.sleep(0.1)
        return lost

    async def _send_garbage(self, _fault: Fault) -> int:
        """Send hints of existing tasks five times each, a hint of a task that does not exist, and bodies that are not
        hints.
        """
        async with self._installation.connection() as connection:
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
            async with await aio_pika.connect(self._installation.amqp_url, timeout=3) as broker:
                channel = await broker.channel()
                for body in bodies:
                    message = aio_pika.Message(body)
                    await channel.default_exchange.publish(message, "leasehold.chaos.normal", timeout=3)
        except (OSError, TimeoutError, aio_pika.exceptions.AMQPError):
            return 0
        return len(bodies)
