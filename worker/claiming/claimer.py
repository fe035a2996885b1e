"""Claims tasks for the slot pools of a worker. `claim` claims the task of one hint (a message that a task is due).
`poll` finds and claims due tasks without a hint.
"""

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

#: A worker that dies holds unacknowledged hints. The broker redelivers them as soon as the worker's socket closes.
#: PostgreSQL may drop the worker's presence (the lock that each living worker holds) a little later. So the claimer
#: checks after each of these pauses (seconds) whether the owner of the lease has died.
_TAKEOVER_PAUSES = (0.02, 0.1, 0.3)


class Claimer:
    """Claims tasks for all slot pools of a worker. `max_claims`: a poll claims at most this many tasks. `takes_over`:
    whether the workers have a presence. Without presence, the claimer cannot see that the owner of a lease has died.
    """

    def __init__(
        self,
        pool: Pool,
        batcher: ClaimBatcher,
        heartbeat: Heartbeat,
        terms: LeaseTerms,
        *,
        max_claims: int,
        takes_over: bool,
    ) -> None:
        self._pool = pool
        self._batcher = batcher
        self._heartbeat = heartbeat
        self._terms = terms
        self._max_claims = max_claims
        self._takes_over = takes_over
        self._polls: defaultdict[tuple[str, ...], Polls] = defaultdict(Polls)  # by the queues of a slot pool

    def holds(self, task_id: UUID) -> bool:
        return self._heartbeat.holds(task_id)

    def holds_for_certain(self, task_id: UUID) -> bool:
        """Whether this worker certainly holds the task (`Heartbeat.ownership_confirmed`). Then a further hint of the
        task is a duplicate.
        """
        return self._heartbeat.holds(task_id) and self._heartbeat.ownership_confirmed(task_id)

    async def claim(self, delivery: Delivery) -> Claimed | None:
        """Claim the task of the hint. None: this worker cannot claim the task now, and the caller acknowledges the
        hint. While PostgreSQL does not answer, this method waits. So it raises only errors that waiting cannot cure.

        A redelivered hint may come from a worker that has just died. If that worker owns the lease, this worker takes
        the lease over immediately.
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
        # During the pauses, the sweeper may have ended the lease of the dead worker. (The sweeper is a duty of the
        # leader, the one worker that does the duties of the whole fleet.)
        return await self._batcher.claim(task_id)

    async def poll(self, queues: tuple[str, ...], limit: int, overdue: float, rooms: Rooms) -> Polled:
        """Claim up to `limit` due tasks of `queues`. `rooms` bounds how many of them one tenant gets. The poll leaves
        out `pending` tasks that have been due for less than `overdue` seconds, because hints announce these (see
        Polls.claim). If PostgreSQL's answer is lost, the heartbeat releases the tasks that the poll has claimed.
        """
        polls = self._polls[queues]
        try:
            async with self._pool.acquire() as connection:
                return await polls.claim(connection, self._terms, queues, min(limit, self._max_claims), overdue, rooms)
        except TRY_AGAIN:
            self._heartbeat.record_lost_answer()
            raise

    async def _dead_owner(self, task_id: UUID) -> UUID | None:
        """The owner of the task's lease, if that worker has died; else None. Also returns None while the database does
        not answer. In this case the sweeper frees the task later.
        """
        try:
            async with self._pool.acquire() as connection:
                return await workers.dead_owner(connection, task_id)
        except TRY_AGAIN:
            return None
