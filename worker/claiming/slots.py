"""A number of slots that serve some queues: each takes a hint, claims the task, runs it, and only then ACKs.

Hints are the fast way. The sure one is a look into the database (`claim_due`), every few seconds, or whenever the
broker says that it cannot tell: it finds due retries and polls, lost hints, and everything while the broker is away.

Tenants share the slots (shares.py). A hint whose tenant may not take a slot now stays in hand, unacknowledged: it runs
once the tenant may. It keeps nobody else's task waiting, although others' hints may stand behind it in the broker: a
crowded pool looks for the tasks of tenants that have less every quarter of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic, perf_counter
from typing import Any
from uuid import UUID

import structlog

from leasehold.broker.base import Broker, Delivery
from leasehold.runtime import failpoints
from leasehold.runtime.periodic import unforeseen
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.telemetry import outages
from leasehold.transitions.claims import Claimed, Polled
from leasehold.worker import metrics
from leasehold.worker.claiming.hints import Hints
from leasehold.worker.claiming.shares import Rooms, Shares

log = structlog.get_logger(__name__)

#: A consumer that has heard nothing for so long, while there was work, is made anew.
_SILENCE_SECONDS = 30.0

#: A crowded pool looks this often, and for what has been due so long: the hints of a flood stand in one line with
#: everybody else's, and a look takes tenants in turn.
_FAIR_SECONDS = 0.25
#: A pool is crowded while hints wait, or this part of its slots is busy: the broker hands out no further hints of a
#: queue and band while so many are unacknowledged, and the smallest window is near it (broker.consumer.SHARES).
_CROWDED = 1 / 4
#: A crowded pool leaves a task of a tenant that runs nothing in it for so long to its hint, which takes milliseconds
#: unless a flood's hints stand before it.
_HINT_SECONDS = 0.05

#: How the slot pool claims: by hint, and by looking for at most `n` tasks overdue by `seconds`, so many of each tenant.
Claim = Callable[[Delivery], Awaitable[Claimed | None]]
ClaimDue = Callable[[Sequence[str], int, float, Rooms], Awaitable[Polled]]
Run = Callable[[Claimed, Mapping[str, str] | None, Callable[[], bool]], Coroutine[Any, Any, Claimed | None]]


@dataclass(frozen=True, slots=True)
class _Found:
    """What a look told. `plenty`: there may be more. `hinted`: some of it is of the kind that hints tell of; also where
    all slots are busy and nobody looked. `held_back`: more is due, of tenants that have no room here.
    """

    plenty: bool
    hinted: bool
    held_back: bool


class SlotPool:
    """`slots`: how many one tenant may take; `reserve`: as leasehold.worker.claiming.shares has it."""

    def __init__(
        self,
        queues: Sequence[str],
        slots: int,
        *,
        reserve: int = 0,
        claim: Claim,
        claim_due: ClaimDue,
        run: Run,
        holds: Callable[[UUID], bool],
        broker: Broker,
        poll_seconds: float,
    ) -> None:
        self.queues = tuple(queues)
        self.slots = slots  # of one tenant
        self.reserve = reserve
        self._claim = claim
        self._claim_due = claim_due
        self._run = run
        self._holds = holds
        self._broker = broker
        self._poll_seconds = poll_seconds
        self._shares = Shares(slots, reserve)
        self._hints = Hints(self._shares)
        self._busy: set[asyncio.Task[None]] = set()
        self._yields = False  # the next slot that becomes free is for whose turn it is
        self._full_since: float | None = None  # others wait, and no slot for all is free
        self._told = False
        self._changed = asyncio.Event()
        self._look = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []
        self._stopping = False

    def start(self) -> None:
        self._loops = [asyncio.create_task(self._serve()), asyncio.create_task(self._watch())]

    def deliver(self, delivery: Delivery) -> None:
        """A hint arrived; only handed over here."""
        if not self._stopping:
            self._hints.add(delivery)
            self._changed.set()

    def look(self) -> None:
        """There may be work that no hint tells of."""
        self._told = True
        self._look.set()

    def stop_taking(self) -> None:
        """Start nothing more. Hints in hand stay unacknowledged: the broker gives them to others."""
        self._stopping = True
        for loop in self._loops:
            loop.cancel()
        self._hints.clear()

    async def finished(self) -> None:
        """Wait until nothing runs."""
        while self._busy:
            await asyncio.wait(self._busy)

    async def close(self) -> None:
        self.stop_taking()
        for task in self._busy:
            task.cancel()
        await asyncio.gather(*self._loops, *self._busy, return_exceptions=True)

    @property
    def shared(self) -> int:
        """Slots for all tenants."""
        return self._shares.slots

    @property
    def busy(self) -> int:
        """Attempts that run now."""
        return len(self._busy)

    def _occupy(self, tenant: str, work: Coroutine[Any, Any, None]) -> None:
        self._shares.take(tenant)
        task = asyncio.create_task(work)
        self._busy.add(task)
        task.add_done_callback(partial(self._vacate, tenant))

    def _vacate(self, tenant: str, task: asyncio.Task[None]) -> None:
        self._shares.give(tenant)
        self._busy.discard(task)
        self._changed.set()
        if self._yields and self._shares.busy < self._shares.slots:
            self._look.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an attempt could not be carried through", exc_info=error)

    async def _serve(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while (delivery := self._hints.take()) is not None:
                self._occupy(delivery.hint.tenant, self._follow(delivery))

    async def _follow(self, delivery: Delivery) -> None:
        failpoints.reach("after_hint")
        claimed = await self._claim(delivery)
        following: Claimed | None = None
        if claimed is None:
            metrics.HINTS.labels("duplicate" if self._holds(delivery.hint.task_id) else "stale").inc()
        else:
            metrics.HINTS.labels("claimed").inc()
            metrics.CLAIMS.labels("hint").inc()
            metrics.claimed(claimed.queue, claimed.was, claimed.waited)
            following = await self._run(claimed, delivery.hint.headers, partial(self._may_go_on, delivery.hint.tenant))
            failpoints.reach("after_commit")
        await delivery.ack()
        await self._go_on(delivery.hint.tenant, following)

    async def _go_on(self, tenant: str, claimed: Claimed | None) -> None:
        """With the steps that the commits before them claimed, in the same slot."""
        while claimed is not None:
            metrics.CLAIMS.labels("next").inc()
            metrics.claimed(claimed.queue, claimed.was, claimed.waited)
            claimed = await self._run(claimed, None, partial(self._may_go_on, tenant))

    def _may_go_on(self, tenant: str) -> bool:
        """Not when somebody else's turn has come, the tenant is over its share, or nothing more is to be started."""
        return (
            not self._stopping
            and not self._yields
            and self._shares.may_keep(tenant)
            and not self._hints.waits_with_less(tenant)
        )

    async def _begin(self, claimed: Claimed) -> None:
        following = await self._run(claimed, None, partial(self._may_go_on, claimed.tenant_id))
        failpoints.reach("after_commit")
        await self._go_on(claimed.tenant_id, following)

    async def _watch(self) -> None:
        """Look when told to, and every `poll_seconds` in any case, in a crowded pool every `_FAIR_SECONDS`; again at
        once while looking finds plenty that no hint tells of.
        """
        hintless = self._broker.name == "postgres"
        while True:
            told, self._told = self._told, False
            self._look.clear()
            hints_come = not hintless and self._broker.connected
            # With hints on their way, only what is overdue is ours to find: the rest would be taken twice.
            overdue = self._pause if hints_come and not told else 0.0
            if self._yields and self._shares.busy < self._shares.slots:
                self._yield(yields=False)
                self._full_since = None
                await self._take_due(overdue, most=1)
            found = await self._take_due(overdue)
            again = found.plenty and not (hints_come and found.hinted)
            self._give_turns(others_wait=bool(self._hints) or again)
            if not again:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause):  # wait_for loses a cancellation before Python 3.12
                        await self._look.wait()
            elif self._busy and (found.held_back or self._shares.free <= 0):
                pause = min(_FAIR_SECONDS, self._poll_seconds)
                await asyncio.wait(self._busy, timeout=pause, return_when=asyncio.FIRST_COMPLETED)

    def _give_turns(self, *, others_wait: bool) -> None:
        """Where no slot for all is free, while others wait for one, keep the next one from the hints, every
        `_FAIR_SECONDS`: a look gives it to whose turn it is. Jobs of many steps give theirs up between two.
        """
        if not others_wait or self._shares.busy < self._shares.slots:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = monotonic()
        full = self._full_since is not None and monotonic() - self._full_since >= min(_FAIR_SECONDS, self._poll_seconds)
        self._yield(yields=full)

    @property
    def _pause(self) -> float:
        """Seconds until the next look."""
        return min(_FAIR_SECONDS, self._poll_seconds) if self._crowded else self._poll_seconds

    @property
    def _crowded(self) -> bool:
        return bool(self._hints) or self._shares.busy >= max(1, _CROWDED * self.slots)

    def _yield(self, *, yields: bool) -> None:
        """Whether the next slot for all that becomes free is kept from the hints, for a look."""
        if yields != self._yields:
            self._yields = yields
            self._keep_free(1 if yields else -1)

    def _keep_free(self, slots: int) -> None:
        self._shares.promised += slots
        self._changed.set()

    async def _take_due(self, overdue: float, most: int | None = None) -> _Found:
        """Claim what is due into the free slots, or where there is none, for tenants that run nothing here."""
        shares = self._shares
        # At most half of the slots: while those of one half are being settled, the other half is claimed.
        wanted = min(shares.free if shares.free > 0 else shares.reserve_free, most or max(1, self.slots // 2))
        if wanted <= 0:
            return _Found(plenty=True, hinted=True, held_back=False)
        rooms = replace(shares.rooms(wanted), other_overdue=_HINT_SECONDS if self._crowded else None)
        self._keep_free(wanted)
        try:
            asked = perf_counter()
            looked = await self._claim_due(self.queues, wanted, overdue, rooms)
            metrics.took("look", asked)
        except TRY_AGAIN as error:
            outages.DATABASE.met(error, "polls")
            return _Found(plenty=False, hinted=True, held_back=False)
        except Exception as error:  # noqa: BLE001 - whatever it is: the next look may find work all the same
            unforeseen("look", error)
            return _Found(plenty=False, hinted=True, held_back=False)
        finally:
            self._keep_free(-wanted)
        found = looked.claimed
        metrics.CLAIMS.labels("look").inc(len(found))
        hinted = any(claimed.was == "pending" for claimed in found)
        if overdue and hinted:
            self._mistrust_silence()
        for claimed in found:
            metrics.claimed(claimed.queue, claimed.was, claimed.waited)
            self._occupy(claimed.tenant_id, self._begin(claimed))
        return _Found(
            plenty=len(found) == wanted or looked.held_back,
            hinted=hinted or looked.held_back,
            held_back=looked.held_back,
        )

    def _mistrust_silence(self) -> None:
        """Work was there that no hint told of: a consumer that hears nothing may be dead without knowing it."""
        heard = self._broker.last_delivery_at
        if self._broker.connected and (heard is None or monotonic() - heard > _SILENCE_SECONDS):
            log.warning("work without hints: the consumer is made anew")
            self._broker.rebuild_consumer()


async def claim_with_takeover(
    delivery: Delivery,
    claim: Callable[[UUID, tuple[UUID, ...]], Awaitable[Claimed | None]],
    gone_owner: Callable[[UUID], Awaitable[UUID | None]],
) -> Claimed | None:
    """Claim the hinted task. A redelivered hint of a task whose owner's presence has ended is taken over now.

    The broker redelivers the moment the worker's socket closes, which may be a little before the database drops
    its presence: so there are a few looks.
    """
    claimed = await claim(delivery.hint.task_id, ())
    if claimed is not None or not delivery.redelivered:
        return claimed
    for pause in (0.02, 0.1, 0.3):
        await asyncio.sleep(pause)
        owner = await gone_owner(delivery.hint.task_id)
        if owner is not None:
            return await claim(delivery.hint.task_id, (owner,))
    # The sweeper may have been faster, in the very moment of the first claim, which then saw the lease that it ended.
    return await claim(delivery.hint.task_id, ())
