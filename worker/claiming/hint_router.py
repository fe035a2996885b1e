"""Hands each hint (a message that a task may be due) to the slot pool that serves the hint's queue. Hints come from the
broker, and from this worker's own commits.
"""

from __future__ import annotations

from collections.abc import Sequence

from leasehold.broker.announcer import Announcer
from leasehold.broker.base import Delivery, Hint
from leasehold.broker.outbox import Announcement
from leasehold.worker.claiming.slot_pool import SlotPool

#: If this many hints of one tenant wait in a slot pool, the pool gets no more of this tenant's hints from the worker's
#: own commits. The broker limits how many hints it delivers, but nothing limits how many steps a tenant's workflows
#: start. Without this bound, all their hints would stay in memory. A hint that the router leaves out comes later
#: through the broker, or a poll finds its task.
_MAX_WAITING = 1000


class HintRouter:
    """Each worker has one router. From the call of `add` on, a slot pool gets the hints of its queues."""

    def __init__(self, announcer: Announcer) -> None:
        self._announcer = announcer
        self._pools: dict[str, SlotPool] = {}

    def add(self, slot_pool: SlotPool) -> None:
        self._pools.update(dict.fromkeys(slot_pool.queues, slot_pool))

    def deliver(self, delivery: Delivery) -> None:
        """Hand a hint of the broker's consumer to the slot pool of its queue. Returns immediately."""
        self._pools[delivery.hint.queue].deliver(delivery)

    def wake(self, queue: str) -> None:
        """Make the slot pool of `queue` poll immediately. Call this when hints of the queue may have been lost."""
        if queue in self._pools:
            self._pools[queue].poll_soon()

    def announce(self, announcements: Sequence[Announcement]) -> None:
        """Publish the hints to all workers. Deliver them to this worker's own slot pools immediately, because a hint
        takes longer through the broker.
        """
        self._announcer.announce(announcements)
        self.deliver_here([announcement.hint for announcement in announcements])

    def deliver_here(self, hints: Sequence[Hint]) -> None:
        """Deliver the hints to this worker's own slot pools, and to no other worker. If `_MAX_WAITING` hints of one
        tenant wait in a pool, the router leaves out the tenant's further hints to this pool.
        """
        for hint in hints:
            slot_pool = self._pools.get(hint.queue)
            if slot_pool is not None and slot_pool.waiting_hints(hint.tenant) < _MAX_WAITING:
                slot_pool.deliver(Delivery(hint, _nothing_to_ack))


async def _nothing_to_ack() -> None:
    """A local hint has no message. The broker's copy of the hint is acknowledged when it arrives."""
