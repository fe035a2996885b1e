"""Brokers for these tests: opened on the test's own virtual host, closed at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel
from pydantic import SecretStr

from leasehold.broker import Broker, Hint, make_broker
from leasehold.settings import Settings
from tests.broker.wire import Wire
from tests.support.broker_room import BROKER_ROOM

OpenBroker = Callable[..., Awaitable[Broker]]


def hints(count: int, queue: str = "media", band: int = 1) -> list[Hint]:
    return [Hint(uuid4(), queue, band) for _ in range(count)]


def ids(some: list[Hint]) -> set[UUID]:
    return {hint.task_id for hint in some}


async def until(holds: Callable[[], bool]) -> None:
    """Look again and again; the test's own time limit ends what never comes."""
    while not holds():
        await asyncio.sleep(0.01)


async def publish_until_confirmed(broker: Broker, some: list[Hint]) -> None:
    """Do what the relay does: send again what was not confirmed."""
    while some:
        confirmed = await broker.publish(some)
        some = [hint for hint, sure in zip(some, confirmed, strict=True) if not sure]
        await asyncio.sleep(0.05 if some else 0)


async def check_with_growing_silence(observe: Callable[[float], Awaitable[object]], expected: object) -> None:
    """Observe with an `amqp_silence_seconds` of 0.5, of 2 and of 8 until it is as expected: a busy machine may keep
    RabbitMQ from its processor for longer than the first ones.
    """
    for silence_seconds in (0.5, 2.0, 8.0):
        observed = await observe(silence_seconds)
        if observed == expected:
            return
    assert observed == expected


@asynccontextmanager
async def raw_channel(url: str) -> AsyncIterator[AbstractChannel]:
    """Reach around the broker: to send garbage, to delete a queue, to count what is left."""
    connection = await aio_pika.connect(url)
    async with connection, connection.channel() as channel:
        yield channel


async def left_in(url: str, queue: str) -> int:
    """Count the messages that nobody holds."""
    async with raw_channel(url) as channel:
        declared = await channel.declare_queue(queue, passive=True)
        return declared.declaration_result.message_count or 0


@pytest.fixture
async def open_broker(amqp_url: str) -> AsyncIterator[OpenBroker]:
    """Open brokers: `await open_broker(url=..., connected=True, **settings)`. A test that waits a limit out names it:
    a busy machine may keep RabbitMQ from its processor for seconds.
    """
    opened: list[Broker] = []

    async def open_one(url: str = amqp_url, *, connected: bool = True, **settings: Any) -> Broker:
        broker = make_broker(Settings(_env_file=None, amqp_url=SecretStr(url), **(BROKER_ROOM | settings)))
        opened.append(broker)
        await broker.open()
        if connected:
            await until(lambda: broker.connected)
        return broker

    yield open_one
    for broker in opened:
        await broker.close()


@pytest.fixture
async def wire(amqp_url: str) -> AsyncIterator[Wire]:
    """A cable to the test's virtual host."""
    cable = Wire(amqp_url)
    await cable.open()
    yield cable
    await cable.close()
