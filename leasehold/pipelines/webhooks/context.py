"""The delivery context, which all deliveries of one worker use. The context has an HTTP client that never connects to
private addresses, the keys that seal (encrypt) secrets, and limits for tenants and hosts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from leasehold.pipelines.webhooks.limits import DeliveryLimits
from leasehold.security.egress import Egress
from leasehold.security.sealing import Sealing
from leasehold.settings import Settings


@dataclass(frozen=True, slots=True)
class DeliveryContext:
    """`seconds`: the longest time of one delivery, even if the receiver answers slowly."""

    egress: Egress
    sealing: Sealing
    limits: DeliveryLimits
    seconds: float


@asynccontextmanager
async def open_delivery_context(settings: Settings) -> AsyncIterator[DeliveryContext]:
    limits = DeliveryLimits(per_tenant=settings.webhook_per_tenant, per_host=settings.webhook_per_host)
    async with Egress.from_settings(settings) as egress:
        yield DeliveryContext(egress, Sealing(settings), limits, settings.webhook_seconds)
