"""How the slots of one pool are shared by tenants. Nobody can take a slot back from a step that runs for an hour, so a
part of the slots is kept for those who have less, whether or not they are there.

A tenant may run `most` steps in a pool, and the pool has an eighth more slots than that. Of these a tenant takes
another only while it runs fewer than `GREED` times as many as are unused: who comes later finds room for several steps,
not for one. Beside them are `reserve` slots, each for a tenant that runs nothing else in the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from leasehold.domain.concurrency_limit import GREED


@dataclass(frozen=True, slots=True)
class Rooms:
    """How many steps each tenant runs in the pool, and how many a poll may claim for it: `other` for those that run
    none. None: any number. `other_overdue`: seconds that the poll leaves a task of those to its hint; None: as long as
    anybody's.
    """

    of: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    other: int | None = None
    other_overdue: float | None = None


class Shares:
    """`reserve` 0: the pool has `most` slots, too few to keep any; then tenants only take turns."""

    def __init__(self, most: int, reserve: int = 0) -> None:
        self.most = most
        #: For all tenants.
        self.slots = most + most // GREED if reserve else most
        self.reserve = reserve
        self.busy = 0
        #: Slots that are kept for a poll that is under way.
        self.promised = 0
        self._running: dict[str, int] = {}

    @property
    def free(self) -> int:
        """Slots for all that nobody has; 0 or less where the reserve is in use."""
        return self.slots - self.busy - self.promised

    @property
    def reserve_free(self) -> int:
        return min(self.reserve, self.slots + self.reserve - self.busy - self.promised)

    def running(self, tenant: str) -> int:
        return self._running.get(tenant, 0)

    def take(self, tenant: str) -> None:
        self._running[tenant] = self._running.get(tenant, 0) + 1
        self.busy += 1

    def give(self, tenant: str) -> None:
        self.busy -= 1
        left = self._running[tenant] - 1
        if left:
            self._running[tenant] = left
        else:
            del self._running[tenant]

    def may_take(self, tenant: str) -> bool:
        """Whether the tenant may start another step now."""
        running = self._running.get(tenant, 0)
        if self.slots - self.busy - self.promised > 0:
            return self._may_run(running, self.slots - self.busy)
        return not running and self.reserve_free > 0

    def may_keep(self, tenant: str) -> bool:
        """Whether the tenant, if it gave up one of its slots, might take it again."""
        running = self._running[tenant] - 1
        return running <= 0 or self._may_run(running, self.slots - self.busy + 1)

    def _may_run(self, running: int, unused: int) -> bool:
        """Whether a tenant that runs so much may take one of the `unused` slots for all."""
        return unused > 0 and (not running or not self.reserve or running < min(self.most, GREED * unused))

    def rooms(self, wanted: int) -> Rooms:
        """For a poll that may claim `wanted` tasks: what each tenant may have of them."""
        if self.free <= 0:
            return Rooms({tenant: (running, 0) for tenant, running in self._running.items()}, 1)
        rooms = {tenant: (running, self._room(running, wanted)) for tenant, running in self._running.items()}
        return Rooms(rooms, self._room(0, wanted))

    def _room(self, running: int, wanted: int) -> int | None:
        """For how many steps, one after another, `_may_run` holds; None: for all that are `wanted`."""
        room = min(-(-(GREED * (self.slots - self.busy) - running) // (GREED + 1)), self.most - running)
        return None if not self.reserve or room >= wanted else max(room, 0 if running else 1)
