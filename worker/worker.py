"""One worker process: wires the parts, starts them in order, and stops them in the opposite one."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self, TypeVar
from uuid import UUID

import asyncpg
import structlog

from leasehold.broker import make_broker
from leasehold.broker.announcer import Announcer
from leasehold.broker.base import Delivery
from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection, make_pool
from leasehold.db.pool_sizes import pool_of_worker
from leasehold.domain.errors import DeclarationError, StoreError
from leasehold.domain.ids import new_id
from leasehold.domain.pipeline import Step, pinned_queue, unpinned_queue
from leasehold.domain.registry import Pipelines
from leasehold.evaluation.evaluator import evaluating
from leasehold.evaluation.templates import Templates
from leasehold.exporter.exporter import exporting
from leasehold.kinds.metrics import questions_of
from leasehold.kinds.schemas import schemas_of
from leasehold.kinds.settings import check_settings
from leasehold.pipelines import kinds_of
from leasehold.runtime.gather import gather_or_cancel
from leasehold.runtime.periodic import Periodic
from leasehold.runtime.transient import TRY_AGAIN, until_answered
from leasehold.selfcheck import as_log, check_all
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.transitions import workers
from leasehold.transitions.claims import Claimed, LeaseTerms, Polled
from leasehold.worker import metrics
from leasehold.worker.attempts import reporter
from leasehold.worker.attempts.heartbeat import Heartbeat
from leasehold.worker.attempts.reporter import Reporter
from leasehold.worker.attempts.runner import Runner
from leasehold.worker.attempts.workdir import WorkDir
from leasehold.worker.claiming.batchers import ClaimBatcher, SettlementBatcher
from leasehold.worker.claiming.polls import Polls
from leasehold.worker.claiming.shares import Rooms
from leasehold.worker.claiming.slots import SlotPool, claim_with_takeover
from leasehold.worker.maintenance import relay
from leasehold.worker.maintenance.admitter import Admitter
from leasehold.worker.maintenance.duties import Duties
from leasehold.worker.maintenance.relay import Relay
from leasehold.worker.sandbox import isolation
from leasehold.worker.sandbox.children import Children

log = structlog.get_logger(__name__)
_T = TypeVar("_T")

#: The most tasks that one claiming or settling statement takes.
_BATCH = 128
#: Hints in hand per slot: a band's share of them is not lent to the others, and must fill the slots by itself.
_HINTS_PER_SLOT = 4
_CHECK_AFTER_SECONDS = 5.0
_START_SECONDS = 60.0  # how long the database may be away when a worker starts
#: How long a worker waits for its presence before it claims.
_PRESENCE_SECONDS = 5.0


class Worker:
    """`async with Worker(settings)`: it serves until `drain` or the end of the block."""

    def __init__(self, settings: Settings, pipelines: Pipelines | None = None) -> None:
        self.id = new_id()  # fresh for every start: a reused name would hide what its predecessor held
        self.settings = settings
        self.pipelines = pipelines if pipelines is not None else Pipelines.from_source(settings.pipelines)
        check_settings(kinds_of(self.pipelines))
        self._wanted = _served(self.pipelines, settings)
        #: Those that it serves; with isolated steps only when the fences around its children are known.
        self.queues: frozenset[str] = frozenset()
        #: Set when it is decided which of its queues it may serve, and it does.
        self.complete = asyncio.Event()
        self._by_queue: dict[str, SlotPool] = {}
        self._draining = False
        self._opened = AsyncExitStack()
        self._loops: list[asyncio.Task[None]] = []
        self._crews: list[SlotPool] = []
        self._broken: asyncio.Future[None] = asyncio.Future()
        #: Set when an operator asked this worker to drain: do so, and end the process.
        self.retired = asyncio.Event()

    async def __aenter__(self) -> Self:
        structlog.contextvars.bind_contextvars(worker_id=str(self.id))
        try:
            await self._start()
        except BaseException:
            await self._opened.aclose()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        for slot_pool in self._crews:
            await slot_pool.close()
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self._opened.aclose()

    async def drain(self) -> None:
        """Stop taking work, finish what runs or give it back, within `drain_seconds`."""
        log.info("draining", seconds=self.settings.drain_seconds)
        metrics.DRAINING.set(1)
        self._draining = True
        await self._broker.stop_consuming()
        for slot_pool in self._crews:
            slot_pool.stop_taking()
        try:
            async with asyncio.timeout(self.settings.drain_seconds):
                await self._idle()
        except TimeoutError:
            log.warning("giving back what is still running")
            self._runner.give_back()
            await self._idle()

    async def broken(self) -> None:
        """Returns never; raises the error that ended a part which must not end. Then the process should go."""
        await asyncio.shield(self._broken)

    def _break(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)

    def _watch(self, loop: asyncio.Task[None]) -> None:
        if not loop.cancelled() and (error := loop.exception()) is not None:
            self._break(error)

    async def _idle(self) -> None:
        for slot_pool in self._crews:
            await slot_pool.finished()

    # --- starting

    async def _start(self) -> None:
        settings = self.settings
        work_dir = self._opened.enter_context(WorkDir(_root(settings), self.id))
        # Children load their handlers for a second, on cores of their own. Inline queues do not wait for that.
        inline = self._plan_children(work_dir)
        warming = asyncio.create_task(self._warm(), name="warming")
        self._opened.push_async_callback(_ended, warming)
        await gather_or_cancel([self._open_servers(), *([] if inline else [_done(warming)])])
        later = not warming.done()
        self.queues = inline if later else warming.result()
        self._presence_key = await self._register()
        self._announcer = Announcer(self._broker, self._on_connection)
        self._announcer.start()
        self._opened.push_async_callback(self._announcer.close)
        await self._start_attempts(work_dir)
        kinds = kinds_of(self.pipelines)
        exporter = self._opened.enter_context(
            exporting(settings, self.id, self._pool, self._broker, questions_of(kinds))
        )
        evaluator = await self._opened.enter_async_context(evaluating(settings))
        duties = Duties(
            settings,
            self.id,
            self._pool,
            self._store,
            self._announcer,
            Templates(self.pipelines, evaluator),
            self.pipelines.find("webhook"),
            kinds,
        )
        relaying = Relay(self._pool, self._broker, self._announcer)
        periodic = [
            *duties.all(),
            Periodic(relay.DUTY, relaying.turn, every=relay.EVERY_SECONDS),
            Periodic(reporter.DUTY, self._reporter.turn, every=reporter.EVERY_SECONDS),
            Periodic("admitter", self._admitter.turn, every=0.0),
        ]
        self._loops = [asyncio.create_task(exporter.run(), name="exporter")]
        self._loops += [asyncio.create_task(duty.run(), name=duty.name) for duty in periodic]
        for loop in self._loops:
            loop.add_done_callback(self._watch)
        await self._consume()
        self._loops.append(asyncio.create_task(self._check(), name="self-check"))
        self._say_serving()
        if not later:
            self.complete.set()
        else:
            joining = asyncio.create_task(self._serve_isolated(warming), name="isolated queues")
            joining.add_done_callback(self._watch)
            self._loops.append(joining)

    def _say_serving(self) -> None:
        log.info(
            "serving",
            queues=sorted(self.queues),
            later=sorted(self._heavy - self.queues),
            broker=self._broker.name,
            isolation=self._children.isolation,
        )

    async def _serve_isolated(self, warming: asyncio.Task[frozenset[str]]) -> None:
        """Serve the isolated queues, too, now that it is known which may be. Raises DeclarationError when handlers do
        not load: this worker is not what it was meant to be, and ends, but not in the middle of what runs.
        """
        try:
            queues = await _done(warming)
        except DeclarationError:
            await self.drain()
            raise
        if queues != self.queues and not self._draining:
            await self._add_isolated(queues)
        self.complete.set()

    async def _add_isolated(self, queues: frozenset[str]) -> None:
        async def say() -> None:
            async with self._pool.acquire() as connection:
                await workers.serves(connection, self.id, sorted(queues))

        await until_answered(say, within=_START_SECONDS)
        slot_pool = self._isolated_crew()
        slot_pool.start()
        self._broker.consume_also(self._take_in([slot_pool]))
        self.queues = queues
        self._say_serving()

    async def _open_servers(self) -> None:
        settings = self.settings
        self._pool = await self._opened.enter_async_context(make_pool(settings, "worker", pool_of_worker(settings)))
        self._broker = make_broker(settings)
        await self._broker.open()
        self._opened.push_async_callback(self._broker.close)
        self._store = ObjectStore.from_settings(settings)
        await self._store.open()
        self._opened.push_async_callback(self._store.close)
        try:
            await self._store.probe()
        except StoreError as error:
            # Taken for one that does not honour conditions until a worker starts while it answers: the careful way.
            log.warning("the object store does not answer yet", error=str(error))

    async def _register(self) -> int:
        async def register() -> int:
            async with self._pool.acquire() as connection:
                try:
                    return await workers.register(
                        connection,
                        self.id,
                        host=socket.gethostname(),
                        pid=os.getpid(),
                        version=version("leasehold"),
                        queues=sorted(self.queues),
                    )
                except asyncpg.UndefinedTableError as error:
                    raise ConnectionError("the database is not migrated yet") from error

        key = await until_answered(register, within=_START_SECONDS)
        self._opened.push_async_callback(self._unregister)
        return key

    async def _unregister(self) -> None:
        try:
            async with self._pool.acquire() as connection:
                await workers.resign(connection, self.id)
                await workers.unregister(connection, self.id)
        except TRY_AGAIN as error:
            log.warning("left without saying so; the sweeper forgets this worker", error=type(error).__name__)

    def _plan_children(self, work_dir: Path) -> frozenset[str]:
        """Returns the queues that need none."""
        settings = self.settings
        isolated = {name: steps for name in self.pipelines_served() if (steps := self._isolated_steps(name))}
        of_children = {step.queue for steps in isolated.values() for step in steps}
        self._heavy = frozenset(queue for queue in self._wanted if unpinned_queue(queue) in of_children)
        self._children = Children(
            (settings.worker_children or os.cpu_count() or 1) if isolated else 0,
            pipelines=sorted(isolated),
            work_dir=work_dir,
            source=settings.pipelines,
        )
        self._opened.push_async_callback(self._children.close)
        return self._wanted - self._heavy

    async def _warm(self) -> frozenset[str]:
        """Which queues this worker may serve depends on how its children are fenced in."""
        await self._children.start()
        queues = isolation.may_serve(self._children.isolation, self._wanted, self._heavy, self.settings)
        if not self._heavy <= queues:
            self._heavy = frozenset()
            await self._children.close()
        return queues

    async def _start_attempts(self, work_dir: Path) -> None:
        settings = self.settings
        self._reporter = Reporter(self._pool)
        self._admitter = Admitter(self._pool, self._announcer)
        opened: dict[str, Any] = {}
        for name in self.pipelines_served():
            if len(self._isolated_steps(name)) < len(self.pipelines[name].steps):
                loaded = self.pipelines.load_handlers(name)
                if loaded.opener is not None:
                    opened[name] = await self._opened.enter_async_context(loaded.opener(settings))
        self._heartbeat = heartbeat = Heartbeat(settings, self.id, self._presence_key, self._break, self.retired.set)
        heartbeat.start()
        self._opened.callback(heartbeat.close)
        await heartbeat.met(_PRESENCE_SECONDS)
        self._settle = SettlementBatcher(settings, self._terms, heartbeat.all_held, self._announce, _BATCH)
        self._claims = ClaimBatcher(settings, self._terms, heartbeat.holds, heartbeat.sure, _BATCH)
        for batcher in (self._settle, self._claims):
            batcher.start()
            self._opened.push_async_callback(batcher.close)
        self._runner = Runner(
            pipelines=self.pipelines,
            store=self._store,
            pool=self._pool,
            children=self._children,
            heartbeat=heartbeat,
            settle=self._settle,
            reporter=self._reporter,
            admitter=self._admitter,
            work_dir=work_dir,
            opened=opened,
            settings=settings,
        )
        inline = self.queues - self._heavy
        for own, slots in self._own_slots(inline):
            inline -= own
            self._crews.append(self._crew(sorted(own), slots, slots))
        shared = settings.worker_concurrency
        reserve = shared if settings.worker_reserve is None else settings.worker_reserve
        if inline:
            self._crews.append(self._crew(sorted(inline), shared, reserve))
        if self._heavy & self.queues:
            self._crews.append(self._isolated_crew())

    def _isolated_crew(self) -> SlotPool:
        return self._crew(sorted(self._heavy), self.settings.worker_children or os.cpu_count() or 1, 0)

    def _own_slots(self, inline: frozenset[str]) -> list[tuple[frozenset[str], int]]:
        """Of the pipelines that have slots of their own: the queues, and how many."""
        own = [
            (frozenset(queue for queue in inline if unpinned_queue(queue) in {step.queue for step in p.steps}), p.slots)
            for p in self.pipelines
            if p.slots is not None
        ]
        return [(queues, getattr(self.settings, setting)) for queues, setting in own if queues]

    def _crew(self, queues: Sequence[str], slots: int, reserve: int) -> SlotPool:
        return SlotPool(
            queues,
            slots,
            reserve=reserve,
            claim=self._claim,
            claim_due=partial(self._look, Polls()),
            run=self._runner.run,
            holds=self._heartbeat.holds,
            broker=self._broker,
            poll_seconds=self.settings.poll_seconds,
        )

    async def _consume(self) -> None:
        by_queue = self._by_queue
        slot_pools, self._crews = self._crews, []
        await self._broker.consume(
            self._take_in(slot_pools),
            lambda delivery: _deliver(by_queue, delivery),
            lambda queue: by_queue[queue].look() if queue in by_queue else None,
        )
        for slot_pool in slot_pools:
            slot_pool.start()
        metrics.SLOTS.labels("busy").set_function(lambda: sum(slot_pool.busy for slot_pool in self._crews))

    def _take_in(self, slot_pools: Sequence[SlotPool]) -> dict[str, int]:
        """Begin to hand hints to these, too; returns how many of each of their queues they want in hand."""
        self._crews += slot_pools
        self._by_queue.update({queue: slot_pool for slot_pool in slot_pools for queue in slot_pool.queues})
        metrics.SLOTS.labels("all").set(sum(slot_pool.shared for slot_pool in self._crews))
        metrics.SLOTS.labels("reserve").set(sum(slot_pool.reserve for slot_pool in self._crews))
        return {queue: _HINTS_PER_SLOT * slot_pool.slots for slot_pool in slot_pools for queue in slot_pool.queues}

    async def _check(self) -> None:
        """Say once what the parts can promise, so that nobody has to find out at night."""
        await asyncio.sleep(_CHECK_AFTER_SECONDS)  # the broker has connected by then, or is away
        try:
            schemas = schemas_of(kinds_of(self.pipelines))
            findings = await check_all(self._pool.acquire, self._broker, self._store, self.settings, schemas)
        except Exception:  # it only tells; a worker that cannot tell still works
            log.exception("the self-check failed")
            return
        said = as_log(findings)
        (log.warning if said["wrong"] else log.info)("self-check", **said)

    # --- what the parts ask for

    def pipelines_served(self) -> list[str]:
        declared = {unpinned_queue(queue) for queue in self._wanted}
        return [p.name for p in self.pipelines if any(step.queue in declared for step in p.steps)]

    def _isolated_steps(self, pipeline: str) -> list[Step]:
        return [step for step in self.pipelines[pipeline].steps if step.isolated]

    @property
    def _terms(self) -> LeaseTerms:
        settings = self.settings
        return LeaseTerms(self.id, settings.lease_seconds, settings.trust_margin_seconds, settings.max_losses)

    def _announce(self, announcements: Sequence[Announcement]) -> None:
        """Tell everybody; and ourselves at once, without the way over the broker."""
        self._announcer.announce(announcements)
        for announcement in announcements:
            for slot_pool in self._crews:
                if announcement.hint.queue in slot_pool.queues:
                    slot_pool.deliver(Delivery(announcement.hint, _nothing_to_ack))

    async def _claim(self, delivery: Delivery) -> Claimed | None:
        if not self.settings.presence:
            return await self._claims.claim(delivery.hint.task_id)
        return await claim_with_takeover(delivery, self._claims.claim, self._gone_owner)

    async def _gone_owner(self, task_id: UUID) -> UUID | None:
        try:
            async with self._pool.acquire() as connection:
                return await workers.gone_owner(connection, task_id)
        except TRY_AGAIN:  # nobody can tell now; whoever gives up here keeps the hint, and the sweeper finds the task
            return None

    async def _look(self, polls: Polls, queues: Sequence[str], limit: int, overdue: float, rooms: Rooms) -> Polled:
        async with self._pool.acquire() as connection:
            return await polls.take(connection, self._terms, queues, min(limit, _BATCH), overdue, rooms)

    async def _on_connection(self, work: Callable[[Connection], Awaitable[None]]) -> None:
        async with self._pool.acquire() as connection:
            await work(connection)


async def _nothing_to_ack() -> None:
    """The hint came from ourselves; the one that everybody gets is acknowledged when it arrives."""


async def _done(task: asyncio.Task[_T]) -> _T:
    """Its result; it goes on when whoever waits here is cancelled."""
    return await asyncio.shield(task)


async def _ended(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _deliver(by_queue: dict[str, SlotPool], delivery: Delivery) -> None:
    by_queue[delivery.hint.queue].deliver(delivery)


def _served(pipelines: Pipelines, settings: Settings) -> frozenset[str]:
    declared = {step.queue for pipeline in pipelines for step in pipeline.steps}
    chosen = frozenset(settings.queues or declared)
    return chosen | {pinned_queue(queue, label) for queue in chosen for label in settings.labels if "@" not in queue}


def _root(settings: Settings) -> Path:
    return Path(settings.work_dir) if settings.work_dir else Path(os.environ.get("TMPDIR", "/tmp")) / "leasehold"  # noqa: S108 - WorkDir checks who owns it
