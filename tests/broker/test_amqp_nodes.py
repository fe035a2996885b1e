"""Several URLs of RabbitMQ: a node that is silent, or gone, is passed over for the next."""

from __future__ import annotations

import asyncio
import socket
import time
from functools import partial
from uuid import UUID

import pytest

from leasehold.broker import Broker
from leasehold.broker.amqp import watchdog
from leasehold.broker.amqp.broker import AmqpBroker
from leasehold.broker.amqp.watchdog import Patience
from leasehold.broker.base import Delivery
from tests.broker.conftest import OpenBroker, check_with_growing_silence, hints, publish_until_confirmed, until
from tests.broker.wire import Wire

SECONDS = 60.0


async def test_a_silent_node_is_passed_over(amqp_url: str, open_broker: OpenBroker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nobody = f"amqp://guest:guest@127.0.0.1:{silent.getsockname()[1]}/"
        brokers = [await open_broker(url) for url in (f"{nobody},{amqp_url}", f"{amqp_url},{nobody}") for _ in "abc"]
        for broker in brokers:
            await publish_until_confirmed(broker, hints(1))


def nodes_of(broker: Broker) -> set[str]:
    assert isinstance(broker, AmqpBroker)
    return {link._nodes.current.url for link in (broker._publisher.link, broker._consumer.link)}


async def test_a_frozen_node_is_left_although_its_connections_stay_open(amqp_url: str, open_broker: OpenBroker) -> None:
    """Heartbeats would notice it after half a minute, which is longer than the test may take."""
    wires = [Wire(amqp_url), Wire(amqp_url)]
    for wire in wires:
        await wire.open()
    try:
        broker = await open_broker(f"{wires[0].url},{wires[1].url}", amqp_silence_seconds=0.6, amqp_host_timeout=0.5)
        await broker.consume({"media": 10}, lambda _: None)
        await until(lambda: all(broker.describe()["consuming"].values()))
        for frozen in wires:  # wherever a role is, its node is frozen at least once
            frozen.freeze()

            def is_left(url: str = frozen.url) -> bool:
                return url not in nodes_of(broker)

            async with asyncio.timeout(SECONDS):
                await until(is_left)
                await until(lambda: broker.connected and all(broker.describe()["consuming"].values()))
                await publish_until_confirmed(broker, hints(1))
            frozen.thaw()
        assert sum(broker.describe()["connects"].values()) > len(wires)
    finally:
        for wire in wires:
            await wire.close()


def test_patience_with_silent_nodes_grows_and_shrinks_again_after_a_quiet_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On an overloaded machine every node is slow, and each reconnect would make all slower."""
    now = [1000.0]
    monkeypatch.setattr(watchdog, "monotonic", lambda: now[0])
    patience = Patience(2.0)
    waits = []
    for _ in range(5):
        waits.append(patience.seconds)
        patience.record_loss()
    assert waits == [2.0, 4.0, 8.0, 10.0, 10.0]
    now[0] += 61.0
    assert patience.seconds == 2.0
    assert Patience(30.0).seconds == 30.0


async def test_a_node_that_answers_and_confirms_nothing_is_left_for_the_next(
    amqp_url: str, open_broker: OpenBroker
) -> None:
    """A quorum queue without a leader, or a channel that is stuck after one: RabbitMQ answers every other request."""
    wires = [Wire(amqp_url), Wire(amqp_url)]
    for wire in wires:
        await wire.open()
    try:
        broker = await open_broker(f"{wires[0].url},{wires[1].url}", amqp_publish_timeout=0.5)
        assert isinstance(broker, AmqpBroker)
        for mute in wires:  # wherever the publisher is, its node is mute at least once
            mute.loses_confirms = True
            async with asyncio.timeout(SECONDS):
                await publish_until_confirmed(broker, hints(1))
            assert broker._publisher.link._nodes.current.url != mute.url
            mute.loses_confirms = False
    finally:
        for wire in wires:
            await wire.close()


async def test_a_node_that_answers_is_not_left_however_little_it_has_to_do(
    amqp_url: str, open_broker: OpenBroker
) -> None:
    async def connects(silence_seconds: float) -> object:
        broker = await open_broker(amqp_url, amqp_silence_seconds=silence_seconds)
        await broker.consume({"media": 10}, lambda _: None)
        await until(lambda: all(broker.describe()["consuming"].values()))
        await asyncio.sleep(3 * silence_seconds)
        time.sleep(3 * silence_seconds)  # noqa: ASYNC251 - a handler that holds up the loop
        await asyncio.sleep(silence_seconds)
        return broker.describe()["connects"]

    await check_with_growing_silence(connects, {"publish": 1, "consume": 1})


async def test_a_node_that_answers_within_one_tick_of_the_clock_is_not_left(
    amqp_url: str, open_broker: OpenBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of uvloop has ticks of a millisecond, and a broker on the same machine answers sooner."""
    loop, tick = asyncio.get_running_loop(), 0.05
    exact = loop.time
    monkeypatch.setattr(loop, "time", lambda: exact() // tick * tick)

    async def connects(silence_seconds: float) -> object:
        broker = await open_broker(amqp_url, amqp_silence_seconds=silence_seconds)
        await broker.consume({"media": 10}, lambda _: None)
        await until(lambda: all(broker.describe()["consuming"].values()))
        await asyncio.sleep(4 * silence_seconds)
        return broker.describe()["connects"]

    await check_with_growing_silence(connects, {"publish": 1, "consume": 1})


async def test_when_a_node_goes_the_next_one_is_used_for_both_roles(amqp_url: str, open_broker: OpenBroker) -> None:
    wires = [Wire(amqp_url), Wire(amqp_url)]
    for wire in wires:
        await wire.open()
    try:
        broker = await open_broker(f"{wires[0].url},{wires[1].url}")
        heard: set[UUID] = set()
        acks: set[asyncio.Future[None]] = set()

        def hear(delivery: Delivery) -> None:
            """Unacknowledged hints would fill the prefetch."""
            heard.add(delivery.hint.task_id)
            acks.add(asyncio.ensure_future(delivery.ack()))

        await broker.consume({"media": 10}, hear)
        await until(lambda: broker.describe()["consuming"] == dict.fromkeys(broker.describe()["consuming"], True))
        for gone in wires * 2:  # wherever a role is, its node goes at least once
            await gone.close()
            await until(lambda: broker.connected and all(broker.describe()["consuming"].values()))
            [hint] = hints(1)
            await publish_until_confirmed(broker, [hint])
            await until(partial(heard.__contains__, hint.task_id))
            await gone.open()
    finally:
        for wire in wires:
            await wire.close()
