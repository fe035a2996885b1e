"""A worker with the wrong order: it acknowledges a hint, and the broker forgets it, before anything else is done."""

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

    SlotPool._follow = acknowledged_first  # type: ignore[method-assign]  # the order is what this worker has wrong
    main()
