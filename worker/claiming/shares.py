"""Counts how tenants share the slots of one pool. The slot pool uses `Shares` before it starts a step or a poll.

A pool cannot take a slot back from a step that runs for an hour. So it keeps slots for tenants that come later:

- One tenant may run at most `at_most` steps. The pool has `at_most + at_most // GREED` shared slots (GREED is a fixed
  factor).
- A tenant gets another shared slot only while it runs fewer steps than `GREED` times the number of unused slots.
- The pool has `reserve` further slots. A tenant gets one of them only while it runs no step in the pool.

While a poll runs, it may claim some tasks for a tenant. Until the poll ends, `may_take` counts these tasks as if they
ran already. So hints (messages that a task is due) and the poll together give no tenant more than its share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from leasehold.domain.concurrency_limit import GREED


@dataclass(frozen=True, slots=True)
class Rooms:
    """How many tasks a poll may claim for each tenant; None: any number.

    `by_tenant`: tenant -> (the steps that it runs in the pool, the tasks that the poll may claim for it).
    `for_others`: the tasks that the poll may claim for each tenant that is not in `by_tenant`.
    `others_overdue`: a `pending` task has a hint, so the poll claims the task only if it has been due for some time.
    For tenants that are not in `by_tenant`, this time is `others_overdue` seconds; None: it is the same time as for the
    tenants in `by_tenant`.
    """

    by_tenant: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    for_others: int | None = None
    others_overdue: float | None = None


class Shares:
    """The slots of one pool, and the tenants that use them. Without a `reserve` the pool has exactly `at_most` slots,
    and any tenant may take all of them. A tenant that comes later then waits until a slot becomes free.
    """

    def __init__(self, at_most: int, reserve: int = 0) -> None:
        self.at_most = at_most
        #: Shared slots.
        self.slots = at_most + at_most // GREED if reserve else at_most
        self.reserve = reserve
        self.busy = 0  # slots in which a step runs
        #: Free slots that are kept for a poll: hints may not take them.
        self.kept_for_poll = 0
        self._poll: tuple[int, Rooms] | None = None  # the limit and the rooms of the poll that runs now
        self._running: dict[str, int] = {}  # tenant -> how many steps it runs in the pool; no entry: none

    @property
    def free(self) -> int:
        """Shared slots that are neither busy nor kept for a poll. 0 or less while the reserve is in use."""
        return self.slots - self.busy - self.kept_for_poll

    @property
    def reserve_free(self) -> int:
        """Slots of the reserve that are neither busy nor kept for a poll."""
        return min(self.reserve, self.slots + self.reserve - self.busy - self.kept_for_poll)

    def running(self, tenant: str) -> int:
        """How many steps the tenant runs in the pool."""
        return self._running.get(tenant, 0)

    def take(self, tenant: str) -> None:
        # Count a slot that the tenant takes, without a check. (`may_take` and the rooms of a poll are the checks.)
        self._running[tenant] = self._running.get(tenant, 0) + 1
        self.busy += 1

    def release(self, tenant: str) -> None:
        # Count a slot that the tenant gives back, because the step has ended or lends its slot.
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
            return self._may_run(running + self._claimable_by_poll(tenant), self.slots - self.busy)
        return not running and self.reserve_free > 0

    def may_keep(self, tenant: str) -> bool:
        """Whether the tenant, if it released one of its slots now, could take this slot again."""
        running = self._running[tenant] - 1
        return running <= 0 or self._may_run(running, self.slots - self.busy + 1)

    def _may_run(self, running: int, unused: int) -> bool:
        """Whether a tenant with `running` steps may take one of `unused` shared slots."""
        if unused <= 0:
            return False
        is_unbounded = not running or not self.reserve
        return is_unbounded or running < min(self.at_most, GREED * unused)

    def begin_poll(self, limit: int) -> Rooms:
        """Keep `limit` slots for a poll, until `end_poll`. Returns the rooms of the poll."""
        rooms = self.rooms(limit)
        self._poll = limit, rooms
        self.kept_for_poll += limit
        return rooms

    def end_poll(self) -> None:
        """Free the slots that were kept for the poll. The caller then calls `take` for each claimed task."""
        if self._poll is not None:
            self.kept_for_poll -= self._poll[0]
            self._poll = None

    def _claimable_by_poll(self, tenant: str) -> int:
        """How many tasks of the tenant may be claimed by the poll that runs now; 0 if no poll runs."""
        if self._poll is None:
            return 0
        limit, rooms = self._poll
        room = rooms.by_tenant[tenant][1] if tenant in rooms.by_tenant else rooms.for_others
        return limit if room is None else min(room, limit)

    def rooms(self, limit: int) -> Rooms:
        """The rooms of a poll that claims at most `limit` tasks."""
        if self.free <= 0:  # only the reserve is left, which has one step for each tenant that runs nothing in the pool
            return Rooms({tenant: (running, 0) for tenant, running in self._running.items()}, for_others=1)
        by_tenant = {tenant: (running, self._room(running, limit)) for tenant, running in self._running.items()}
        return Rooms(by_tenant, for_others=self._room(0, limit))

    def _room(self, running: int, limit: int) -> int | None:
        """How many more steps `_may_run` admits, one after another, for a tenant with `running` steps; None: `limit` or
        more.

        After n more steps, `_may_run` admits another one if `running + n < GREED * (unused - n)`. The smallest n that
        fails this test is `(GREED * unused - running) / (GREED + 1)`, rounded up.
        """
        unused = self.slots - self.busy
        rounded_up = -((running - GREED * unused) // (GREED + 1))
        room = min(rounded_up, self.at_most - running)
        if not self.reserve or room >= limit:
            return None
        return max(room, 0 if running else 1)  # `_may_run` always admits the first step of a tenant
