"""A number of slots that serve some queues: each takes a hint, claims the task, runs it, and only then ACKs.

Hints are the fast way. The sure one is a look into the database (`claim_due`), every few seconds, or whenever the
broker says that it cannot tell: it finds due retries and polls, lost hints, and everything while the broker is away.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from time import monotonic, perf_counter
from typing import Any
from uuid import UUID

import structlog

from leasehold import failpoints
from leasehold.broker.base import Broker, Delivery
from leasehold.database import TRY_AGAIN
from leasehold.transitions.claims import Claimed
from worker import metrics

log = structlog.get_logger(__name__)

#: A consumer that has heard nothing for so long, while there was work, is made anew.
_SILENCE_SECONDS = 30.0

#: While hints keep every slot busy one is kept free this often for a look, which takes tenants in turn: the hints
#: of a flood stand in one line with everybody else's.
_FAIR_SECONDS = 0.5

#: How the crew claims: by hint, and by looking for at most `n` tasks overdue by `seconds`.
Claim = Callable[[Delivery], Awaitable[Claimed | None]]
ClaimDue = Callable[[Sequence[str], int, float], Awaitable[list[Claimed]]]
Run = Callable[[Claimed, Mapping[str, str] | None, Callable[[], bool]], Coroutine[Any, Any, Claimed | None]]


class Crew:
    def __init__(
        self,
        queues: Sequence[str],
        slots: int,
        *,
        claim: Claim,
        claim_due: ClaimDue,
        run: Run,
        holds: Callable[[UUID], bool],
        broker: Broker,
        poll_seconds: float,
    ) -> None:
        self.queues = tuple(queues)
        self.slots = slots
        self._claim = claim
        self._claim_due = claim_due
        self._run = run
        self._holds = holds
        self._broker = broker
        self._poll_seconds = poll_seconds
        self._hints: deque[Delivery] = deque()
        self._busy: set[asyncio.Task[None]] = set()
        self._promised = 0  # slots kept for a look that is under way
        self._yields = False  # the next slot that becomes free is for whose turn it is
        self._changed = asyncio.Event()
        self._look = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []
        self._stopping = False

    def start(self) -> None:
        self._loops = [asyncio.create_task(self._serve()), asyncio.create_task(self._watch())]

    def deliver(self, delivery: Delivery) -> None:
        """A hint arrived; only handed over here."""
        if not self._stopping:
            self._hints.append(delivery)
            self._changed.set()

    def look(self) -> None:
        """There may be work that no hint tells of."""
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
    def busy(self) -> int:
        """Attempts that run now."""
        return len(self._busy)

    @property
    def _free(self) -> int:
        return self.slots - len(self._busy) - self._promised

    def _occupy(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._busy.add(task)
        task.add_done_callback(self._vacate)

    def _vacate(self, task: asyncio.Task[None]) -> None:
        self._busy.discard(task)
        self._changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an attempt could not be carried through", exc_info=error)

    async def _serve(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._hints and self._free > 0:
                self._occupy(self._follow(self._hints.popleft()))

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
            following = await self._run(claimed, delivery.hint.headers, self._may_go_on)
            failpoints.reach("after_commit")
        await delivery.ack()
        await self._go_on(following)

    async def _go_on(self, claimed: Claimed | None) -> None:
        """With the steps that the commits before them claimed, in the same slot."""
        while claimed is not None:
            metrics.CLAIMS.labels("next").inc()
            metrics.claimed(claimed.queue, claimed.was, claimed.waited)
            claimed = await self._run(claimed, None, self._may_go_on)

    def _may_go_on(self) -> bool:
        """Not when somebody else's turn has come, or nothing more is to be started."""
        return not self._stopping and not self._yields

    async def _begin(self, claimed: Claimed) -> None:
        following = await self._run(claimed, None, self._may_go_on)
        failpoints.reach("after_commit")
        await self._go_on(following)

    async def _watch(self) -> None:
        """Look when told to, and every `poll_seconds` in any case; again at once while looking finds plenty that no
        hint tells of.
        """
        hintless = self._broker.name == "postgres"
        while True:
            told = self._look.is_set()
            self._look.clear()
            # With hints on their way, only what is overdue is ours to find: the rest would be taken twice.
            overdue = 0.0 if hintless or told or not self._broker.connected else self._poll_seconds
            if self._free <= 0 and self._hints:
                await self._take_fairly()
            plenty, hinted = await self._take_due(overdue)
            if plenty and (hintless or not hinted or not self._broker.connected):
                await self._a_slot()
                continue
            pause = min(_FAIR_SECONDS, self._poll_seconds) if self._hints else self._poll_seconds
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):  # wait_for loses a cancellation before Python 3.12
                    await self._look.wait()

    async def _take_fairly(self) -> None:
        """Keep the next slot that becomes free from the hints, and give it to whose turn it is."""
        self._keep_free(1)
        self._yields = True
        try:
            while len(self._busy) >= self.slots:
                await asyncio.wait(self._busy, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._yields = False
            self._keep_free(-1)
        await self._take_due(min(_FAIR_SECONDS, self._poll_seconds), most=1)

    def _keep_free(self, slots: int) -> None:
        self._promised += slots
        self._changed.set()

    async def _take_due(self, overdue: float, most: int | None = None) -> tuple[bool, bool]:
        """Claim what is due into the free slots. Answers whether there may be more, and whether any of what was found
        (nothing, if all slots are busy) is of the kind that hints tell of.
        """
        # At most half of the slots: while those of one half are being settled, the other half is claimed.
        wanted = min(self._free, max(1, self.slots // 2) if most is None else most)
        if wanted <= 0:
            return True, True
        self._keep_free(wanted)
        try:
            asked = perf_counter()
            found = await self._claim_due(self.queues, wanted, overdue)
            metrics.took("look", asked)
        except TRY_AGAIN as error:
            log.warning("could not look for work", error=type(error).__name__)
            return False, True
        finally:
            self._keep_free(-wanted)
        metrics.CLAIMS.labels("look").inc(len(found))
        hinted = any(claimed.was == "pending" for claimed in found)
        if overdue and hinted:
            self._mistrust_silence()
        for claimed in found:
            metrics.claimed(claimed.queue, claimed.was, claimed.waited)
            self._occupy(self._begin(claimed))
        return len(found) == wanted, hinted

    def _mistrust_silence(self) -> None:
        """Work was there that no hint told of: a consumer that hears nothing may be dead without knowing it."""
        heard = self._broker.last_delivery_at
        if self._broker.connected and (heard is None or monotonic() - heard > _SILENCE_SECONDS):
            log.warning("work without hints: the consumer is made anew")
            self._broker.rebuild_consumer()

    async def _a_slot(self) -> None:
        """Wait for one; after a while jobs of many steps give theirs up between two."""
        began = monotonic()
        try:
            while self._free <= 0:
                self._yields = monotonic() - began >= _FAIR_SECONDS
                await asyncio.wait(self._busy, timeout=_FAIR_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._yields = False


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
