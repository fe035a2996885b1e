"""A slot pool serves some queues with a fixed number of slots. For each hint (a message that a task is due) it claims
the task, runs the attempt in a slot, and only then ACKs the hint.

A hint announces a task immediately, but a hint may be lost. So the pool also polls, which means that it reads the due
tasks in the database every few seconds, and whenever the broker may have lost hints. A poll also finds the tasks that
no hint announces: due retries, snoozed steps (steps that asked for a pause), and all tasks while the broker does not
answer.

Tenants share the slots (shares.py). If the tenant of a hint may not take a slot now, the hint waits here
unacknowledged. The broker limits the unacknowledged hints, and may then hold back hints of other tenants. So a crowded
pool also polls, four times a second, for the tasks of tenants that run fewer steps.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic, perf_counter
from typing import Any

import structlog

from leasehold.broker.base import Broker, Delivery
from leasehold.runtime import failpoints
from leasehold.runtime.gather import cancel_and_wait
from leasehold.runtime.periodic import record_unforeseen
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.telemetry import outages
from leasehold.transitions.claims import Claimed, Polled
from leasehold.worker import metrics
from leasehold.worker.attempts.runner import Runner
from leasehold.worker.claiming.claimer import Claimer
from leasehold.worker.claiming.hints import Hints
from leasehold.worker.claiming.shares import Shares

log = structlog.get_logger(__name__)

#: If a poll finds new work, but the broker has delivered no hint for this many seconds, the pool makes the broker
#: rebuild its consumer (`_check_consumer`).
_SILENCE_SECONDS = 30.0

#: Seconds between two polls of a crowded pool (see `_CROWDED`). While hints arrive, such a poll leaves new tasks
#: (`pending`) to their hints until the tasks have been due for this long. The polls are needed because the broker does
#: not serve the tenants in turn. In its queue, a hint waits behind all hints of a tenant that floods the queue.
_FAIR_SECONDS = 0.25
#: A pool is crowded while hints wait in it, or while at least this part of its slots is busy. From about that part on,
#: the broker may hold back hints, because each queue and priority band has a limit of unacknowledged hints (SHARES in
#: broker/amqp/consumer.py).
_CROWDED = 1 / 4
#: A crowded pool polls the new tasks of a tenant that runs nothing here as soon as they have been due for this many
#: seconds. Their hints arrive within milliseconds, unless many hints of another tenant come before them in the queue.
_LATE_HINT_SECONDS = 0.05
#: When an attempt of a full pool ends, the pool waits until about one attempt for every 8 slots has ended, but at most
#: 0.02 s. Then one poll fills all free slots.
_SLOTS_PER_END, _ENDS_SECONDS = 8, 0.02
#: If no child process could be started or forked for an attempt, its slot takes no other task until a child can be
#: made. This rest lasts at most _REST_SECONDS. Every _REST_CHECK_SECONDS the slot checks whether a child can be made.
#: So a worker that cannot make children leaves the tasks to other workers.
_REST_SECONDS, _REST_CHECK_SECONDS = 60.0, 1.0
#: A slot whose claim ended with an unforeseen error takes no other hint for this many seconds. Every claim may end with
#: this error, for example if a privilege is revoked. Without the pause, the pool would acknowledge all hints of the
#: queue in a moment, and only polls would find their tasks.
_FAILED_CLAIM_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _PollResult:
    """The result of a poll. `has_more`: more tasks may be due. `hinted`: hints announce the due tasks that the poll did
    not claim, so the pool need not poll again for them. The pool assumes this if some claimed tasks were new, because
    the broker has hints of new tasks. `held_back`: some due tasks belong to tenants that have no room in this pool.

    `found_no_slot`: there was no free slot, so the pool sent no query. In this case `hinted` follows from earlier
    polls.
    """

    has_more: bool
    hinted: bool
    held_back: bool
    found_no_slot: bool = False


class _Slot:
    """The slot of one attempt. It implements the protocol leasehold.worker.attempts.slot.Slot."""

    def __init__(self, pool: SlotPool, tenant: str) -> None:
        self._pool = pool
        self._tenant = tenant
        self._is_down: Callable[[], bool] | None = None  # the argument of `rest_while`: True while the slot must rest
        self._waiting = 0  # how many calls of the attempt wait for threads now; a workflow may make several at once
        self._is_lent = False  # another attempt may use the slot, because this attempt only waits

    def may_continue(self) -> bool:
        return self._pool.may_continue(self._tenant)

    def rest_while(self, is_down: Callable[[], bool]) -> None:
        self._is_down = is_down

    async def rest(self) -> None:
        """Keep the slot occupied while the attempt's `is_down` returns True, at most `_REST_SECONDS`."""
        if self._is_down is not None:
            await self._pool.rest(self._is_down)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        # The first call that waits lends the slot. The last call that has waited takes the slot back.
        self._waiting += 1
        if self._waiting == 1:
            self._is_lent = self._pool.lend(self._tenant)
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting and self._is_lent:
                self._pool.take_back(self._tenant)


