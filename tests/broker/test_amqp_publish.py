"""What the relay is promised: a confirmed hint is there, and every doubt is a False, soon and without an exception."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from leasehold.broker import Broker, Hint
from leasehold.broker.amqp import publisher, topology
from leasehold.broker.amqp.broker import AmqpBroker
from leasehold.broker.amqp.publisher import _Session
from tests.broker.conftest import (
    OpenBroker,
    check_with_growing_silence,
    hints,
    ids,
    left_in,
    publish_until_confirmed,
    raw_channel,
    until,
)
from tests.broker.inbox import Inbox
from tests.broker.wire import Wire
from tests.support.broker_node import BrokerNode

#: The queue of hints that RabbitMQ sets aside.
SET_ASIDE = topology.Topology("leasehold", "classic").set_aside_queue


def in_flight(broker: Broker) -> bool:
    assert isinstance(broker, AmqpBroker)
    session = broker._publisher._session
    return session is not None and bool(session._confirms._waiting)


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
async def test_a_confirmed_hint_arrives_once_and_whole(open_broker: OpenBroker, amqp_url: str, queue_type: str) -> None:
    broker, inbox = await open_broker(amqp_queue_type=queue_type), Inbox()
    hint = Hint(hints(1)[0].task_id, "media", 2, {"traceparent": "00-ab-cd-01", "x-request-id": "r1"})
    assert await broker.publish([hint]) == [True]
    await broker.consume({"media": 10}, inbox.put)
    delivery = await inbox.next()
    assert delivery.hint == hint
    assert not delivery.redelivered
    await delivery.ack()
    await broker.close()
    assert inbox.is_empty
    assert await left_in(amqp_url, "leasehold.media.low") == 0


async def test_a_batch_larger_than_the_window_is_confirmed_and_arrives(open_broker: OpenBroker) -> None:
    broker, inbox = await open_broker(), Inbox()
    batch = hints(1200)
    assert await broker.publish(batch) == [True] * 1200
    await broker.consume({"media": 100}, inbox.put)
    assert ids([delivery.hint for delivery in await inbox.take(1200)]) == ids(batch)


async def test_nothing_to_publish_is_no_trouble(open_broker: OpenBroker) -> None:
    broker = await open_broker()
    assert await broker.publish([]) == []


def test_a_hint_that_has_no_encoding_is_no_message_and_no_error() -> None:
    unused: Any = None
    channel: Any = SimpleNamespace(number=1)
    session = _Session(unused, channel, unused, unused)
    assert session.encode("media", Hint(uuid4(), "media")) is not None
    lone_half = "\ud800"
    assert session.encode("media", Hint(uuid4(), lone_half)) is None
    assert session.encode("media", Hint(uuid4(), "media", tenant=lone_half)) is None
    assert session.encode("media", Hint(uuid4(), "media", headers={"x": lone_half})) is None
    assert session.encode(lone_half, Hint(uuid4(), "media")) is None


async def test_without_a_broker_publishing_is_false_at_once(open_broker: OpenBroker) -> None:
    broker = await open_broker("amqp://127.0.0.1:1/", connected=False, amqp_publish_timeout=3600)
    assert await broker.publish(hints(3)) == [False] * 3
    assert not broker.connected


async def test_a_broker_that_comes_later_is_used_without_asking(
    open_broker: OpenBroker, rabbitmq_node: BrokerNode
) -> None:
    await rabbitmq_node.stop()
    broker, inbox = await open_broker(rabbitmq_node.url, connected=False), Inbox()
    await broker.consume({"media": 10}, inbox.put)
    batch = hints(3)
    assert await broker.publish(batch) == [False] * 3
    await rabbitmq_node.start()
    await until(lambda: broker.connected)
    assert await broker.publish(batch) == [True] * 3
    await inbox.until_seen(ids(batch))


async def test_a_queue_deleted_under_the_publisher_is_false_once_and_then_there_again(
    open_broker: OpenBroker, amqp_url: str
) -> None:
    broker, inbox = await open_broker(), Inbox()
    assert await broker.publish(hints(1)) == [True]
    async with raw_channel(amqp_url) as channel:
        await channel.queue_delete("leasehold.media.normal")
    batch = hints(2)
    assert await broker.publish(batch) == [False, False]
    assert broker.describe()["unroutable"] == 2
    assert await broker.publish(batch) == [True, True]
    await broker.consume({"media": 10}, inbox.put)
    await inbox.until_seen(ids(batch))


async def test_one_queue_that_cannot_be_declared_does_not_hold_up_the_others(
    open_broker: OpenBroker, amqp_url: str
) -> None:
    broker = await open_broker()
    async with raw_channel(amqp_url) as channel:
        await channel.declare_queue("leasehold.locked.normal", exclusive=True)
        mixed = [*hints(1, "locked"), *hints(1, "media")]
        assert await broker.publish(mixed) == [False, True]
    await publish_until_confirmed(broker, mixed)


async def test_while_the_queue_of_set_aside_hints_cannot_be_declared_hints_are_sent_and_consumed(
    open_broker: OpenBroker, amqp_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing depends on this queue. It is declared with the next queue, once RabbitMQ allows it."""
    monkeypatch.setattr(topology, "_SET_ASIDE_PAUSE_SECONDS", 0.0)
    broker, inbox = await open_broker(), Inbox()
    async with raw_channel(amqp_url) as channel:
        await channel.declare_queue(SET_ASIDE, exclusive=True)
        await broker.consume({"media": 10}, inbox.put)
        batch = hints(3)
        assert await broker.publish(batch) == [True] * 3
        await inbox.until_seen(ids(batch))
    await publish_until_confirmed(broker, hints(1, "other"))
    assert await left_in(amqp_url, SET_ASIDE) == 0


