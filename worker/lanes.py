"""The worker's two lanes to the database: claims that wait, and settlements that wait, a round trip each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from uuid import UUID

from leasehold.database import Connection, connect
from leasehold.lanes import Lane
from leasehold.lease import Lease
from leasehold.outbox import Announcement
from leasehold.settings import Settings
from leasehold.transitions import claims, settlements
from leasehold.transitions.claims import Claimed, LeaseTerms
from leasehold.transitions.settlements import Completion, Failure, Parking, Spreading, Verdict


@dataclass(frozen=True, slots=True)
class Release:
    """Give the lease back: the worker is stopping."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """The attempt stopped because its job was asked to."""

    lease: Lease


Settlement: TypeAlias = Completion | Failure | Parking | Release | Spreading | Acknowledgement


@dataclass(frozen=True, slots=True)
class Asked:
    """A hint to be claimed. `gone`: owners known to have died, whose leases may be taken over."""

    task_id: UUID
    gone: tuple[UUID, ...] = field(default=())


class ClaimLane:
    """Claims hinted tasks, whatever number of hints gathered, in one statement."""

    def __init__(self, settings: Settings, terms: LeaseTerms, holds: Callable[[UUID], bool], most: int) -> None:
        self._terms = terms
        self._holds = holds
        self._lane: Lane[Asked, Claimed | None] = Lane(
            # For as long as the database is away: who gave up would keep the hint, which is then nobody's.
            lambda: connect(settings, "claims"), self._claim, most=most, patience=float("inf"),
        )  # fmt: skip
        self.start, self.close = self._lane.start, self._lane.close

    async def claim(self, task_id: UUID, gone: tuple[UUID, ...] = ()) -> Claimed | None:
        """None: finished, not due, unknown, or leased by somebody alive."""
        return await self._lane.ask(Asked(task_id, gone))

    async def _claim(
        self,
        connection: Connection,
        items: Sequence[Asked],
        repeated: bool,  # noqa: FBT001 - Lane's signature
    ) -> list[Claimed | None]:
        gone = {owner for item in items for owner in item.gone}
        # What we hold already is not ours to take again; what an unanswered try of ours may have claimed is.
        wanted = {item.task_id for item in items if not self._holds(item.task_id)}
        if repeated:
            gone.add(self._terms.owner)
        found = await claims.claim(connection, self._terms, sorted(wanted), sorted(gone)) if wanted else []
        by_task = {claimed.lease.task_id: claimed for claimed in found}
        return [by_task.pop(item.task_id, None) for item in items]  # a doubled hint gets it once


class SettleLane:
    """Settles attempts in batches, and hands the hints that the commits wrote to `announce`."""

    def __init__(self, settings: Settings, announce: Callable[[Sequence[Announcement]], None], most: int) -> None:
        self._announce = announce
        self._lane: Lane[Settlement, Verdict] = Lane(
            # Nothing is better than waiting: an attempt that cannot be settled would only be run again.
            lambda: connect(settings, "settlements"), self._settle, most=most, patience=float("inf"),
        )  # fmt: skip
        self.start, self.close = self._lane.start, self._lane.close

    async def settle(self, settlement: Settlement) -> Verdict:
        """Returns only once the database has answered, however long it is away."""
        return await self._lane.ask(settlement)

    async def _settle(
        self,
        connection: Connection,
        items: Sequence[Settlement],
        _repeated: bool,  # noqa: FBT001 - Lane's signature
    ) -> list[Verdict]:
        done = [item for item in items if isinstance(item, Completion)]
        failed = [item for item in items if isinstance(item, Failure)]
        parked = [item for item in items if isinstance(item, Parking)]
        released = [item.lease for item in items if isinstance(item, Release)]
        spread = [item for item in items if isinstance(item, Spreading)]
        outcomes = [
            await settlements.complete(connection, done) if done else None,
            await settlements.fail(connection, failed) if failed else None,
            await settlements.wait_until(connection, parked) if parked else None,
            await settlements.release(connection, released) if released else None,
            await settlements.fan_out(connection, spread) if spread else None,
        ]
        verdicts: dict[UUID, Verdict] = {}
        for outcome in outcomes:
            if outcome is not None:
                verdicts.update(outcome.verdicts)
                self._announce(outcome.announcements)
        # Whatever it ended with, an attempt in a job that was asked to stop has stopped.
        refused = [item.lease for item in items if verdicts.get(item.lease.task_id) is not Verdict.SETTLED]
        if refused:
            verdicts |= (await settlements.acknowledge_cancel(connection, refused)).verdicts
        return [verdicts[item.lease.task_id] for item in items]
