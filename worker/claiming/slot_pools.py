"""Makes, starts and stops all slot pools of a worker. This module decides which pool serves which queues, and how many
slots each pool has. `Worker` calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from leasehold.broker.base import Broker
from leasehold.domain.pipeline import unpinned_queue
from leasehold.domain.registry import Pipelines
from leasehold.settings import Settings
from leasehold.worker import metrics
from leasehold.worker.attempts.runner import Runner
from leasehold.worker.claiming.claimer import Claimer
from leasehold.worker.claiming.hint_router import HintRouter
from leasehold.worker.claiming.slot_pool import SlotPool
from leasehold.worker.sandbox.children import number_of_children

#: A queue may have this many unacknowledged hints (messages that a task is due) for each slot. The hints of each
#: priority are a band. With RabbitMQ, each band has a fixed part of these hints, which no other band can use (SHARES in
#: broker/amqp/consumer.py). With 4 hints for each slot, the hints of the band `normal` alone can fill all slots, but
#: the hints of the band `low` alone fill less than half of the slots.
_HINTS_PER_SLOT = 4


class SlotPools:
    """All slot pools of a worker. `start` serves the inline queues, whose steps run in this process. If the child
    processes are ready, it also serves the isolated queues, whose steps run in children. Otherwise `start_isolated`
    adds the isolated queues later. The arguments of both are names of queues.
    """

    def __init__(
        self,
        settings: Settings,
        pipelines: Pipelines,
        broker: Broker,
        router: HintRouter,
        claimer: Claimer,
        runner: Runner,
    ) -> None:
        self._settings = settings
        self._pipelines = pipelines
        self._broker = broker
        self._router = router
        self._claimer = claimer
        self._runner = runner
        self._pools: list[SlotPool] = []

    async def start(self, inline: frozenset[str], isolated: frozenset[str]) -> None:
        pools = list(self._inline_pools(inline))
        if isolated:
            pools.append(self._isolated_pool(isolated))
        await self._broker.consume(self._add(pools), self._router.deliver, self._router.wake)
        for pool in pools:
            pool.start()
        metrics.SLOTS.labels("busy").set_function(lambda: sum(pool.busy for pool in self._pools))

    def start_isolated(self, isolated: frozenset[str]) -> None:
        pool = self._isolated_pool(isolated)
        pool.start()
        self._broker.consume_also(self._add([pool]))

    def stop_claiming(self) -> None:
        """Start no more attempts."""
        for pool in self._pools:
            pool.stop_claiming()

    async def finished(self) -> None:
        """Wait until no attempt runs."""
        for pool in self._pools:
            await pool.finished()

    async def close(self) -> None:
        """Stop all pools, and cancel the attempts that still run. The pools stop at the same time, because one pool may
        wait for its handlers, and meanwhile no other pool may claim tasks.
        """
        await asyncio.gather(*(pool.close() for pool in self._pools))

    def _inline_pools(self, queues: frozenset[str]) -> Iterator[SlotPool]:
        """One pool for each pipeline that has slots of its own, and one pool for all other queues."""
        for pipeline in self._pipelines:
            if pipeline.slots is None:
                continue
            declared_queues = {step.queue for step in pipeline.steps}
            # The name of a worker's queue may have a label after the declared name, as in `QUEUE@LABEL`.
            own_queues = frozenset(queue for queue in queues if unpinned_queue(queue) in declared_queues)
            if own_queues:
                slots = getattr(self._settings, pipeline.slots)  # `pipeline.slots` names the setting
                yield self._pool(own_queues, slots, reserve=slots)
                queues -= own_queues
        if queues:
            slots, reserve = self._settings.worker_concurrency, self._settings.worker_reserve
            yield self._pool(queues, slots, reserve=slots if reserve is None else reserve)

    def _isolated_pool(self, queues: frozenset[str]) -> SlotPool:
        return self._pool(queues, number_of_children(self._settings), reserve=0)

    def _pool(self, queues: Iterable[str], slots: int, *, reserve: int) -> SlotPool:
        """A pool for `queues`. `reserve`: further slots, for tenants that run nothing in the pool."""
        return SlotPool(
            sorted(queues),
            slots,
            reserve=reserve,
            claimer=self._claimer,
            runner=self._runner,
            broker=self._broker,
            poll_seconds=self._settings.poll_seconds,
        )

    def _add(self, pools: list[SlotPool]) -> dict[str, int]:
        """Add the pools to this worker's pools, and let the router deliver hints to them. Returns queue -> how many
        unacknowledged hints the queue may have.
        """
        self._pools += pools
        for pool in pools:
            self._router.add(pool)
        # `shared`: the slots of a pool without its reserve.
        metrics.SLOTS.labels("all").set(sum(pool.shared for pool in self._pools))
        metrics.SLOTS.labels("reserve").set(sum(pool.reserve for pool in self._pools))
        return {queue: _HINTS_PER_SLOT * pool.slots for pool in pools for queue in pool.queues}
