"""Three RabbitMQ nodes, quorum queues, and a stream of hints while nodes die, freeze and come back.

It takes about a minute and a half: `FAILOVER_RABBITMQ=cluster scripts/test failover -k rabbit` runs it.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from pydantic import SecretStr

from leasehold.broker import Delivery, Hint, make_broker
from leasehold.broker.amqp.broker import AmqpBroker
from leasehold.embedded.rabbitmq import RabbitMQ
from leasehold.embedded.rabbitmq_install import install_rabbitmq
from leasehold.settings import Settings
from tests.broker.conftest import hints, until
from tests.failover.rabbit_cluster import Cluster, cluster_in
from tests.support.not_here import only_where

pytestmark = [
    only_where(
        os.environ.get("FAILOVER_RABBITMQ") == "cluster",
        "a cluster of three RabbitMQ nodes takes a minute and a half; FAILOVER_RABBITMQ=cluster runs it",
    ),
    pytest.mark.timeout(400),
]
QUEUE = "leasehold.media.normal"
PAUSE = 0.02
#: Seconds: consumers are back after a node died, froze, was parted from the others, and is together with them again.
DIED, FROZEN, PARTED, HEALED = 3.0, 3.0, 10.0, 30.0
#: Seconds after which a node that woke up is restarted, if the others still count it as down.
ESTRANGED = 20.0
#: A fault is felt within these seconds; only then may the stream count as whole again.
SETTLED = 3.0
SECONDS = 60.0


class Stream:
    """Publishes hints one after another until each is confirmed, and remembers when each was confirmed and arrived."""

    def __init__(self, cluster: Cluster, publisher: AmqpBroker, consumer: AmqpBroker) -> None:
        self.cluster, self.publisher, self.consumer = cluster, publisher, consumer
        self.confirmed: dict[UUID, float] = {}
        self.arrived: dict[UUID, float] = {}
        self.twice = 0
        self.sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while True:
            (hint,) = hints(1)
            while not all(await self.publisher.publish([hint])):
                await asyncio.sleep(PAUSE)
            self.confirmed[hint.task_id] = time.monotonic()
            await asyncio.sleep(PAUSE)

    def take(self, delivery: Delivery) -> None:
        self.twice += delivery.hint.task_id in self.arrived
        self.arrived[delivery.hint.task_id] = time.monotonic()
        task = asyncio.ensure_future(delivery.ack())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def flows(self) -> bool:
        """Whether a hint was both confirmed and delivered just now, by brokers that are connected."""
        if not (self.confirmed and self.arrived) or not (self.publisher.connected and self.consumer.connected):
            return False
        recently = time.monotonic() - 10 * PAUSE
        return min(max(self.confirmed.values()), max(self.arrived.values())) > recently

    async def flowing(self) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                await until(lambda: self.flows or self.sending.done())
        except TimeoutError:
            pytest.fail(f"hints do not flow: {await self._described()}")
        assert not self.sending.done(), self.sending

    async def _described(self) -> dict[str, Any]:
        now = time.monotonic()
        return {
            "confirmed": len(self.confirmed),
            "seconds since": now - max(self.confirmed.values(), default=0.0),
            "arrived": len(self.arrived),
            "seconds since then": now - max(self.arrived.values(), default=0.0),
            "publisher": self.publisher.describe(),
            "consumer": self.consumer.describe(),
            "queue": await self.cluster.describe(QUEUE),
        }

    async def gap(self, since: float) -> float:
        """The longest time since then in which no hint arrived, once hints arrive steadily again."""
        await asyncio.sleep(SETTLED)
        await self.flowing()
        return max(later - earlier for earlier, later in pairwise([since, *self._times_after(since), time.monotonic()]))

    def _times_after(self, since: float) -> list[float]:
        return sorted(at for at in self.arrived.values() if at > since)


@pytest.fixture(scope="module", params=["pause_minority", "autoheal"])
async def cluster(run_directory: Path, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    async with cluster_in(run_directory / "rabbitmq-cluster", await install_rabbitmq(), request.param) as cluster:
        yield cluster


@asynccontextmanager
async def stream_over(cluster: Cluster) -> AsyncIterator[Stream]:
    """What was confirmed has arrived when the block ends."""
    settings = Settings(_env_file=None, amqp_url=SecretStr(cluster.url), amqp_queue_type="quorum")
    brokers = [make_broker(settings) for _ in range(2)]
    publisher, consumer = brokers
    assert isinstance(publisher, AmqpBroker)
    assert isinstance(consumer, AmqpBroker)
    stream = Stream(cluster, publisher, consumer)
    for broker in brokers:
        await broker.open()
    await consumer.consume({"media": 30}, stream.take)
    try:
        await stream.flowing()
        yield stream
        stream.sending.cancel()
        async with asyncio.timeout(SECONDS):
            await until(lambda: stream.confirmed.keys() <= stream.arrived.keys())
            await until(lambda: all(consumer.describe()["consuming"].values()))
    finally:
        stream.sending.cancel()
        for broker in brokers:
            await broker.close()
        await cluster.start_all()


def node_of(cluster: Cluster, broker: AmqpBroker) -> RabbitMQ:
    """The node that delivers to this consumer."""
    port = broker._consumer.link._nodes.current.url.rpartition(":")[2].partition("/")[0]
    return cluster.nodes[int(port)]


async def chosen(cluster: Cluster, stream: Stream, role: str) -> RabbitMQ:
    return node_of(cluster, stream.consumer) if role == "of the consumer" else await cluster.leader_of(QUEUE)


@pytest.mark.parametrize("role", ["of the consumer", "that leads the queue"])
async def test_a_node_is_killed_and_comes_back(cluster: Cluster, role: str) -> None:
    async with stream_over(cluster) as stream:
        node = await chosen(cluster, stream, role)
        since = time.monotonic()
        await node.kill()
        gap = await stream.gap(since)
        print(f"\nthe node {role} is killed: no hint for {gap:.2f} s; {stream.twice} hints twice")  # noqa: T201
        assert gap < DIED
        await node.start()
        await cluster.until_whole(QUEUE)
        await stream.flowing()


@pytest.mark.parametrize("role", ["of the consumer", "that leads the queue"])
async def test_a_node_is_frozen_and_wakes(cluster: Cluster, role: str) -> None:
    """Its connections are left after LEASEHOLD_AMQP_SILENCE_SECONDS. RabbitMQ itself takes its `net_ticktime`, and may
    leave the node outside when it wakes, until somebody restarts it.
    """
    async with stream_over(cluster) as stream:
        node = await chosen(cluster, stream, role)
        since = time.monotonic()
        with cluster.frozen(node):
            gap = await stream.gap(since)
        print(f"\nthe node {role} is frozen: no hint for {gap:.2f} s; {stream.twice} hints twice")  # noqa: T201
        assert gap < FROZEN
        woke = time.monotonic()
        while await cluster.running() < len(cluster.nodes):
            await asyncio.sleep(0.1)
            if time.monotonic() - woke > ESTRANGED:
                print("the others do not take the node back: it is restarted")  # noqa: T201
                await node.stop()
                await node.start()
                woke = math.inf
        await cluster.until_whole(QUEUE)
        await stream.flowing()


async def test_all_nodes_are_restarted_one_after_another(cluster: Cluster) -> None:
    """As an upgrade of the brokers does it: the next node stops once all are together again, with their copies of the
    queue.
    """
    async with stream_over(cluster) as stream:
        for place, node in enumerate(cluster.nodes.values()):
            since = time.monotonic()
            await node.stop()
            await node.start()
            await cluster.until_whole(QUEUE)
            gap = await stream.gap(since)
            print(f"\nnode {place} is restarted: no hint for {gap:.2f} s; {stream.twice} hints twice")  # noqa: T201
            assert gap < DIED


async def test_the_policy_of_the_queues_changes_and_goes(cluster: Cluster) -> None:
    policy = {"delivery-limit": 50, "max-length": 1_000_000}
    async with stream_over(cluster) as stream:
        for change in (partial(cluster.set_policy, policy), cluster.drop_policy):
            since = time.monotonic()
            await change()
            gap = await stream.gap(since)
            print(f"\nthe policy changes: no hint for {gap:.2f} s; {stream.twice} hints twice")  # noqa: T201
            assert gap < DIED


@pytest.mark.parametrize("role", ["of the consumer", "that leads the queue"])
async def test_a_partition_heals(cluster: Cluster, role: str) -> None:
    """A node that does not pause serves its clients as well as it can alone: a consumer there hears nothing until all
    nodes are together again.
    """
    async with stream_over(cluster) as stream:
        node = await chosen(cluster, stream, role)
        since = time.monotonic()
        await cluster.part(node)
        if cluster.handling == "pause_minority":
            gap = await stream.gap(since)
            print(f"\nthe node {role} is parted: no hint for {gap:.2f} s; {stream.twice} hints twice")  # noqa: T201
            assert gap < PARTED
        else:
            await asyncio.sleep(PARTED)
        since = time.monotonic()
        await cluster.heal(node)
        gap = await stream.gap(since)
        print(f"the partition heals: no hint for {gap:.2f} s; {stream.twice} hints twice")  # noqa: T201
        assert gap < HEALED
        await cluster.until_whole(QUEUE)
        await stream.flowing()


def test_hints_of_the_stream_are_of_the_queue_that_is_watched() -> None:
    (hint,) = hints(1)
    assert isinstance(hint, Hint)
    assert f"leasehold.{hint.queue}.normal" == QUEUE
