"""The relay: sends the hints that whoever committed them did not (it died, or the broker was away)."""

from __future__ import annotations

import asyncio
from time import monotonic

import structlog

from leasehold import failpoints, outbox
from leasehold.announcer import Announcer
from leasehold.broker.base import Broker
from leasehold.database import TRY_AGAIN, Connection, Pool
from leasehold.outbox import Announcement
from worker import metrics
from worker.horizon import Horizon

log = structlog.get_logger(__name__)

_BATCH = 500
#: A hint that was written too late to be seen is sent at the latest after this; its task is found by a look before.
_WHOLE_EVERY_SECONDS = 60.0


async def relay(pool: Pool, broker: Broker, announcer: Announcer, pause: float) -> None:
    """Run for ever. While the broker is away the rows wait in the table; work goes on by looking."""
    horizon = Horizon(whole_every=_WHOLE_EVERY_SECONDS)
    while True:
        sent = 0
        if broker.connected:
            try:
                async with pool.acquire() as connection:
                    taken = await _take(connection, horizon)
                failpoints.reach("before_relay")
                sent = await announcer.publish(taken) if taken else 0
            except TRY_AGAIN as error:
                log.warning("the relay will try again", error=type(error).__name__)
        metrics.RELAYED.inc(sent)
        if sent < _BATCH:
            await asyncio.sleep(pause)


async def _take(connection: Connection, horizon: Horizon) -> list[Announcement]:
    asked_at, back = monotonic(), horizon.back()
    taken = await outbox.take(connection, _BATCH, back)
    horizon.looked(asked_at, whole=back is None, oldest=None, overdue=0.0)
    if len(taken) == _BATCH:
        horizon.forget()
    return taken
