"""A broker that starts answers half of its requests: whoever waits for it asks again."""

from __future__ import annotations

import pytest

from leasehold.embedded.management import Management
from tests.client.stores import store_of


@pytest.mark.parametrize(
    ("status", "head", "body"),
    [("200 OK", "Content-Length: 1000\r\n", b"{"), ("503 No", "", b""), ("what?", "", b"")],
    ids=["half an answer", "an error", "no HTTP"],
)
async def test_a_broker_that_does_not_answer_as_it_should_is_not_ready(status: str, head: str, body: bytes) -> None:
    async with store_of(head, body, status=status) as url:
        broker = Management(url, "amqp://user:password@127.0.0.1")
        assert not await broker.is_ready()
        with pytest.raises(OSError, match=r"no readable answer|503"):
            await broker.has_alarm() if status != "503 No" else await broker.delete_vhost("v")


async def test_a_broker_that_answers_is_ready() -> None:
    async with store_of("", b'{"name":"user"}') as url:
        assert await Management(url, "amqp://user:password@127.0.0.1").is_ready()
