"""How tenants share the slots of one pool: the arithmetic, without any waiting.

A pool cannot take a slot back from a step that runs for an hour. So it keeps slots for tenants that come later:

- A tenant may run at most `at_most` steps in the pool. The pool has `at_most // GREED` shared slots more.
- A tenant gets another shared slot only while its steps are fewer than `GREED` times the unused slots. So a tenant that
  comes later finds room for several steps. A poll counts a tenant's steps when it begins: hints that come meanwhile may
  take the tenant beyond its share until some of its steps end.
- `reserve` more slots are each for a tenant that runs nothing else in the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from leasehold.domain.concurrency_limit import GREED


@dataclass(frozen=True, slots=True)
class Rooms:
    """What a poll may claim for each tenant.

    `of`: tenant -> (how many steps it runs in the pool, how many more the poll may claim for it).
    `other`: how many the poll may claim for each other tenant. None: any number. `other_overdue`: how many seconds the
    poll leaves a task of such a tenant to its hint; None: as long as any tenant's.
    """

    of: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    other: int | None = None
    other_overdue: float | None = None


class Shares:
    """The slots of one pool, and the tenants that use them. Without a `reserve` the pool has exactly `at_most` slots,
    too few to keep any free: then tenants only take turns.
    """

    def __init__(self, at_most: int, reserve: int = 0) -> None:
        self.at_most = at_most
        #: Shared slots.
        self.slots = at_most + at_most // GREED if reserve else at_most
        self.reserve = reserve
        self.busy = 0
        #: Free slots that are kept for a running poll.
        self.promised = 0
        self._running: dict[str, int] = {}

    @property
    def free(self) -> int:
        """Shared slots that are neither busy nor promised; 0 or less while the reserve is in use."""
        return self.slots - self.busy - self.promised

    @property
    def reserve_free(self) -> int:
        return min(self.reserve, self.slots + self.reserve - self.busy - self.promised)

    def running(self, tenant: str) -> int:
        """How many steps the tenant runs in the pool."""
        return self._running.get(tenant, 0)

    def take(self, tenant: str) -> None:
        self._running[tenant] = self._running.get(tenant, 0) + 1
        self.busy += 1

    def give(self, tenant: str) -> None:
        self.busy -= 1
        remaining = self._running[tenant] - 1
        if remaining:
            self._running[tenant] = remaining
        else:
            del self._running[tenant]

    def may_take(self, tenant: str) -> bool:
        """Whether the tenant may start another step now."""
        running = self._running.get(tenant, 0)
        if self.free > 0:
            return self._may_run(running, self.slots - self.busy)
        return not running and self.reserve_free > 0

    def may_keep(self, tenant: str) -> bool:
        """Whether the tenant, if it gave one of its slots up, could take it again."""
        running = self._running[tenant] - 1
        return running <= 0 or self._may_run(running, self.slots - self.busy + 1)

    def _may_run(self, running: int, unused: int) -> bool:
        """Whether a tenant with `running` steps may take one of `unused` shared slots."""
        return unused > 0 and (not running or not self.reserve or running < min(self.at_most, GREED * unused))

    def rooms(self, limit: int) -> Rooms:
        """The rooms of a poll that claims at most `limit` tasks."""
        if self.free <= 0:  # only the reserve is left: one step for each tenant that runs nothing here
            return Rooms({tenant: (running, 0) for tenant, running in self._running.items()}, 1)
        rooms = {tenant: (running, self._room(running, limit)) for tenant, running in self._running.items()}
        return Rooms(rooms, self._room(0, limit))

    def _room(self, running: int, limit: int) -> int | None:
        """How many steps `_may_run` admits one after another, for a tenant that runs `running`; None: `limit` or more.

        After n more steps the condition is `running + n < GREED * (unused - n)`; solved for n, rounded up.
        """
        room = min(-(-(GREED * (self.slots - self.busy) - running) // (GREED + 1)), self.at_most - running)
        return None if not self.reserve or room >= limit else max(room, 0 if running else 1)
