"""Keeps the hints (messages that a task may be due) that a slot pool has received, for each tenant separately. A hint
waits here, unacknowledged, until its tenant may take a slot. Then the pool takes the hint, and claims the hint's task.
When the worker stops, the broker redelivers the waiting hints to other workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from uuid import UUID

from leasehold.broker.base import Delivery
from leasehold.worker.claiming.shares import Shares

#: The tenants with hints stand in line. For each free slot, at most this many tenants are compared, from the front of
#: the line. The tenant that gets the slot moves to the end of the line, so that all tenants have their turn.
_MAX_COMPARED = 32


class Hints:
    """The waiting hints. The slot pool adds each hint (a delivery of the broker), and takes one hint for each free
    slot.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._waiting: dict[str, deque[Delivery]] = {}  # tenant -> its hints; the order of the tenants is the line

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def count(self, tenant: str) -> int:
        """How many hints of the tenant wait."""
        return len(self._waiting.get(tenant, ()))

    def add(self, delivery: Delivery) -> None:
        self._waiting.setdefault(delivery.hint.tenant, deque()).append(delivery)

    def remove(self, is_unwanted: Callable[[UUID], bool]) -> list[Delivery]:
        """Remove the hints of those tasks for which `is_unwanted` returns True. Returns their deliveries."""
        removed: list[Delivery] = []
        for tenant, deliveries in list(self._waiting.items()):
            unwanted = [delivery for delivery in deliveries if is_unwanted(delivery.hint.task_id)]
            for delivery in unwanted:
                deliveries.remove(delivery)
            if not deliveries:
                del self._waiting[tenant]
            removed += unwanted
        return removed

    def clear(self) -> None:
        self._waiting.clear()

    def take(self) -> Delivery | None:
        """The next hint of the tenant that runs the fewest steps, among the tenants that may take a slot. Returns None
        if no tenant with a hint may take a slot.
        """
        tenant = self._next_tenant()
        if tenant is None:
            return None
        deliveries = self._waiting[tenant]
        delivery = deliveries.popleft()
        if not deliveries:
            del self._waiting[tenant]
        elif len(self._waiting) > 1:
            self._waiting[tenant] = self._waiting.pop(tenant)  # to the end of the line
        return delivery

    def _next_tenant(self) -> str | None:
        chosen: str | None = None
        for tenant in islice(filter(self._shares.may_take, self._waiting), _MAX_COMPARED):
            if chosen is None or self._shares.running(tenant) < self._shares.running(chosen):
                chosen = tenant
            if not self._shares.running(chosen):
                break  # no tenant can run fewer steps than the chosen one, which runs none
        return chosen

    def lighter_tenant_waits(self, tenant: str) -> bool:
        """Whether another tenant has a hint here and runs at least two steps fewer than `tenant`. Then a slot of
        `tenant` should go to the other tenant. If the other tenant ran only one step fewer, the two tenants would only
        change places. Only the first _MAX_COMPARED tenants in line are compared.
        """
        at_most = self._shares.running(tenant) - 2
        if at_most < 0 or not self._waiting or (len(self._waiting) == 1 and tenant in self._waiting):
            return False  # no other tenant can run two steps fewer, or no other tenant has a hint
        compared = islice(self._waiting, _MAX_COMPARED)
        return any(self._shares.running(other) <= at_most for other in compared if other != tenant)