class SlotPool:
    """One pool. `slots`: how many slots one tenant may take. `reserve`: further slots, for tenants that run nothing in
    this pool. `poll_seconds`: the pause between two polls of a pool that is not crowded.
    """

    def __init__(
        self,
        queues: Sequence[str],
        slots: int,
        *,
        reserve: int,
        claimer: Claimer,
        runner: Runner,
        broker: Broker,
        poll_seconds: float,
    ) -> None:
        self.queues = tuple(queues)
        self.slots = slots
        self.reserve = reserve
        self._claimer = claimer
        self._runner = runner
        self._broker = broker
        self._poll_seconds = poll_seconds
        self._shares = Shares(slots, reserve)
        self._hints = Hints(self._shares)
        self._attempts: set[asyncio.Task[None]] = set()  # the asyncio tasks of the attempts that run
        self._lent = 0  # slots of attempts that only wait for a thread or a process
        self._acks: set[asyncio.Task[None]] = set()  # acknowledgements of hints that need no slot
        self._followed_hints = 0  # unacknowledged hints whose attempts run
        self._silent_since = 0.0  # when the pool started, or last had the broker's consumer rebuilt
        self._keeps_next_slot = False  # the next free slot is kept for a poll
        self._others_wait = False  # after the last poll, other tasks were known to wait for a slot
        self._full_since: float | None = None  # the time since which tasks wait and no shared slot is free
        self._poll_requested = False  # `poll_soon` was called since the last poll began
        self._may_start = asyncio.Event()  # set when a hint arrives, and when a slot becomes free
        # Set when a poll is requested, when the slot that is kept for a poll becomes free, and when the pool stops.
        self._may_poll = asyncio.Event()
        self._enough_ended = asyncio.Event()  # set when the attempts that `_wait_for_ends` awaits have ended
        self._ends_left = 0  # how many of the awaited attempts have not ended yet; below 0 if more have ended
        self._finds_unhinted = False  # the last polls found only tasks that no hint announces (see `_claim_due`)
        self._following: asyncio.Task[None] | None = None  # the loop `_follow_hints`
        self._polling: asyncio.Task[None] | None = None  # the loop `_poll`
        self._stopping = False

    def start(self) -> None:
        self._silent_since = monotonic()
        self._following = asyncio.create_task(self._follow_hints())
        self._polling = asyncio.create_task(self._poll())

    def deliver(self, delivery: Delivery) -> None:
        """Keep a hint that has arrived, until its tenant may take a slot. Returns immediately."""
        if not self._stopping:
            self._hints.add(delivery)
            self._may_start.set()

    def waiting_hints(self, tenant: str) -> int:
        return self._hints.count(tenant)

    def poll_soon(self) -> None:
        """Request a poll for every due task, because the broker may have lost hints. Returns immediately."""
        self._poll_requested = True
        self._may_poll.set()

    def stop_claiming(self) -> None:
        """Claim nothing more. Waiting hints stay unacknowledged, so the broker redelivers them to other workers. A poll
        that is under way is not cancelled, and the tasks that it claims run. Otherwise these tasks would wait until
        their leases expire.
        """
        self._stopping = True
        if self._following is not None:
            self._following.cancel()
        self._may_poll.set()
        self._hints.clear()

    async def finished(self) -> None:
        """Wait until no attempt runs. Call `stop_claiming` before."""
        if self._polling is not None:
            await asyncio.wait({self._polling})
        while self._attempts:
            await asyncio.wait(self._attempts)

    async def close(self) -> None:
        """Stop, and cancel the attempts that still run."""
        self.stop_claiming()
        loops = [loop for loop in (self._following, self._polling) if loop is not None]
        await cancel_and_wait(*loops, *self._attempts, *self._acks)

    @property
    def shared(self) -> int:
        """Slots that any tenant may take."""
        return self._shares.slots

    @property
    def busy(self) -> int:
        """Attempts that run now."""
        return len(self._attempts)

    # --- slots

    def _occupy(self, tenant: str, work: Coroutine[Any, Any, None]) -> None:
        self._shares.take(tenant)
        attempt = asyncio.create_task(work)
        self._attempts.add(attempt)
        attempt.add_done_callback(partial(self._vacate, tenant))

    def _vacate(self, tenant: str, attempt: asyncio.Task[None]) -> None:
        self._attempts.discard(attempt)
        self._release(tenant)
        if not attempt.cancelled() and (error := attempt.exception()) is not None:
            log.error("the worker could not finish an attempt", exc_info=error)

    def _release(self, tenant: str) -> None:
        self._shares.release(tenant)
        self._may_start.set()
        self._ends_left -= 1
        if self._ends_left <= 0:
            self._enough_ended.set()
        if self._keeps_next_slot and not self._is_full:
            self._may_poll.set()

    def lend(self, tenant: str) -> bool:
        """Release the slot of an attempt that only waits for a thread or a process, so that another attempt can use it.
        At most `slots` attempts may wait without a slot, because this maximum bounds how many leases the worker holds.
        Returns False if the maximum is reached; then this attempt keeps its slot.
        """
        if self._lent >= self.slots:
            return False
        self._lent += 1
        self._release(tenant)
        return True

    def take_back(self, tenant: str) -> None:
        """Give a slot to an attempt that has lent its own. Do this even if no slot is free, because the attempt must
        not wait a second time.
        """
        self._lent -= 1
        self._shares.take(tenant)

    def _acknowledge_duplicates(self) -> None:
        """Acknowledge the waiting hints of tasks that this worker holds, because a poll claimed the tasks before their
        hints arrived. If these hints stayed, the pool would count them as hints of other tasks that wait. Then jobs of
        many steps would leave their slots after each step.
        """
        # The claimer's `holds` is not enough, because after an outage of the database it may be True for lost tasks.
        duplicates = self._hints.remove(self._claimer.holds_for_certain)
        if not duplicates:
            return
        failpoints.reach("after_hint")  # a failpoint: here a test can stop or kill the process
        metrics.HINTS.labels("duplicate").inc(len(duplicates))
        acks = asyncio.create_task(_ack_all(duplicates))
        self._acks.add(acks)
        acks.add_done_callback(self._acks.discard)

    async def _follow_hints(self) -> None:
        while True:
            await self._may_start.wait()
            self._may_start.clear()
            while (delivery := self._hints.take()) is not None:
                self._occupy(delivery.hint.tenant, self._follow(delivery))

    async def _follow(self, delivery: Delivery) -> None:
        """Serve one hint: claim its task, run and settle the attempt (`Runner.run`), and only then ACK the hint.

        This method also ACKs the hint after an unforeseen error of the claim or of the attempt. Otherwise the hint
        would count for ever among the unacknowledged hints of this worker, which the broker limits. The task is not
        lost. If the task is claimed, the sweeper (a duty of the leader) frees it when its lease has expired,
        and writes a new hint. Otherwise a poll finds the task. But a hint whose claim or attempt is cancelled stays
        unacknowledged, so the broker redelivers it when this worker's connection closes.
        """
        self._followed_hints += 1
        slot = _Slot(self, delivery.hint.tenant)
        try:
            next_step = await self._run_hinted(delivery, slot)
        except Exception:
            await delivery.ack()
            raise
        else:
            await delivery.ack()
        finally:
            self._followed_hints -= 1
        await self._continue(next_step, slot)

    async def _run_hinted(self, delivery: Delivery, slot: _Slot) -> Claimed | None:
        """Claim the task of the hint and run the attempt. Returns the job's next step, if the settlement claimed it."""
        hint = delivery.hint
        failpoints.reach("after_hint")
        try:
            claimed = await self._claimer.claim(delivery)
        except Exception:
            await asyncio.sleep(_FAILED_CLAIM_SECONDS)
            raise
        if claimed is None:
            metrics.HINTS.labels("duplicate" if self._claimer.holds(hint.task_id) else "stale").inc()
            return None
        metrics.HINTS_CLAIMED.inc()
        next_step = await self._run(claimed, "hint", hint.headers, slot)
        failpoints.reach("after_commit")
        return next_step

    async def _run_polled(self, claimed: Claimed) -> None:
        """Run a task that a poll has claimed. Unlike `_follow`, this has no hint to acknowledge."""
        slot = _Slot(self, claimed.tenant_id)
        next_step = await self._runner.run(claimed, None, slot)
        failpoints.reach("after_commit")
        await self._continue(next_step, slot)

    async def _continue(self, claimed: Claimed | None, slot: _Slot) -> None:
        """Run the job's next steps in the same slot. `claimed`: the next step, which the settlement of the previous
        step has claimed. Returns when a settlement has claimed no further step, and the slot has rested if it must.
        """
        while claimed is not None:
            claimed = await self._run(claimed, "next", None, slot)
        await slot.rest()

    async def _run(
        self, claimed: Claimed, found_by: str, headers: Mapping[str, str] | None, slot: _Slot
    ) -> Claimed | None:
        metrics.CLAIMS.labels(found_by).inc()
        metrics.count_claim(claimed.queue, claimed.previous_state, claimed.waited)
        return await self._runner.run(claimed, headers, slot)

    async def rest(self, is_down: Callable[[], bool]) -> None:
        """Return once `is_down` returns False, after `_REST_SECONDS`, or when the pool stops."""
        until = monotonic() + _REST_SECONDS
        while is_down() and not self._stopping and monotonic() < until:  # noqa: ASYNC110 - no event announces a change
            await asyncio.sleep(_REST_CHECK_SECONDS)

    def may_continue(self, tenant: str) -> bool:
        """Whether a slot of `tenant` may go on with the job's next step. The slot may not go on in four cases: the pool
        stops; the next slot is kept for tasks that are known to wait; the tenant is over its share; a tenant with fewer
        steps waits.
        """
        return (
            not self._stopping
            and not (self._keeps_next_slot and self._others_wait)
            and self._shares.may_keep(tenant)
            and not self._hints.lighter_tenant_waits(tenant)
        )

    # --- polls

    async def _poll(self) -> None:
        """Poll on request and every `_pause_seconds`. Skip this pause while more tasks are due that no hint announces.
        Returns after `stop_claiming`.
        """
        while not self._stopping:
            requested, self._poll_requested = self._poll_requested, False
            self._may_poll.clear()
            hints_arrive = self._broker.delivers_hints and self._broker.connected
            # While hints arrive, a poll at first leaves new tasks to their hints. Otherwise a hint and a poll would
            # claim the same task. A requested poll leaves no tasks to hints, because hints may be lost.
            overdue_seconds = self._pause_seconds if hints_arrive and not requested else 0.0
            result = await self._fill_kept_slot(overdue_seconds)
            if result is None or result.has_more:
                result = await self._claim_due(overdue_seconds)
            polls_again = result.has_more and not (hints_arrive and result.hinted)
            if self._hints and self._is_full:
                self._acknowledge_duplicates()
            self._others_wait = bool(self._hints) or polls_again
            # A poll that found no slot has sent no query, so other tasks may wait. Their hints may still be in the
            # broker, because it sends no further hint while the running attempts hold as many unacknowledged hints as
            # it allows.
            self._keep_slot_if_others_wait(others_wait=self._others_wait or result.found_no_slot)
            if not polls_again:
                await self._wait_for_request()
            elif self._attempts and (result.held_back or self._shares.free <= 0):
                await self._wait_for_slots()
            # else: there are free slots and more tasks, so poll again at once

    async def _fill_kept_slot(self, overdue_seconds: float) -> _PollResult | None:
        """If the slot that is kept for a poll has become free, claim one task for it; else return None."""
        if not self._keeps_next_slot or self._is_full:
            return None
        self._keep_next_slot(keeps=False)
        self._full_since = None
        return await self._claim_due(overdue_seconds, at_most=1)

    async def _wait_for_request(self) -> None:
        """Wait until a poll is requested, at most `_pause_seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pause_seconds):  # wait_for loses a cancellation before Python 3.12
                await self._may_poll.wait()

    async def _wait_for_slots(self) -> None:
        """Wait until an attempt has ended, and then a moment for the ends of other attempts. The reason: a poll for one
        task costs about as much as a poll for many.
        """
        if ended := await self._wait_for_ends(1, min(_FAIR_SECONDS, self._poll_seconds)):
            # One batch of settlements ends many attempts. If enough attempts have ended together with the first one,
            # poll now. The next attempts end only with the next batch, and the slots would be empty until then.
            further_ends = self.slots // _SLOTS_PER_END - (ended - 1)
            await self._wait_for_ends(further_ends, _ENDS_SECONDS)

    async def _wait_for_ends(self, attempts: int, seconds: float) -> int:
        """Wait until this number of attempts has ended, at most `seconds`. Returns how many have ended. The result may
        be larger than `attempts`, because one batch of settlements may end many attempts before this method goes on.
        """
        self._ends_left = attempts
        self._enough_ended.clear()
        if attempts > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):  # wait_for loses a cancellation before Python 3.12
                    await self._enough_ended.wait()
        return attempts - self._ends_left

    def _keep_slot_if_others_wait(self, *, others_wait: bool) -> None:
        """Keep the next free slot for a poll if other tasks have waited, or may have waited, while the pool was full
        for `_FAIR_SECONDS`. The poll gives that slot to the tenant that runs the fewest steps. If other tasks are known
        to wait, a job of many steps frees its slot after the step that runs now (`may_continue`).
        """
        if not others_wait or not self._is_full:
            self._full_since = None
            self._keep_next_slot(keeps=False)
            return
        now = monotonic()
        if self._full_since is None:
            self._full_since = now
        self._keep_next_slot(keeps=now - self._full_since >= min(_FAIR_SECONDS, self._poll_seconds))

    @property
    def _pause_seconds(self) -> float:
        """Seconds until the next poll."""
        return min(_FAIR_SECONDS, self._poll_seconds) if self._is_crowded else self._poll_seconds

    @property
    def _is_full(self) -> bool:
        """Whether no shared slot is free."""
        return self._shares.busy >= self._shares.slots

    @property
    def _is_crowded(self) -> bool:
        # Attempts whose slots are lent also count, because their hints are unacknowledged.
        return bool(self._hints) or len(self._attempts) >= max(1, _CROWDED * self.slots)

    def _keep_next_slot(self, *, keeps: bool) -> None:
        """Keep the next shared slot that becomes free for a poll; with `keeps` False, let hints use it again."""
        if keeps != self._keeps_next_slot:
            self._keeps_next_slot = keeps
            self._shares.kept_for_poll += 1 if keeps else -1
            self._may_start.set()

    async def _claim_due(self, overdue_seconds: float, at_most: int | None = None) -> _PollResult:
        """Claim due tasks, at most `at_most`, and run them in the free slots. New tasks (`pending`) must have been due
        for `overdue_seconds`. If no shared slot is free, claim only tasks of tenants that run nothing here, and run
        them in the reserve.
        """
        shares = self._shares
        # Claim tasks for at most half of the slots. During the poll, attempts in the other half are settled.
        limit = min(shares.free if shares.free > 0 else shares.reserve_free, at_most or max(1, self.slots // 2))
        if limit <= 0 or self._stopping:
            return _PollResult(has_more=True, hinted=not self._finds_unhinted, held_back=False, found_no_slot=True)
        polled = await self._claim_from_database(limit, overdue_seconds)
        if polled is None:
            return _PollResult(has_more=False, hinted=True, held_back=False)  # wait for the next regular poll
        metrics.CLAIMS.labels("look").inc(len(polled.claimed))  # the metric's name for a poll
        hinted = any(claimed.previous_state == "pending" for claimed in polled.claimed)
        if overdue_seconds and hinted:
            self._check_consumer()
        for claimed in polled.claimed:
            metrics.count_claim(claimed.queue, claimed.previous_state, claimed.waited)
            self._occupy(claimed.tenant_id, self._run_polled(claimed))
        # A poll that claimed nothing, because all due tasks are held back, shows nothing about hints.
        if polled.claimed or not polled.held_back:
            self._finds_unhinted = bool(polled.claimed) and not hinted
        return _PollResult(
            has_more=len(polled.claimed) == limit or polled.held_back,
            # Assume that hints announce the tasks that are held back. Exception: the last polls found only tasks
            # without hints, such as snoozed tasks and retries.
            hinted=hinted or (polled.held_back and not self._finds_unhinted),
            held_back=polled.held_back,
        )

    async def _claim_from_database(self, limit: int, overdue_seconds: float) -> Polled | None:
        """Claim up to `limit` due tasks. Meanwhile `limit` slots are kept for them. Returns None if the poll failed."""
        # `rooms`: how many tasks the poll may claim for each tenant. In its fields, "others" are the tenants that run
        # nothing in this pool.
        others_overdue = _LATE_HINT_SECONDS if self._is_crowded else None
        rooms = replace(self._shares.begin_poll(limit), others_overdue=others_overdue)
        try:
            began = perf_counter()
            polled = await self._claimer.poll(self.queues, limit, overdue_seconds, rooms)
            metrics.observe_duration("look", began)
        except TRY_AGAIN as error:
            outages.DATABASE.record_error(error, "polls")
            return None
        except Exception as error:  # noqa: BLE001 - of any kind: the next poll may work
            record_unforeseen("look", error)
            return None
        finally:
            self._shares.end_poll()
            self._may_start.set()
        return polled

    def _check_consumer(self) -> None:
        """Call this after a poll has found new work whose hint has not come. If no other hint has come for
        `_SILENCE_SECONDS` either, the consumer may be dead, so have it rebuilt. Exception: a pool that holds hints
        rebuilds nothing. Such a pool may hold as many unacknowledged hints as the broker allows, and then no further
        hint comes while their attempts run.
        """
        if self._hints or self._followed_hints or not self._broker.connected:
            return
        silent_since = max(self._silent_since, self._broker.last_delivery_at or 0.0)
        if monotonic() - silent_since > _SILENCE_SECONDS:
            self._silent_since = monotonic()
            log.warning("polls find work without hints: the consumer is rebuilt")
            self._broker.rebuild_consumer()


async def _ack_all(deliveries: Sequence[Delivery]) -> None:
    for delivery in deliveries:
        await delivery.ack()
