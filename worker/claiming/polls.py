"""The looks of one slot pool into the database: each goes no further back than it has to, and counts no more often."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from leasehold.db.database import Connection
from leasehold.transitions import claims
from leasehold.transitions.claims import LeaseTerms, Polled
from leasehold.worker.claiming.poll_window import PollWindow
from leasehold.worker.claiming.shares import Rooms
from leasehold.worker.claiming.tenant_load import TenantLoad


class Polls:
    """Always for the same queues."""

    def __init__(self) -> None:
        self._horizon = PollWindow()
        self._turns = TenantLoad()

    async def take(
        self, connection: Connection, terms: LeaseTerms, queues: Sequence[str], limit: int, overdue: float, rooms: Rooms
    ) -> Polled:
        """As `claims.poll`."""
        asked_at, back = monotonic(), self._horizon.back()
        looked = await claims.poll(
            connection,
            terms,
            queues,
            limit,
            overdue=overdue,
            back=back,
            running=self._turns.running(),
            shares=rooms.of,
            other_room=rooms.other,
            other_overdue=rooms.other_overdue,
        )
        self._horizon.looked(asked_at, whole=back is None, oldest=looked.oldest, overdue=overdue)
        self._turns.looked(asked_at, looked.running)
        return looked
