"""Carries out the polls (queries for due tasks) of one set of queues. Most polls read only the poll window: the tasks
that became due since about the last poll (runtime/poll_window.py). Now and then a poll reads all due tasks. A poll
counts the running tasks of all tenants only when a new count is due. The claimer calls `Polls.claim`.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from leasehold.db.database import Connection
from leasehold.runtime.poll_window import PollWindow
from leasehold.transitions import claims
from leasehold.transitions.claims import LeaseTerms, Polled
from leasehold.worker.claiming.shares import Rooms
from leasehold.worker.claiming.tenant_load import TenantLoad


class Polls:
    """The poll window, and the last count of running tasks. Call `claim` with the same queues each time, because the
    poll window holds for these queues only.
    """

    def __init__(self) -> None:
        self._window = PollWindow()
        self._load = TenantLoad()

    async def claim(
        self, connection: Connection, terms: LeaseTerms, queues: Sequence[str], limit: int, overdue: float, rooms: Rooms
    ) -> Polled:
        """Claim up to `limit` due tasks, as `leasehold.transitions.claims.poll` does. `overdue`: the poll leaves out a
        `pending` task until it has been due for this many seconds, because its message (hint) may still come. `rooms`:
        how many more tasks each tenant may get. If `rooms.others_overdue` is set, it is a shorter `overdue` for tenants
        that run nothing in this slot pool.
        """
        started_at, seconds_back = monotonic(), self._window.seconds_back()
        polled = await claims.poll(
            connection,
            terms,
            queues,
            limit,
            overdue=overdue,
            back=seconds_back,
            running=self._load.running(),
            shares=rooms.by_tenant,
            other_room=rooms.for_others,
            other_overdue=rooms.others_overdue,
        )
        # `polled.oldest`: for how many seconds the oldest task that the poll read has been due.
        self._window.polled(started_at, whole=seconds_back is None, oldest=polled.oldest, min_overdue=overdue)
        self._load.polled(started_at, polled.running)
        return polled