async def test_no_queue_waits_while_the_queue_of_set_aside_hints_has_no_answer(
    open_broker: OpenBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ answers no declare of a quorum queue without a leader."""
    declare, asked = topology.Topology._declare, list[str]()
    answer = asyncio.Event()

    async def unanswered(self: topology.Topology, connection: Any, name: str, arguments: dict[str, Any]) -> None:
        asked.append(name)
        if name == self.set_aside_queue:
            await answer.wait()
            raise TimeoutError
        await declare(self, connection, name, arguments)

    monkeypatch.setattr(topology.Topology, "_declare", unanswered)
    broker = await open_broker()
    cancelled = asyncio.create_task(broker.publish(hints(1, "cancelled")))
    await until(lambda: SET_ASIDE in asked)
    cancelled.cancel()
    first = asyncio.create_task(broker.publish(hints(1)))
    await until(lambda: asked.count(SET_ASIDE) == 2)
    assert await broker.publish(hints(1, "other")) == [True]
    answer.set()
    assert await first == [True]
    assert await broker.publish(hints(1, "third")) == [True]
    assert asked.count(SET_ASIDE) == 2  # a declare that got no answer is not tried again for a while


async def test_a_queue_whose_declare_gets_no_answer_holds_up_the_others_only_now_and_then(
    open_broker: OpenBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ answers no declare of a quorum queue without a leader. Each batch of hints would wait for it."""
    declare, now, tries = topology.Topology.declare, [0.0], [0]

    async def unanswered(self: topology.Topology, connection: Any, name: str) -> None:
        if name == "leasehold.stuck.normal":
            tries[0] += 1
            now[0] += topology.RPC_SECONDS
            raise TimeoutError
        await declare(self, connection, name)

    monkeypatch.setattr(topology.Topology, "declare", unanswered)
    monkeypatch.setattr(publisher, "monotonic", lambda: now[0])
    broker = await open_broker()
    mixed = [*hints(1, "stuck"), *hints(1, "media")]
    for _ in range(3):
        assert await broker.publish(mixed) == [False, True]
    assert tries == [1]
    now[0] += 3600
    assert await broker.publish(mixed) == [False, True]
    assert tries == [2]
    monkeypatch.setattr(topology.Topology, "declare", declare)
    now[0] += 3600
    assert await broker.publish(mixed) == [True, True]


async def test_a_queue_that_exists_with_other_arguments_is_used_as_it_is(
    open_broker: OpenBroker, amqp_url: str
) -> None:
    async with raw_channel(amqp_url) as channel:
        await channel.declare_queue("leasehold.media.normal", durable=True)
    broker, inbox = await open_broker(amqp_queue_type="quorum"), Inbox()
    await broker.consume({"media": 10}, inbox.put)
    batch = hints(2)
    assert await broker.publish(batch) == [True, True]
    await inbox.until_seen(ids(batch))


async def test_a_channel_on_which_rabbitmq_refuses_hints_is_replaced(open_broker: OpenBroker, amqp_url: str) -> None:
    """RabbitMQ 3.10 refuses whatever comes over a channel that once found a queue's leader dead."""
    async with raw_channel(amqp_url) as channel:
        full: dict[str, Any] = {"x-queue-type": "classic", "x-max-length": 1, "x-overflow": "reject-publish"}
        await channel.declare_queue("leasehold.full.normal", durable=True, arguments=full)
    broker = await open_broker()
    assert isinstance(broker, AmqpBroker)
    first = broker._publisher._session
    await publish_until_confirmed(broker, hints(1, "full"))
    async with asyncio.timeout(60):
        while (session := broker._publisher._session) is None or session is first:
            assert await broker.publish(hints(1, "full")) == [False]
            await asyncio.sleep(0.05)
    assert broker._publisher.link.connects == 1
    await publish_until_confirmed(broker, hints(3, "media"))


async def test_a_connection_lost_in_the_middle_of_a_batch_ends_in_false_and_not_in_a_cancellation(
    open_broker: OpenBroker, wire: Wire
) -> None:
    broker = await open_broker(wire.url, amqp_publish_timeout=3600)
    await broker.publish(hints(1))
    wire.freeze()
    relay = asyncio.create_task(broker.publish(hints(600)))
    await until(lambda: in_flight(broker))
    wire.cut()
    assert await relay == [False] * 600
    wire.thaw()
    await publish_until_confirmed(broker, hints(600))


async def test_a_confirm_that_does_not_come_in_time_counts_as_not_sent(open_broker: OpenBroker, wire: Wire) -> None:
    broker = await open_broker(wire.url, amqp_publish_timeout=0.2)
    await publish_until_confirmed(broker, hints(1))
    wire.freeze()
    assert await broker.publish(hints(5)) == [False] * 5
    wire.thaw()
    await publish_until_confirmed(broker, hints(5))


async def test_cancelling_the_relay_cancels_it(open_broker: OpenBroker, wire: Wire) -> None:
    broker = await open_broker(wire.url, amqp_publish_timeout=3600)
    await broker.publish(hints(1))
    wire.freeze()
    relay = asyncio.create_task(broker.publish(hints(5)))
    await until(lambda: in_flight(broker))
    relay.cancel()
    with pytest.raises(asyncio.CancelledError):
        await relay
    wire.thaw()
    await publish_until_confirmed(broker, hints(5))


async def test_a_node_that_blocks_publishers_under_an_alarm_is_not_taken_for_frozen(
    open_broker: OpenBroker, rabbitmq_node: BrokerNode
) -> None:
    async def connects(silence_seconds: float) -> object:
        broker = await open_broker(
            rabbitmq_node.url, amqp_silence_seconds=silence_seconds, amqp_publish_timeout=silence_seconds
        )
        await publish_until_confirmed(broker, hints(1))
        async with rabbitmq_node.alarm():
            assert await broker.publish(hints(1)) == [False]  # the broker tells publishers at their next message
            await asyncio.sleep(4 * silence_seconds)
            under_the_alarm = broker.describe()["connects"]["publish"]
        await publish_until_confirmed(broker, hints(1))
        return under_the_alarm, broker.describe()["connects"]["publish"]

    await check_with_growing_silence(connects, (1, 1))


async def test_hints_that_a_killed_broker_did_not_confirm_can_be_sent_again(
    open_broker: OpenBroker, rabbitmq_node: BrokerNode
) -> None:
    broker, inbox = await open_broker(rabbitmq_node.url), Inbox()
    confirmed = hints(50)
    await publish_until_confirmed(broker, confirmed)
    await rabbitmq_node.flush_definitions()  # else the node may come back without the queue, and what was in it
    await rabbitmq_node.kill()
    lost = hints(50)
    assert await broker.publish(lost) == [False] * 50
    await rabbitmq_node.start()
    await publish_until_confirmed(broker, lost)
    await broker.consume({"media": 100}, inbox.put)
    await inbox.until_seen(ids(confirmed) | ids(lost))
