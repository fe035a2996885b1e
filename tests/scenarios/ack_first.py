"""A worker with a wrong order, for a test: it acknowledges a hint before it does anything else."""

from __future__ import annotations

import asyncio
from typing import Any

from leasehold.broker.base import Delivery
from leasehold.worker.claiming.slot_pool import SlotPool
from leasehold.worker.main import main

_UNTIL_THE_BROKER_KNOWS = 0.3  # seconds

if __name__ == "__main__":
    follow = SlotPool._follow

    async def acknowledged_first(self: Any, delivery: Delivery) -> None:
        await delivery.ack()
        await asyncio.sleep(_UNTIL_THE_BROKER_KNOWS)
        await follow(self, delivery)

    SlotPool._follow = acknowledged_first  # type: ignore[method-assign]  # this worker is wrong on purpose
    main()
