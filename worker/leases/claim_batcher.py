"""Claims tasks for the claimer. The claimer gets hints (messages that a task is due), and asks this module to claim
their tasks. The tasks of all requests that arrive during one round trip are claimed together in the next round trip.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from time import perf_counter
from uuid import UUID

from leasehold.db.batcher import Batcher
from leasehold.db.database import Connection, connect, end_timed_out
from leasehold.settings import Settings
from leasehold.transitions import claims
from leasehold.transitions.claims import Claimed, LeaseTerms
from leasehold.worker import metrics
from leasehold.worker.leases.heartbeat import Heartbeat

#: Seconds between two checks whether the heartbeat has confirmed the ownership of a task.
_UNCONFIRMED_SECONDS = 0.02
#: How many seconds a claim waits while the database is away. There is no limit. If a claim gave up, the worker would
#: acknowledge the hint, and the task would wait until a poll finds it.
_PATIENCE = float("inf")


@dataclass(frozen=True, slots=True)
class _Request:
    """A claim of one task. `dead`: owners that have died; the claim may take over their leases."""

    task_id: UUID
    dead: tuple[UUID, ...] = field(default=())


class _Held(Enum):
    """The answer for a task that this worker held already when the batch began. The statement leaves this task out."""

    HELD = auto()


class ClaimBatcher:
    """Claims tasks for all slot pools of the worker, over one connection. `at_most`: how many tasks one statement may
    claim.
    """

    def __init__(self, settings: Settings, terms: LeaseTerms, heartbeat: Heartbeat, at_most: int) -> None:
        self._terms = terms
        self._heartbeat = heartbeat
        self._batcher: Batcher[_Request, Claimed | _Held | None] = Batcher(
            lambda: connect(settings, "claims"),
            self._claim,
            name="claims",
            at_most=at_most,
            patience=_PATIENCE,
            sets_aside=True,  # a claim that takes too long delays no other claim
        )
        self.start, self.close = self._batcher.start, self._batcher.close

    async def claim(self, task_id: UUID, dead: tuple[UUID, ...] = ()) -> Claimed | None:
        """Claim the task. None: there is nothing to run for this hint, and the caller acknowledges it. In this case the
        task is finished, not due, unknown, of a paused queue, leased by a living worker, or held by this worker. Or too
        many workers were lost while they ran the task. Or its job is being cancelled, and the task is no workflow.

        Waits while this worker seems to hold the task but the ownership is unconfirmed. If this method returned None
        instead, the caller would acknowledge the hint. But the lease may be lost, or the task may have just been
        settled and be due again. In both cases this hint may be the last one.
        """
        while True:
            if self._heartbeat.holds(task_id) and await self._holds_for_certain(task_id):
                return None
            answer = await self._batcher.ask(_Request(task_id, dead))
            if answer is not _Held.HELD:  # HELD: another request has claimed the task meanwhile, so check again
                return answer

    async def _holds_for_certain(self, task_id: UUID) -> bool:
        """Whether this worker holds the task. Waits until the answer is certain."""
        while self._heartbeat.holds(task_id):
            if self._heartbeat.ownership_confirmed(task_id):
                return True
            await asyncio.sleep(_UNCONFIRMED_SECONDS)
        return False

    # Claim the tasks of one batch. Returns one answer for each request, in the order of the requests.
    async def _claim(
        self,
        connection: Connection,
        requests: Sequence[_Request],
        repeated: bool,  # noqa: FBT001 - the Batcher's signature
    ) -> list[Claimed | _Held | None]:
        dead = {owner for request in requests for owner in request.dead}
        held_ids = {request.task_id for request in requests if self._heartbeat.holds(request.task_id)}
        ids_to_claim = {request.task_id for request in requests} - held_ids
        by_task: dict[UUID, Claimed] = {}
        if ids_to_claim:
            began = perf_counter()
            # `reclaim`: the batcher repeats a statement whose answer was lost. The earlier try may have taken leases,
            # and the repetition takes these leases again.
            try:
                claimed_tasks = await claims.claim(connection, self._terms, [*ids_to_claim], [*dead], reclaim=repeated)
            except asyncio.CancelledError:
                # The worker closes. Cancel the statement in PostgreSQL, too, because it may wait for a lock. If the
                # statement went on, it could give a task to this worker after the worker has released its tasks and
                # deleted its row.
                await end_timed_out(connection)
                raise
            metrics.observe_duration("claim", began)
            by_task = {claimed.lease.task_id: claimed for claimed in claimed_tasks}
            if repeated:
                # The earlier try may have claimed a task whose job is being cancelled by now. The repetition does not
                # claim such a task again. PostgreSQL then names this worker as the task's owner, but the worker does
                # not know it. The heartbeat finds such tasks and releases them.
                self._heartbeat.record_lost_answer()
        # `pop`: if two requests name the same task, only the first gets the lease.
        return [
            _Held.HELD if request.task_id in held_ids else by_task.pop(request.task_id, None) for request in requests
        ]
