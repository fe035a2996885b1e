"""The relay sends hints (messages about due tasks) that remain in the outbox. The outbox is the table of the hints that
the broker has not confirmed. Normally the process that writes a hint sends it after the commit, with its announcer. A
hint remains in four cases: the process died, the process publishes no hints, the broker was away, or the announcer had
too many hints.
"""

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

#: Seconds between two turns.
EVERY_SECONDS = 0.5
#: The name of this duty (a loop of the worker).
DUTY = "relay"
#: The most hints of one turn.
_MAX_HINTS = 500
#: One turn splits at most this many rows of `outbox_batch` into rows of `outbox`. A row of `outbox_batch` has several
#: hints, seldom more than a hundred.
_MAX_SPLIT = 20
#: Most turns read only the rows in the poll window: those that became due since the last turn. About once in this many
#: seconds, a turn reads the whole outbox, because the window misses a row whose transaction committed long after its
#: `relay_at`. In most cases, a poll of a slot pool has found the task of such a row by then.
_WHOLE_EVERY_SECONDS = 60.0


class Relay:
    """The relay of one worker. While the broker is away, the hints wait in the outbox table, and the slot pools find
    the tasks by polls.
    """

    def __init__(self, pool: Pool, broker: Broker, announcer: Announcer) -> None:
        self._pool = pool
        self._broker = broker
        self._announcer = announcer
        self._window = PollWindow(whole_every=_WHOLE_EVERY_SECONDS)

    async def turn(self) -> float | None:
        """Send the hints of one turn. Returns 0 (the next turn comes immediately) if there may be more hints; otherwise
        None.
        """
        if not self._broker.publishing:
            return None
        async with self._pool.acquire() as connection:
            announcements, is_all = await self._take(connection)
        failpoints.reach("before_relay")  # a failpoint: here a test can stop or kill the process
        sent_count = await self._send(announcements) if announcements else 0
        metrics.RELAYED.inc(sent_count)
        # If the broker has not confirmed all hints, the next turn comes after the usual pause.
        return None if is_all or sent_count < len(announcements) else 0.0

    async def _send(self, announcements: Sequence[Announcement]) -> int:
        """Send all hints together. If that fails, send each hint alone. A hint that fails alone is set aside, so that
        it delays no other hint. Returns how many hints were sent.
        """
        try:
            return await self._announcer.publish(announcements)
        except AWAY:
            raise
        except Exception as error:  # noqa: BLE001 - of any kind: one of the hints is at fault, and is set aside
            if len(announcements) == 1:
                await self._set_aside(announcements[0], error)
                return 0
        return sum([await self._send([announcement]) for announcement in announcements])

    async def _set_aside(self, announcement: Announcement, error: Exception) -> None:
        """Record that a hint cannot be sent, and try it again when its quarantine ends. After `STUCK_AFTER` tries, drop
        the hint, because a poll finds its task.
        """
        async with self._pool.acquire() as connection, connection.transaction():
            outbox_id = announcement.outbox_id
            assert outbox_id is not None  # the relay takes rows of `outbox` only
            if await set_aside(connection, DUTY, outbox_id, error) >= STUCK_AFTER:
                await outbox.drop(connection, outbox_id)
                log.error("a hint that cannot be sent was dropped", task_id=str(announcement.hint.task_id))
            else:
                await outbox.put_off(connection, outbox_id, DUTY)

    async def _take(self, connection: Connection) -> tuple[list[Announcement], bool]:
        """The hints of one turn, and whether these are all hints that are due."""
        started_at, seconds_back = monotonic(), self._window.seconds_back()
        batches = await outbox.split(connection, _MAX_SPLIT, seconds_back)
        announcements = await outbox.take(connection, _MAX_HINTS, seconds_back)
        # `oldest=None`: every hint that was taken leaves the outbox, or becomes due again later. So the next window
        # begins at this turn.
        self._window.polled(started_at, whole=seconds_back is None, oldest=None, min_overdue=0.0)
        is_all = batches < _MAX_SPLIT and len(announcements) < _MAX_HINTS
        if not is_all:
            self._window.forget()  # the next turn reads the whole outbox
        return announcements, is_all
