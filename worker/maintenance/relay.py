"""The relay: sends the hints that whoever committed them did not (it died, or the broker was away)."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

import structlog

from leasehold.broker import outbox
from leasehold.broker.announcer import Announcer
from leasehold.broker.base import Broker
from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection, Pool
from leasehold.runtime import failpoints
from leasehold.runtime.periodic import AWAY
from leasehold.runtime.poll_window import PollWindow
from leasehold.transitions.quarantine import STUCK_AFTER, set_aside
from leasehold.worker import metrics

log = structlog.get_logger(__name__)

EVERY_SECONDS = 0.5
#: The duty's name.
DUTY = "relay"
_BATCH = 500
#: A hint that was written too late to be seen is sent at the latest after this; its task is found by a look before.
_WHOLE_EVERY_SECONDS = 60.0


class Relay:
    """While the broker is away the rows wait in the table; work goes on by looking."""

    def __init__(self, pool: Pool, broker: Broker, announcer: Announcer) -> None:
        self._pool = pool
        self._broker = broker
        self._announcer = announcer
        self._window = PollWindow(whole_every=_WHOLE_EVERY_SECONDS)

    async def turn(self) -> float | None:
        """Returns 0 where there may be more to send."""
        if not self._broker.connected:
            return None
        async with self._pool.acquire() as connection:
            taken = await self._take(connection)
        failpoints.reach("before_relay")
        sent = await self._send(taken) if taken else 0
        metrics.RELAYED.inc(sent)
        return 0.0 if sent >= _BATCH else None

    async def _send(self, taken: Sequence[Announcement]) -> int:
        """Together; where that fails, each by itself: a hint that cannot be sent keeps back no other."""
        try:
            return await self._announcer.publish(taken)
        except AWAY:
            raise
        except Exception as error:  # noqa: BLE001 - of one of them, whatever it is: that one is written down
            if len(taken) == 1:
                await self._set_aside(taken[0], error)
                return 0
        return sum([await self._send([one]) for one in taken])

    async def _set_aside(self, hint: Announcement, error: Exception) -> None:
        """Tried again with growing pauses, and forgotten in the end: its task is found by looking."""
        async with self._pool.acquire() as connection, connection.transaction():
            if await set_aside(connection, DUTY, hint.outbox_id, error) >= STUCK_AFTER:
                await outbox.drop(connection, hint.outbox_id)
                log.error("a hint that cannot be sent was dropped", task_id=str(hint.hint.task_id))

    async def _take(self, connection: Connection) -> list[Announcement]:
        started_at, back = monotonic(), self._window.back()
        taken = await outbox.take(connection, _BATCH, back)
        self._window.polled(started_at, whole=back is None, oldest=None, overdue=0.0)
        if len(taken) == _BATCH:
            self._window.forget()
        return taken
