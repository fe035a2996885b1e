"""Brokers carry hints from a commit to the workers. `make_broker` is the only place that knows the kinds of brokers."""

from __future__ import annotations

from leasehold.broker.amqp.broker import AmqpBroker
from leasehold.broker.base import BANDS, Broker, Delivery, Hint
from leasehold.broker.postgres import PostgresBroker
from leasehold.settings import Settings

__all__ = ["BANDS", "Broker", "Delivery", "Hint", "make_broker"]


def make_broker(settings: Settings) -> Broker:
    """Make the broker that `settings.broker` names; it is not open yet."""
    return AmqpBroker(settings) if settings.broker == "amqp" else PostgresBroker(settings)
