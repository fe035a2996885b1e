"""Several URLs of RabbitMQ: a node that is silent, or gone, is passed over for the next."""

from __future__ import annotations

import socket

from tests.broker.conftest import OpenBroker, hints, publish_until_confirmed, until
from tests.broker.wire import Wire


async def test_a_silent_node_is_passed_over(amqp_url: str, open_broker: OpenBroker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nobody = f"amqp://guest:guest@127.0.0.1:{silent.getsockname()[1]}/"
        brokers = [await open_broker(url) for url in (f"{nobody},{amqp_url}", f"{amqp_url},{nobody}") for _ in "abc"]
        for broker in brokers:
            await publish_until_confirmed(broker, hints(1))


async def test_when_a_node_goes_the_next_one_is_used_for_both_roles(amqp_url: str, open_broker: OpenBroker) -> None:
    wires = [Wire(amqp_url), Wire(amqp_url)]
    for wire in wires:
        await wire.open()
    try:
        broker = await open_broker(f"{wires[0].url},{wires[1].url}")
        heard: list[object] = []
        await broker.consume({"media": 10}, heard.append)
        await until(lambda: broker.describe()["consuming"] == dict.fromkeys(broker.describe()["consuming"], True))
        for gone in wires * 2:  # wherever a role is, its node goes at least once
            await gone.close()
            await until(lambda: broker.connected and all(broker.describe()["consuming"].values()))
            heard.clear()
            await publish_until_confirmed(broker, hints(1))
            await until(lambda: bool(heard))
            await gone.open()
    finally:
        for wire in wires:
            await wire.close()
