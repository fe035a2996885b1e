"""How a slot pool gets leases: `claim` for a hint, with takeover, and `poll` for due tasks without hints."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from uuid import UUID

from leasehold.broker.base import Delivery
from leasehold.db.database import Pool
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.transitions import workers
from leasehold.transitions.claims import Claimed, LeaseTerms, Polled
from leasehold.worker.claiming.polls import Polls
from leasehold.worker.claiming.shares import Rooms
from leasehold.worker.leases.claim_batcher import ClaimBatcher
from leasehold.worker.leases.heartbeat import Heartbeat

#: The broker redelivers the moment a worker's socket closes. PostgreSQL may drop that worker's presence a little later.
#: So the claimer asks for a dead owner after each of these pauses (seconds).
_TAKEOVER_PAUSES = (0.02, 0.1, 0.3)


class Claimer:
    """Serves all slot pools of a worker. `takes_over`: presence is on, so the claimer can see that an owner died."""

    def __init__(
        self,
        pool: Pool,
        batcher: ClaimBatcher,
        heartbeat: Heartbeat,
        terms: LeaseTerms,
        *,
        at_most: int,
        takes_over: bool,
    ) -> None:
        self._pool = pool
        self._batcher = batcher
        self._heartbeat = heartbeat
        self._terms = terms
        self._at_most = at_most
        self._takes_over = takes_over
        self._polls: defaultdict[tuple[str, ...], Polls] = defaultdict(Polls)

    def holds(self, task_id: UUID) -> bool:
        return self._heartbeat.holds(task_id)

    async def claim(self, delivery: Delivery) -> Claimed | None:
        """Claim the hinted task. None: this worker gets no lease for the hint, and the caller acknowledges the hint.

        The owner of a redelivered hint's task may have just died: then this worker takes the lease over now.
        """
        task_id = delivery.hint.task_id
        claimed = await self._batcher.claim(task_id)
        if claimed is not None or not delivery.redelivered or not self._takes_over:
            return claimed
        for pause in _TAKEOVER_PAUSES:
            await asyncio.sleep(pause)
            owner = await self._dead_owner(task_id)
            if owner is not None:
                return await self._batcher.claim(task_id, (owner,))
        # The sweeper may have ended the lease during the first claim, which still saw it.
        return await self._batcher.claim(task_id)

    async def poll(self, queues: tuple[str, ...], limit: int, overdue: float, rooms: Rooms) -> Polled:
        """Claim up to `limit` due tasks of `queues`. Tasks that were due for less than `overdue` seconds are left to
        their hints.
        """
        async with self._pool.acquire() as connection:
            polls = self._polls[queues]
            return await polls.claim(connection, self._terms, queues, min(limit, self._at_most), overdue, rooms)

    async def _dead_owner(self, task_id: UUID) -> UUID | None:
        """The owner of the task's lease, if the owner's presence has ended. None also while the database is away: then
        the sweeper finds the task later.
        """
        try:
            async with self._pool.acquire() as connection:
                return await workers.dead_owner(connection, task_id)
        except TRY_AGAIN:
            return None
