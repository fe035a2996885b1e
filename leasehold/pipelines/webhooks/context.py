"""What all deliveries of a worker share: one guarded way out, the keys to secrets, and who is under way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from leasehold.pipelines.webhooks.shares import Turns
from leasehold.security.egress import Egress
from leasehold.security.sealing import Sealing
from leasehold.settings import Settings


@dataclass(frozen=True, slots=True)
class Office:
    """`seconds`: the longest that one delivery may take, however slowly its receiver answers."""

    egress: Egress
    sealing: Sealing
    turns: Turns
    seconds: float


@asynccontextmanager
async def open_office(settings: Settings) -> AsyncIterator[Office]:
    turns = Turns(per_tenant=settings.webhook_per_tenant, per_host=settings.webhook_per_host)
    async with Egress.from_settings(settings) as egress:
        yield Office(egress, Sealing(settings), turns, settings.webhook_seconds)
