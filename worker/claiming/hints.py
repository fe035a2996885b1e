"""The hints that a pool has in hand, by tenant. They are not acknowledged: a hint waits here until its tenant may take
a slot, and goes back to the broker when the worker stops.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from leasehold.broker.base import Delivery
from leasehold.worker.claiming.shares import Shares

#: Of so many tenants that may take a slot, the one that runs least is chosen; they move behind the others in turn.
_COMPARED = 32


class Hints:
    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._waiting: dict[str, deque[Delivery]] = {}  # in the order of the tenants' turns

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, delivery: Delivery) -> None:
        self._waiting.setdefault(delivery.hint.tenant, deque()).append(delivery)

    def clear(self) -> None:
        self._waiting.clear()

    def take(self) -> Delivery | None:
        """The next hint of the tenant that runs least, of those that may take a slot; None: there is no such hint."""
        chosen = self._chosen()
        if chosen is None:
            return None
        waiting = self._waiting[chosen]
        delivery = waiting.popleft()
        if not waiting:
            del self._waiting[chosen]
        elif len(self._waiting) > 1:
            self._waiting[chosen] = self._waiting.pop(chosen)
        return delivery

    def _chosen(self) -> str | None:
        chosen: str | None = None
        compared = 0
        for tenant in self._waiting:
            if not self._shares.may_take(tenant):
                continue
            if chosen is None or self._shares.running(tenant) < self._shares.running(chosen):
                chosen = tenant
            compared += 1
            if compared >= _COMPARED or not self._shares.running(chosen):
                break
        return chosen

    def waits_with_less(self, tenant: str) -> bool:
        """Whether another tenant waits that runs at least two steps less: a slot of `tenant` is better its."""
        others = len(self._waiting) - (tenant in self._waiting)
        bound = self._shares.running(tenant) - 1
        return others > 0 < bound and any(
            self._shares.running(other) < bound for other in islice(self._waiting, _COMPARED) if other != tenant
        )
