"""Brokers carry hints (messages that tell workers of due tasks) from a commit to the workers. Only `make_broker`
chooses the kind of broker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from leasehold.broker.amqp.broker import AmqpBroker
from leasehold.broker.base import BANDS, Broker, Delivery, Hint
from leasehold.broker.postgres import PostgresBroker
from leasehold.settings import Settings

__all__ = ["BANDS", "Broker", "Delivery", "Hint", "make_broker", "open_broker"]


def make_broker(settings: Settings) -> Broker:
    """Make the broker that `settings.broker` names, without opening it."""
    return AmqpBroker(settings) if settings.broker == "amqp" else PostgresBroker(settings)


@asynccontextmanager
async def open_broker(settings: Settings) -> AsyncIterator[Broker]:
    """Open the broker that `settings.broker` names, and close it after the block. The broker connects in the
    background, and reconnects after an outage.
    """
    broker = make_broker(settings)
    await broker.open()
    try:
        yield broker
    finally:
        await broker.close()
