"""One worker: `async with Worker(settings)` serves its queues until `drain`, or until the end of the block.

parts.py opens the parts of the worker. This module starts them, and stops the worker. The isolated queues have steps
that run in child processes (children). This module adds these queues as soon as the children are ready. A worker with
only isolated queues imports parts.py while the children load their handlers, because that import takes 0.3 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

import structlog

from leasehold.domain.errors import DeclarationError
from leasehold.domain.ids import new_id
from leasehold.domain.registry import Pipelines
from leasehold.kinds.schemas import schemas_of
from leasehold.kinds.settings import check_settings
from leasehold.pipelines import kinds_of, with_bulk_operations
from leasehold.runtime.foreign_errors import exits_contained
from leasehold.runtime.gather import cancel_and_wait
from leasehold.settings import Settings
from leasehold.telemetry import dead_letters
from leasehold.telemetry.listener import Health
from leasehold.worker import metrics
from leasehold.worker.served_queues import ServedQueues
from leasehold.worker.warm_up import warm_up

if TYPE_CHECKING:
    from leasehold.worker.parts import Parts

log = structlog.get_logger(__name__)

#: The module that opens the parts. The head says when it is imported.
_PARTS = "leasehold.worker.parts"
#: Seconds from the start to the self-check. By then the broker has connected, or is away.
_CHECK_AFTER_SECONDS = 5.0
#: The longest time, in seconds, of the third wait of `Worker.drain`. A handler has up to 10 of these seconds to stop
#: (`_MAX_STOP_SECONDS` of attempts/runner.py). A container is killed 195 s after its time to drain, and
#: 180 s of these are for the second wait. In the other 15 s, after the third wait, the worker must still release its
#: tasks, and delete its row.
_RELEASE_SECONDS = 12.0
#: The worker records once in this many seconds, for the liveness probe, that its event loop runs.
_PULSE_SECONDS = 5.0


class Worker:
    """One worker. `queues`: the queues that it serves now. The worker adds the isolated queues when the children have
    started, and have reported which fences confine them. (A fence is a mechanism of the kernel, for example Landlock.)
    """

    parts: Parts

    def __init__(
        self,
        settings: Settings,
        pipelines: Pipelines | None = None,
        *,
        health: Health | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        """`health`: what the probes read. `pipelines`: the registry; by default that of the setting `pipelines`. Child
        processes always load the setting's registry, after they have imported `modules`.
        """
        # A new id at every start. Otherwise the leases of a dead process would look like the leases of this worker.
        self.id = new_id()
        self.settings = settings
        self.pipelines = with_bulk_operations(
            pipelines if pipelines is not None else Pipelines.from_source(settings.pipelines)
        )
        check_settings(kinds_of(self.pipelines))
        # Make the metric of dead letters now, at 0 for each pipeline, because an alert must see the first increase.
        dead_letters.declare(pipeline.name for pipeline in self.pipelines)
        self.queues: frozenset[str] = frozenset()
        self.health = health or Health()
        self._modules = modules
        #: Set when the worker serves all queues that it may serve.
        self.complete = asyncio.Event()
        #: Set when an operator asks this worker to drain, or when most of its threads are stuck. The process should
        #: then drain the worker, and end.
        self.retired = asyncio.Event()
        # All queues that this worker may serve, and which of them are isolated.
        self._chosen = ServedQueues.chosen(self.pipelines, settings)
        metrics.declare_queues(self._chosen.every)
        self._stack = AsyncExitStack()
        self._loops: list[asyncio.Task[None]] = []
        self._failure: asyncio.Future[None] = asyncio.Future()
        self._draining = False

    async def __aenter__(self) -> Self:
        structlog.contextvars.bind_contextvars(worker_id=str(self.id))
        self._stack.enter_context(exits_contained())  # an asyncio task that a handler made must not end the worker
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._stack.aclose()

    async def drain(self) -> None:
        """Claim no more tasks, and wait until no attempt runs. There are three waits:

        1. Wait for all attempts, for at most `drain_seconds`. If all have ended, return.
        2. Stop the attempts that still run, and release their leases, so that other workers can claim the tasks. But
           attempts of short steps that are not cancelable go on. Wait until these have ended, for at most the 180 s of
           `LONGEST_TO_FINISH_SECONDS` (attempts/runner.py). A step is short if its time limit is not longer than that.
        3. Wait for the attempts that were stopped, for at most `_RELEASE_SECONDS`.

        This method returns in time even if claims or settlements still wait for PostgreSQL, for example because
        somebody has locked a job's row. When the worker closes, it releases the tasks of these claims and settlements.
        """
        log.info("draining", seconds=self.settings.drain_seconds)
        metrics.DRAINING.set(1)
        self._draining = True
        self.health.is_ready = False
        await self.parts.broker.stop_consuming()
        self.parts.slot_pools.stop_claiming()
        await self.parts.registration.record_drain(self.parts.pool)
        if await self._have_finished(self.settings.drain_seconds):
            return
        log.warning("releasing the attempts that still run")
        self.parts.runner.release()
        await self.parts.runner.finish()
        if not await self._have_finished(_RELEASE_SECONDS):
            log.warning("the drain ends although claims or settlements still wait for PostgreSQL")

    async def _have_finished(self, seconds: float) -> bool:
        """Wait until no attempt runs, for at most `seconds`. Returns whether all attempts have ended."""
        try:
            async with asyncio.timeout(seconds):
                await self.parts.slot_pools.finished()
        except TimeoutError:
            return False
        return True

    async def failed(self) -> None:
        """Wait until a part of the worker ends by an error, and raise this error. Then the process should end."""
        await asyncio.shield(self._failure)

    # --- start

    async def _start(self) -> None:
        # If there are inline queues, the worker must serve them as early as possible. So import parts.py before the
        # children start, because the import would be slower while children load their handlers.
        if self._chosen.inline:
            import_module(_PARTS)
        warming = await self._stack.enter_async_context(warm_up(self.settings, self._chosen, self.id, self._modules))
        await asyncio.to_thread(import_module, _PARTS)
        from leasehold.worker.parts import open_parts  # noqa: PLC0415 - see the head of this module

        self.parts = parts = await self._stack.enter_async_context(
            open_parts(
                self.settings,
                self.pipelines,
                self._chosen,
                self.id,
                warming,
                on_failure=self._fail,
                on_drain=self.retired.set,
            )
        )
        # `ready`: the queues that the worker can serve before the children are ready.
        self.queues = parts.ready
        # The stack calls these in reverse order. So the pools close first, then the loops end, and then the parts
        # close.
        self._stack.push_async_callback(self._end_loops)
        self._stack.push_async_callback(parts.slot_pools.close)
        for name, loop in parts.loops.items():
            self._run(name, loop)
        self._run("pulse", self._pulse)
        await parts.slot_pools.start(self.queues - self._chosen.isolated, self.queues & self._chosen.isolated)
        self._run("self-check", self._self_check)
        self._log_serving(later=frozenset() if parts.is_complete else self._chosen.isolated)
        if parts.is_complete:
            self._mark_complete()
        else:
            self._run("isolated queues", self._serve_isolated)

    async def _serve_isolated(self) -> None:
        """Serve the isolated queues, too, as soon as their children are ready. If the children cannot load their
        handlers, drain the worker, and then raise DeclarationError.
        """
        try:
            # `queues`: all queues that the worker may serve. If isolation.py refuses the isolated queues, these are
            # only the inline queues, which the worker serves already.
            queues = await asyncio.shield(self.parts.warming)
        except DeclarationError:
            await self.drain()
            raise
        if not self._draining:
            # If the isolated queues were refused, the children are closed. Then the worker can run no isolated step any
            # more, even if the step's task is in an inline queue.
            handlers = self.pipelines.loaded_handlers(self.parts.children.pipelines)
            await self.parts.registration.change(self.parts.pool, queues, handlers)
            # A drain that began meanwhile has stopped only the slot pools that existed then. A pool that started now
            # would go on claiming, and the drain would wait for this pool without end.
            if queues != self.queues and not self._draining:
                self.parts.slot_pools.start_isolated(self._chosen.isolated)
                self.queues = queues
                self._log_serving(later=frozenset())
        self._mark_complete()

    def _mark_complete(self) -> None:
        self.complete.set()
        # A worker that refuses its isolated queues, because its children lack fences, does not become ready. Otherwise
        # a rolling update would replace workers that serve all queues by workers that do not.
        self.health.is_ready = not self._draining and self.queues == self._chosen.every

    def _log_serving(self, later: frozenset[str]) -> None:
        # `later`: the queues that the worker will serve once their children are ready.
        log.info(
            "serving",
            queues=sorted(self.queues),
            later=sorted(later),
            broker=self.parts.broker.name,
            isolation=self.parts.children.isolation,
        )

    async def _self_check(self) -> None:
        """Run the self-check once and log its findings. So an operator learns early which guarantees do not hold."""
        from leasehold.selfcheck import as_log, check_all  # noqa: PLC0415 - a later import shortens the start

        await asyncio.sleep(_CHECK_AFTER_SECONDS)
        parts = self.parts
        try:
            schemas = schemas_of(kinds_of(self.pipelines))
            findings = await check_all(parts.pool.acquire, parts.broker, parts.store, self.settings, schemas)
        except Exception:  # a worker works without its self-check, too
            log.exception("the self-check failed")
            return
        fields = as_log(findings)
        (log.warning if fields["wrong"] else log.info)("self-check", **fields)

    # --- loops

    async def _pulse(self) -> None:
        """Record that the event loop runs, for the liveness probe."""
        while True:
            self.health.record_turn()
            await asyncio.sleep(_PULSE_SECONDS)

    def _run(self, name: str, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `loop` as an asyncio task until the worker closes. An error of the loop fails the worker."""
        task = asyncio.create_task(loop(), name=name)
        task.add_done_callback(self._check_end)
        self._loops.append(task)

    def _check_end(self, loop: asyncio.Task[None]) -> None:
        if not loop.cancelled() and (error := loop.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    async def _end_loops(self) -> None:
        await cancel_and_wait(*self._loops)
