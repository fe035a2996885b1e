"""What the worker is promised: hints keep coming, whatever happens to the broker, a queue or a message."""

from __future__ import annotations

import asyncio

import aio_pika
import pytest

from leasehold.broker import Broker, Delivery, Hint
from leasehold.broker.amqp.broker import AmqpBroker
from leasehold.broker.amqp.subscription import Subscription
from leasehold.broker.amqp.topology import DELIVERY_LIMIT
from leasehold.broker.envelope import MAX_BYTES, encode
from leasehold.exporter.broker_metrics import BrokerMetrics
from tests.broker.conftest import (
    OpenBroker,
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

NORMAL = "leasehold.media.normal"

GARBAGE = {
    "not_json": b"\xff\x00 hello",
    "wrong_version": b'{"v":9,"task":"x","queue":"media","band":1}',
    "wrong_shape": encode(hints(1)[0])[:-1] + b',"extra":1}',
    "wrong_value": b'{"v":1,"task":"not-a-uuid","queue":"media","band":1}',
    "oversized": b" " * (MAX_BYTES + 1),
}


def subscription_of(broker: Broker, name: str) -> Subscription:
    assert isinstance(broker, AmqpBroker)
    return next(one for one in broker._consumer._subscriptions if one.name == name)


async def consuming(broker: Broker, inbox: Inbox, *queues: str, prefetch: int = 30) -> None:
    await broker.consume(dict.fromkeys(queues or ["media"], prefetch), inbox.put, inbox.wake)
    await until(lambda: broker.connected)


async def test_a_hint_that_was_not_acked_goes_to_another_worker(open_broker: OpenBroker) -> None:
    first, second, inbox = await open_broker(), await open_broker(), Inbox()
    [hint] = hints(1)
    await first.publish([hint])
    await consuming(first, inbox)
    assert (await inbox.next()).hint == hint
    await first.close()
    await consuming(second, inbox)
    again = await inbox.next()
    assert again.hint == hint
    assert again.redelivered


async def test_acks_given_just_before_closing_are_not_lost(open_broker: OpenBroker, amqp_url: str) -> None:
    broker, inbox = await open_broker(), Inbox()
    await broker.publish(hints(200))
    await consuming(broker, inbox, prefetch=1000)
    await inbox.take(200)
    await broker.close()
    assert await left_in(amqp_url, NORMAL) == 0


async def test_acks_out_of_order_settle_exactly_what_was_acked(open_broker: OpenBroker) -> None:
    broker, inbox = await open_broker(), Inbox()
    batch = hints(100)
    await broker.publish(batch)
    await consuming(broker, inbox, prefetch=1000)
    held = [await inbox.next() for _ in batch]
    for delivery in [*held[::-2], *held[::-2]]:  # every second, backwards, and each of them twice
        await delivery.ack()
    await broker.close()
    other, rest = await open_broker(), Inbox()
    await consuming(other, rest, prefetch=1000)
    assert ids([delivery.hint for delivery in await rest.take(50)]) == ids([d.hint for d in held[0::2]])


async def test_after_stop_nothing_new_comes_and_what_came_can_be_acked(open_broker: OpenBroker, amqp_url: str) -> None:
    broker, inbox = await open_broker(), Inbox()
    await broker.publish(hints(1))
    await consuming(broker, inbox)
    held = await inbox.next()
    await broker.stop_consuming()
    assert await broker.publish(hints(1)) == [True]
    await held.ack()
    await broker.close()
    assert inbox.is_empty
    assert await left_in(amqp_url, NORMAL) == 1


async def test_a_worker_that_drains_has_not_lost_its_broker_until_it_has(open_broker: OpenBroker, wire: Wire) -> None:
    """A drain may take ten minutes. LeaseholdBrokerAway fires after five without the broker."""
    broker = await open_broker(wire.url)
    await consuming(broker, Inbox())
    await broker.stop_consuming()
    assert broker.connected
    assert next(BrokerMetrics(broker).collect()).samples[0].value == 1  # leasehold_broker_up
    await wire.close()
    await until(lambda: not broker.connected)
    await wire.open()
    await until(lambda: broker.connected)


@pytest.mark.parametrize("kind", sorted(GARBAGE))
async def test_garbage_is_dropped_and_counted_and_the_next_hint_arrives(
    open_broker: OpenBroker, amqp_url: str, kind: str
) -> None:
    broker, inbox = await open_broker(), Inbox()
    await consuming(broker, inbox)
    async with raw_channel(amqp_url) as channel:
        for _ in range(2):
            await channel.default_exchange.publish(aio_pika.Message(GARBAGE[kind]), NORMAL)
    good = hints(1)
    await broker.publish(good)
    await inbox.until_seen(ids(good))
    assert broker.describe()["garbage"] == {kind: 2}
    await broker.close()
    assert await left_in(amqp_url, NORMAL) == 0


async def test_a_hand_over_that_raises_does_not_stop_the_consumer(open_broker: OpenBroker) -> None:
    broker, inbox = await open_broker(), Inbox()
    [poison, good] = hints(2)

    def refuse_the_first(delivery: Delivery) -> None:
        if delivery.hint == poison:
            raise RuntimeError("a mistake of the worker")
        inbox.put(delivery)

    await broker.consume({"media": 1}, refuse_the_first)
    await broker.publish([poison, good])
    assert (await inbox.next()).hint == good


async def test_low_is_not_starved_by_a_flood_of_high(open_broker: OpenBroker) -> None:
    broker, inbox = await open_broker(), Inbox()
    high, low = hints(600, band=0), hints(30, band=2)
    await broker.publish([*high, *low])
    await consuming(broker, inbox, prefetch=20)
    order = [delivery.hint for delivery in await inbox.until_seen(ids(low))]
    still_waiting = ids(high) - ids(order)
    assert len(still_waiting) > 150  # by weight, 30 of low go with 180 of high


async def test_the_prefetch_bounds_what_a_worker_holds(open_broker: OpenBroker, amqp_url: str) -> None:
    broker, inbox = await open_broker(), Inbox()
    await broker.publish([hint for band in range(3) for hint in hints(50, band=band)])
    await consuming(broker, inbox, prefetch=10)
    held = [await inbox.next() for _ in range(10)]
    assert [sum(d.hint.band == band for d in held) for band in range(3)] == [6, 3, 1]
    assert [await left_in(amqp_url, f"leasehold.media.{band}") for band in ("high", "normal", "low")] == [
        44,
        47,
        49,
    ]


async def test_a_queue_deleted_under_the_consumer_is_consumed_again_and_the_worker_told(
    open_broker: OpenBroker, amqp_url: str
) -> None:
    broker, inbox = await open_broker(), Inbox()
    await consuming(broker, inbox, "media", "other")
    async with raw_channel(amqp_url) as channel:
        await channel.queue_delete(NORMAL)
    assert await inbox.next_wake() == "media"
    batch = hints(2)
    await publish_until_confirmed(broker, batch)
    await inbox.until_seen(ids(batch))


async def test_a_channel_that_the_broker_closes_is_made_anew_and_old_acks_do_no_harm(
    open_broker: OpenBroker,
) -> None:
    broker, inbox = await open_broker(), Inbox()
    [hint] = hints(1)
    await broker.publish([hint])
    await consuming(broker, inbox)
    stale = await inbox.next()
    channel = subscription_of(broker, NORMAL)._channel
    assert channel is not None
    await channel.basic_ack(4711)  # unknown: 406, as the broker's consumer_timeout answers
    again = await inbox.next()
    assert again.hint == hint
    await stale.ack()
    await again.ack()
    others = hints(2)
    await broker.publish(others)
    await inbox.until_seen(ids(others))


async def test_a_queue_that_cannot_be_consumed_does_not_stop_the_others(open_broker: OpenBroker, amqp_url: str) -> None:
    broker, inbox = await open_broker(), Inbox()
    async with raw_channel(amqp_url) as channel:
        await channel.declare_queue("leasehold.locked.normal", exclusive=True)
        await broker.consume({"locked": 30, "media": 30}, inbox.put)
        good = hints(1)
        await publish_until_confirmed(broker, good)
        await inbox.until_seen(ids(good))
        assert not broker.connected
        assert broker.publishing
        assert broker.describe()["consuming"]["leasehold.locked.normal"] is False
    await until(lambda: broker.connected)
    late = hints(1, "locked")
    await publish_until_confirmed(broker, late)
    await inbox.until_seen(ids(late))


async def test_a_cut_connection_comes_back_and_an_ack_from_before_does_not_raise(
    open_broker: OpenBroker, wire: Wire
) -> None:
    broker, inbox = await open_broker(wire.url), Inbox()
    [hint] = hints(1)
    await broker.publish([hint])
    await consuming(broker, inbox)
    stale = await inbox.next()
    wire.cut()
    again = await inbox.next()
    assert again.hint == hint
    await stale.ack()
    await again.ack()
    assert await inbox.next_wake() == "media"
    others = hints(2)
    await publish_until_confirmed(broker, others)
    await inbox.until_seen(ids(others))


async def test_an_ack_while_the_broker_is_away_returns(open_broker: OpenBroker, wire: Wire) -> None:
    broker, inbox = await open_broker(wire.url), Inbox()
    await broker.publish(hints(3))
    await consuming(broker, inbox)
    held = [await inbox.next() for _ in range(3)]
    wire.freeze()
    await held[0].ack()
    wire.cut()
    for delivery in held:
        await delivery.ack()
    wire.thaw()


async def test_a_watchdog_can_force_a_new_consumer_connection(open_broker: OpenBroker, wire: Wire) -> None:
    broker, inbox = await open_broker(wire.url), Inbox()
    assert broker.last_delivery_at is None
    await consuming(broker, inbox)
    before = wire.accepted
    broker.rebuild_consumer()
    assert await inbox.next_wake() == "media"
    assert wire.accepted == before + 1
    good = hints(1)
    await broker.publish(good)
    await inbox.until_seen(ids(good))
    assert broker.last_delivery_at is not None


async def test_consuming_again_replaces_the_queues(open_broker: OpenBroker) -> None:
    broker, inbox = await open_broker(), Inbox()
    await consuming(broker, inbox, "media")
    await consuming(broker, inbox, "other")
    assert set(broker.describe()["consuming"]) == {f"leasehold.other.{band}" for band in ("high", "normal", "low")}


# Classic queues only: a quorum queue of a single 3.10 node that was declared seconds before a SIGKILL may stay
# without a leader for good, which is why `classic` is the default there.
async def test_after_a_killed_broker_hints_come_again_by_themselves(
    open_broker: OpenBroker, rabbitmq_node: BrokerNode
) -> None:
    broker, inbox = await open_broker(rabbitmq_node.url), Inbox()
    await consuming(broker, inbox)
    first = hints(5)
    await broker.publish(first)
    held = [await inbox.next() for _ in first]
    await rabbitmq_node.kill()
    await until(lambda: not broker.connected)
    for delivery in held:
        await delivery.ack()
    await rabbitmq_node.start()
    after = hints(5)
    await publish_until_confirmed(broker, after)
    await inbox.until_seen(ids(after))


async def test_closing_leaves_no_task_whether_the_broker_is_there_or_not(open_broker: OpenBroker, wire: Wire) -> None:
    await open_broker()  # what a first connection makes for all of them
    before = asyncio.all_tasks()
    here, away = await open_broker(wire.url), await open_broker("amqp://127.0.0.1:1/", connected=False)
    await consuming(here, Inbox())
    await away.consume({"media": 10}, Inbox().put)
    await here.publish(hints(10))
    await here.close()
    await away.close()
    await until(lambda: not {task for task in asyncio.all_tasks() - before if "Wire" not in repr(task)})


@pytest.mark.parametrize("steps", range(0, 300, 10))
async def test_closing_at_any_moment_of_connecting_ends_and_leaves_no_connection(
    open_broker: OpenBroker, steps: int
) -> None:
    before = asyncio.all_tasks()
    broker = await open_broker(connected=False)
    await broker.consume({"media": 10}, Inbox().put)
    relay = asyncio.create_task(publish_until_confirmed(broker, hints(3)))
    for _ in range(steps):  # so many turns of the event loop into the handshakes and declarations
        await asyncio.sleep(0)
    await broker.close()
    relay.cancel()
    await until(lambda: not asyncio.all_tasks() - before)  # the client's reader, writer and heartbeat are tasks


async def test_the_description_names_the_server_and_no_secret(open_broker: OpenBroker, amqp_url: str) -> None:
    broker = await open_broker()
    told = broker.describe()
    assert told["product"] == "RabbitMQ"
    assert told["version"]
    assert told["queue_type"] == "classic"
    assert amqp_url.rpartition("@")[0].rpartition(":")[2] not in repr(told)


async def test_a_hint_of_another_band_than_its_queue_is_still_a_hint(open_broker: OpenBroker, amqp_url: str) -> None:
    broker, inbox = await open_broker(), Inbox()
    await consuming(broker, inbox)
    hint = Hint(hints(1)[0].task_id, "media", 0)
    async with raw_channel(amqp_url) as channel:
        await channel.default_exchange.publish(aio_pika.Message(encode(hint)), NORMAL)
    assert (await inbox.next()).hint == hint


async def test_a_queue_that_is_consumed_later_is_consumed_for_good(open_broker: OpenBroker) -> None:
    """On the same connection, and on the next one, without taking away what is in hand."""
    broker, inbox = await open_broker(), Inbox()
    await consuming(broker, inbox)
    [held] = hints(1)
    await broker.publish([held])
    first = await inbox.next()
    broker.consume_also({"models": 30})
    await until(lambda: broker.connected)
    [later] = hints(1, "models")
    await publish_until_confirmed(broker, [later])
    second = await inbox.next()
    assert (first.hint, second.hint) == (held, later)
    assert not second.redelivered
    await first.ack()
    await second.ack()
    broker.rebuild_consumer()
    await until(lambda: not broker.connected)
    await until(lambda: broker.connected)
    [again] = hints(1, "models")
    await publish_until_confirmed(broker, [again])
    assert (await inbox.next()).hint == again
    assert isinstance(broker, AmqpBroker)
    assert broker._consumer.link.connects == 2


async def test_a_hint_that_was_delivered_too_often_is_set_aside_and_the_next_ones_come(
    open_broker: OpenBroker, amqp_url: str
) -> None:
    """Each worker that had it died. A poll finds its task, and RabbitMQ gives the hint to nobody any more."""
    broker = await open_broker(amqp_queue_type="quorum")
    assert isinstance(broker, AmqpBroker)
    await publish_until_confirmed(broker, hints(1))
    async with raw_channel(amqp_url) as channel:
        queue = await channel.declare_queue(NORMAL, passive=True)
        for _ in range(DELIVERY_LIMIT + 1):
            message = await queue.get(timeout=60, fail=False)
            while message is None:  # what was given back is not there at once
                message = await queue.get(timeout=60, fail=False)
            await message.nack(requeue=True)
    while await left_in(amqp_url, broker._topology.set_aside_queue) != 1:
        await asyncio.sleep(0.05)
    inbox, (later,) = Inbox(), hints(1)
    await consuming(broker, inbox)
    await publish_until_confirmed(broker, [later])
    assert {(await inbox.next()).hint.task_id} == ids([later])
