"""The parts of a worker. `open_parts` opens them in order and closes them in the opposite order.

`Worker` enters `open_parts` once. Each part uses the parts before it, so they open in this order: servers (database,
broker, store), registration (the worker's row), announcer (publishes hints, the messages about due tasks), heartbeat,
batchers, runner, slot pools, duties (maintenance loops). Before `open_parts`, worker/warm_up.py makes the work
directory and starts the children (the processes of isolated steps).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

import structlog

from leasehold.broker import make_broker
from leasehold.broker.announcer import announcing
from leasehold.broker.base import Broker
from leasehold.db.database import Pool, make_pool
from leasehold.db.pool_sizes import EXPORTER_REPLICA_POOL, pool_of_worker
from leasehold.db.poolers import check_pooler
from leasehold.db.replica import open_replica
from leasehold.domain.errors import StoreError
from leasehold.domain.pipeline import Opener, RegistryOpener
from leasehold.domain.registry import Pipelines
from leasehold.evaluation.evaluator import evaluating
from leasehold.evaluation.templates import Templates
from leasehold.exporter.exporter import Exporter, exporting
from leasehold.kinds.metrics import questions_of
from leasehold.pipelines import kinds_of
from leasehold.runtime.gather import cancel_and_wait, gather_or_cancel
from leasehold.runtime.periodic import Periodic
from leasehold.runtime.transient import until_answered
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.telemetry import attempt_logs
from leasehold.transitions.claims import LeaseTerms
from leasehold.worker.attempts import chunk_writer
from leasehold.worker.attempts import reporter as reports
from leasehold.worker.attempts.directories import Directories
from leasehold.worker.attempts.inline import InlineAttempts
from leasehold.worker.attempts.isolated import IsolatedAttempts
from leasehold.worker.attempts.journals import Journals
from leasehold.worker.attempts.log_and_stream import LogAndStreamWriters
from leasehold.worker.attempts.reporter import Reporter
from leasehold.worker.attempts.runner import Runner
from leasehold.worker.claiming.claimer import Claimer
from leasehold.worker.claiming.hint_router import HintRouter
from leasehold.worker.claiming.slot_pools import SlotPools
from leasehold.worker.leases.claim_batcher import ClaimBatcher
from leasehold.worker.leases.heartbeat import Heartbeat
from leasehold.worker.leases.registration import Registration, registered
from leasehold.worker.leases.settlement_batcher import SettlementBatcher
from leasehold.worker.leases.starts import Starts
from leasehold.worker.maintenance import relay as relaying
from leasehold.worker.maintenance.admitter import Admitter
from leasehold.worker.maintenance.duties import Duties
from leasehold.worker.maintenance.relay import Relay
from leasehold.worker.sandbox import isolation
from leasehold.worker.sandbox.children import Children
from leasehold.worker.served_queues import ServedQueues
from leasehold.worker.warm_up import WarmUp

log = structlog.get_logger(__name__)

#: The most tasks that one statement claims or settles, and the most requests of workflows in one round trip.
_BATCH = 128
#: While a worker starts, it waits for the database for at most this many seconds.
_PATIENCE_SECONDS = 60.0
#: Before a worker claims tasks, it waits for its presence (the lock by which other workers see that it lives), for at
#: most this many seconds.
_PRESENCE_SECONDS = 5.0
#: When the worker closes, it waits this many seconds for handlers to return their connections. Then it cuts the
#: connections that were not returned.
_CLOSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Parts:
    """The open parts. `ready`: the queues that the worker may serve immediately. `is_complete`: `ready` has all queues
    that the worker may serve. `warming`: an asyncio task that ends when the children have started; its result is all
    queues that the worker may serve. `loops`: name -> a function that the worker runs as an asyncio task. `admitter`:
    lets jobs start that wait at a concurrency limit.
    """

    pool: Pool
    registration: Registration
    broker: Broker
    store: ObjectStore
    children: Children
    reporter: Reporter
    admitter: Admitter
    isolated: IsolatedAttempts
    runner: Runner
    slot_pools: SlotPools
    ready: frozenset[str]
    is_complete: bool
    warming: asyncio.Task[frozenset[str]]
    loops: dict[str, Callable[[], Coroutine[Any, Any, None]]]


@asynccontextmanager
async def open_parts(
    settings: Settings,
    pipelines: Pipelines,
    queues: ServedQueues,
    worker: UUID,
    warm_up: WarmUp,
    *,
    on_failure: Callable[[BaseException], None],
    on_drain: Callable[[], None],
) -> AsyncIterator[Parts]:
    """Open the parts for the block. `on_failure`: called with the error that has ended the heartbeat. `on_drain`:
    called when an operator asks this worker to drain, or when most of its threads are stuck.

    Raises DeclarationError or ImportError when a handler cannot be loaded, and DeclarationError when this worker can
    serve none of its queues.
    """
    async with AsyncExitStack() as stack:
        children = warm_up.children
        warming = asyncio.create_task(_servable_queues(warm_up, queues, settings), name="warming")
        stack.push_async_callback(cancel_and_wait, warming)
        # `opened`: pipeline -> the context that its opener has opened for the handlers of its inline steps.
        pool, broker, store, opened = await _open_servers(stack, settings, pipelines, queues, warming)
        # If the children have started by now (`warming` is done), the worker begins with all queues that it may serve.
        # Otherwise it begins with the inline queues, and adds the isolated queues later. A worker without inline queues
        # is always complete here, because `_open_servers` has waited for the children.
        is_complete = warming.done()
        ready = warming.result() if is_complete else queues.inline
        await until_answered(partial(check_pooler, settings), within=_PATIENCE_SECONDS)
        registration = await stack.enter_async_context(
            registered(pool, _registration_of(settings, pipelines, queues, worker, ready, children))
        )

        announcer = await stack.enter_async_context(announcing(broker, pool))
        reporter, admitter = Reporter(pool), Admitter(pool, announcer)

        starts = Starts()  # counts, for each queue, the attempts that this worker starts
        heartbeat = Heartbeat(settings, registration, starts, on_failure, on_drain)
        heartbeat.start()
        stack.callback(heartbeat.close)
        await heartbeat.wait_for_presence(_PRESENCE_SECONDS)
        terms = LeaseTerms(worker, settings.lease_seconds, settings.trust_margin_seconds, settings.max_losses)
        router = HintRouter(announcer)
        settlements = SettlementBatcher(settings, terms, heartbeat, router.announce, _BATCH)
        claims = ClaimBatcher(settings, terms, heartbeat, _BATCH)
        stack.enter_context(attempt_logs.installed())
        writers = LogAndStreamWriters(settings)
        journals = Journals(settings, router.announce, _BATCH)
        for batcher in (writers.logs, writers.streams, settlements, claims, journals):
            batcher.start()
            stack.push_async_callback(batcher.close)

        directories = Directories(warm_up.work_dir)
        inline = InlineAttempts(
            store=store,
            pool=pool,
            reporter=reporter,
            directories=directories,
            opened=opened,
            journals=journals,
            announcer=announcer,
            settings=settings,
            on_most_stuck=on_drain,  # over half of the threads are stuck: only the end of the process frees them
        )
        stack.callback(inline.close)
        isolated = IsolatedAttempts(
            store=store,
            pool=pool,
            children=children,
            warming=warming,
            reporter=reporter,
            directories=directories,
            settings=settings,
        )
        evaluator = await stack.enter_async_context(evaluating(settings))
        templates = Templates(pipelines, evaluator)
        runner = Runner(
            pipelines, pool, heartbeat, starts, settlements, templates, admitter, directories, inline, isolated, writers
        )
        # `takes_over`: the claimer takes over the leases of dead workers. Only a presence shows that a worker has died.
        claimer = Claimer(pool, claims, heartbeat, terms, max_claims=_BATCH, takes_over=settings.presence)
        slot_pools = SlotPools(settings, pipelines, broker, router, claimer, runner)

        kinds = kinds_of(pipelines)
        replica = await stack.enter_async_context(open_replica(settings, "worker", EXPORTER_REPLICA_POOL, pool))
        # `questions_of`: the statements by which kinds of work read their metrics from the database.
        exporter = stack.enter_context(exporting(settings, worker, pool, broker, questions_of(kinds), replica))
        duties = Duties(
            settings,
            registration,
            pool,
            store,
            announcer,
            templates,
            pipelines.find("webhook"),
            kinds,
            router.deliver_here,
        )
        relay = Relay(pool, broker, announcer)
        yield Parts(
            pool=pool,
            registration=registration,
            broker=broker,
            store=store,
            children=children,
            reporter=reporter,
            admitter=admitter,
            isolated=isolated,
            runner=runner,
            slot_pools=slot_pools,
            ready=ready,
            is_complete=is_complete,
            warming=warming,
            loops=_loops(exporter, duties, relay, reporter, admitter, writers),
        )


def _registration_of(
    settings: Settings,
    pipelines: Pipelines,
    queues: ServedQueues,
    worker: UUID,
    ready: frozenset[str],
    children: Children,
) -> Registration:
    """The contents of the worker's row. `handlers`: the names of the steps that this worker can run.

    This process has loaded the handlers of inline steps by now. The handlers of isolated steps are loaded only in the
    children. So this function passes the pipelines of the children, and `loaded_handlers` adds the isolated steps of
    these pipelines. If `_servable_queues` has closed the children by now, they have no pipelines.
    """
    handlers = pipelines.loaded_handlers(children.pipelines)
    return Registration(worker, ready, slots=queues.slots, pool=settings.worker_pool, handlers=handlers)


def _loops(
    exporter: Exporter,
    duties: Duties,
    relay: Relay,
    reporter: Reporter,
    admitter: Admitter,
    writers: LogAndStreamWriters,
) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
    periodic = [
        *duties.all(),
        Periodic(relaying.DUTY, relay.turn, every=relaying.EVERY_SECONDS),
        Periodic(reports.DUTY, reporter.turn, every=reports.EVERY_SECONDS),
        *(
            Periodic(f"attempt_{writer.name}", writer.turn, every=chunk_writer.EVERY_SECONDS)
            for writer in (writers.logs, writers.streams)
        ),
        Periodic("admitter", admitter.turn, every=0.0),  # no pause: a turn waits until a job may have ended
    ]
    return {"exporter": exporter.run} | {duty.name: duty.run for duty in periodic}


async def _open_servers(
    stack: AsyncExitStack,
    settings: Settings,
    pipelines: Pipelines,
    queues: ServedQueues,
    warming: asyncio.Task[frozenset[str]],
) -> tuple[Pool, Broker, ObjectStore, dict[str, Any]]:
    """Open the connections and the inline pipelines. Meanwhile the children load their handlers on other cores, which
    takes about a second. If the worker has an inline queue to serve, this function does not wait for the children.
    """
    broker = make_broker(settings)
    store = ObjectStore.from_settings(settings)

    async def open_pool() -> Pool:
        pool = await make_pool(settings, "worker", pool_of_worker(settings))
        stack.push_async_callback(_close_pool, pool)
        return pool

    async def open_store() -> None:
        await store.open()
        stack.push_async_callback(store.close)
        try:
            await store.probe()
        except StoreError as error:
            # Until a probe succeeds, the worker assumes a store without conditional writes. That is slower, but safe.
            log.warning("the object store does not answer yet", error=str(error))

    stack.push_async_callback(broker.close)
    await broker.open()
    opening: list[Coroutine[Any, Any, Any]] = [
        open_pool(),
        _open_pipelines(stack, settings, pipelines, queues),
        open_store(),
        *([] if queues.inline else [result_of(warming)]),
    ]
    pool, opened, *_ = await gather_or_cancel(opening)
    return pool, broker, store, opened


async def _close_pool(pool: Pool) -> None:
    """Close the pool. `Pool.close` waits for each connection that is in use, and a handler that did not stop may keep a
    connection. So after `_CLOSE_SECONDS`, cut the connections that are still in use.
    """
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await pool.close()
    except TimeoutError:
        log.warning("a handler that runs on keeps its connection: the connection is cut")
        pool.terminate()


async def _servable_queues(warm_up: WarmUp, queues: ServedQueues, settings: Settings) -> frozenset[str]:
    """Wait until the children have started. Returns the queues that the worker may serve. The isolated queues are among
    them only if this kernel has the fences that confine children, or if LEASEHOLD_ISOLATION=best_effort. If the
    isolated queues are left out, close the children.
    """
    await result_of(warm_up.started)
    allowed = isolation.may_serve(warm_up.children.isolation, queues.every, queues.isolated, settings)
    if not queues.isolated <= allowed:  # `allowed` has either all isolated queues or none, so now no child has work
        await warm_up.children.close()
    return allowed


async def _open_pipelines(
    stack: AsyncExitStack, settings: Settings, pipelines: Pipelines, queues: ServedQueues
) -> dict[str, Any]:
    """Load the handlers of inline steps, and open the context of each pipeline that has an opener. Returns the contexts
    by pipeline. Pipelines with the same opener share one context.
    """
    opened: dict[str, Any] = {}
    by_opener: dict[Opener | RegistryOpener, Any] = {}
    for name in queues.inline_pipelines:
        loaded = pipelines.load_handlers(name)
        opener = loaded.registry_opener or loaded.opener
        if opener is None:
            continue
        if opener not in by_opener:
            context = loaded.opened(settings, pipelines)
            assert context is not None
            by_opener[opener] = await stack.enter_async_context(context)
        opened[name] = by_opener[opener]
    return opened


async def result_of(task: asyncio.Task[Any]) -> Any:
    """Wait for the task. Cancelling the caller does not cancel the task."""
    return await asyncio.shield(task)
