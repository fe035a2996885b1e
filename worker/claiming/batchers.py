"""The worker's two lanes to the database: claims that wait, and settlements that wait, a round trip each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from time import perf_counter
from typing import TypeAlias
from uuid import UUID

from leasehold.broker.outbox import Announcement
from leasehold.db.batcher import Batcher
from leasehold.db.database import Connection, connect
from leasehold.domain.lease import Lease
from leasehold.exporter.jobs import jobs_ended
from leasehold.settings import Settings
from leasehold.transitions import claims, settlements
from leasehold.transitions.claims import Claimed, LeaseTerms
from leasehold.transitions.settlements import Completion, Failure, FanningOut, Settled, Snoozing, Verdict
from leasehold.worker import metrics

_UNSURE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Release:
    """Give the lease back: the worker is stopping."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """The attempt stopped because its job was asked to."""

    lease: Lease


Settlement: TypeAlias = Completion | Failure | Snoozing | Release | FanningOut | Acknowledgement


@dataclass(frozen=True, slots=True)
class Asked:
    """A hint to be claimed. `gone`: owners known to have died, whose leases may be taken over."""

    task_id: UUID
    gone: tuple[UUID, ...] = field(default=())


class _Held(Enum):
    """The answer for a task that we hold ourselves: the database was not asked."""

    HELD = auto()


class ClaimBatcher:
    """Claims hinted tasks, whatever number of hints gathered, in one statement.

    `holds`: whether a task's lease is ours as far as we know, and `sure`: whether that can be relied on.
    """

    def __init__(
        self,
        settings: Settings,
        terms: LeaseTerms,
        holds: Callable[[UUID], bool],
        sure: Callable[[UUID], bool],
        most: int,
    ) -> None:
        self._terms = terms
        self._holds = holds
        self._sure = sure
        self._lane: Batcher[Asked, Claimed | _Held | None] = Batcher(
            # For as long as the database is away: who gave up would keep the hint, which is then nobody's.
            lambda: connect(settings, "claims"), self._claim, name="claims", most=most, patience=float("inf"),
        )  # fmt: skip
        self.start, self.close = self._lane.start, self._lane.close

    async def claim(self, task_id: UUID, gone: tuple[UUID, ...] = ()) -> Claimed | None:
        """None: finished, not due, unknown, leased by somebody alive, or ours already.

        Taken for one that we hold, the hint of a task that we have lost, or that we have just settled and that is due
        again, would be acknowledged away: while nobody is sure, it waits.
        """
        while True:
            while self._holds(task_id):
                if self._sure(task_id):
                    return None
                await asyncio.sleep(_UNSURE_SECONDS)
            answer = await self._lane.ask(Asked(task_id, gone))
            if answer is not _Held.HELD:
                return answer

    async def _claim(
        self,
        connection: Connection,
        items: Sequence[Asked],
        repeated: bool,  # noqa: FBT001 - Lane's signature
    ) -> list[Claimed | _Held | None]:
        gone = {owner for item in items for owner in item.gone}
        # What we hold already is not ours to take again; what an unanswered try of ours may have claimed is.
        held = {item.task_id for item in items if self._holds(item.task_id)}
        wanted = {item.task_id for item in items} - held
        by_task: dict[UUID, Claimed] = {}
        if wanted:
            started = perf_counter()
            found = await claims.claim(connection, self._terms, sorted(wanted), sorted(gone), reclaim=repeated)
            metrics.took("claim", started)
            by_task = {claimed.lease.task_id: claimed for claimed in found}
        # A doubled hint gets it once.
        return [_Held.HELD if item.task_id in held else by_task.pop(item.task_id, None) for item in items]


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a settlement; `state` is the one that the task was left in, None where it was not ours."""

    verdict: Verdict
    state: str | None
    next: Claimed | None = None  # of a completion that goes on: the step that it claimed


class SettlementBatcher:
    """Settles attempts in batches, and hands the hints that the commits wrote to `announce`."""

    def __init__(
        self,
        settings: Settings,
        terms: LeaseTerms,
        held: Callable[[], Sequence[UUID]],
        announce: Callable[[Sequence[Announcement]], None],
        most: int,
    ) -> None:
        self._terms = terms
        self._held = held
        self._announce = announce
        self._lane: Batcher[Settlement, Answer] = Batcher(
            # Nothing is better than waiting: an attempt that cannot be settled would only be run again.
            lambda: connect(settings, "settlements"),
            self._settle,
            name="settlements",
            most=most,
            patience=float("inf"),
        )
        self.start, self.close = self._lane.start, self._lane.close

    async def settle(self, settlement: Settlement) -> Answer:
        """Returns only once the database has answered, however long it is away."""
        return await self._lane.ask(settlement)

    async def _settle(
        self,
        connection: Connection,
        items: Sequence[Settlement],
        repeated: bool,  # noqa: FBT001 - Lane's signature
    ) -> list[Answer]:
        done = [item for item in items if isinstance(item, Completion)]
        failed = [item for item in items if isinstance(item, Failure)]
        parked = [item for item in items if isinstance(item, Snoozing)]
        released = [item.lease for item in items if isinstance(item, Release)]
        spread = [item for item in items if isinstance(item, FanningOut)]
        started = perf_counter()
        outcomes = [
            await settlements.complete(connection, done, self._terms) if done else None,
            await settlements.fail(connection, failed) if failed else None,
            await settlements.wait_until(connection, parked) if parked else None,
            await settlements.release(connection, released) if released else None,
            await settlements.fan_out(connection, spread) if spread else None,
        ]
        metrics.took("settle", started)
        answers: dict[UUID, Answer] = {}
        for outcome in outcomes:
            if outcome is not None:
                answers |= _answers(outcome)
                self._announce(outcome.announcements)
                jobs_ended(outcome.ended)
        if repeated:
            answers |= await self._heard_late(connection, done, answers)
        # Whatever it ended with, an attempt in a job that was asked to stop has stopped.
        refused = [item.lease for item in items if not _settled(answers.get(item.lease.task_id))]
        if refused:
            acknowledged = await settlements.acknowledge_cancel(connection, refused)
            answers |= _answers(acknowledged)
            jobs_ended(acknowledged.ended)
        return [answers[item.lease.task_id] for item in items]

    async def _heard_late(
        self, connection: Connection, done: Sequence[Completion], answers: Mapping[UUID, Answer]
    ) -> dict[UUID, Answer]:
        """An earlier try may have completed them, and claimed what comes next: without an answer nobody runs it."""
        ids = [one.lease.task_id for one in done if one.goes_on and answers[one.lease.task_id].next is None]
        found = await claims.claim_again(connection, ids, self._terms, self._held()) if ids else {}
        return {task: replace(answers[task], next=claimed) for task, claimed in found.items()}


def _answers(outcome: Settled) -> dict[UUID, Answer]:
    return {
        task: Answer(said, outcome.states.get(task), outcome.nexts.get(task)) for task, said in outcome.verdicts.items()
    }


def _settled(answer: Answer | None) -> bool:
    return answer is not None and answer.verdict is Verdict.SETTLED
