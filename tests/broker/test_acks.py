"""A delivery is acknowledged once, and not before it is settled. Whoever stops waits until the ACKs are written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiormq.abc import AbstractChannel, ChannelFrame
from pamqp import commands as spec
from pamqp.frame import unmarshal

from leasehold.broker.amqp.acks import Acks
from leasehold.domain.errors import BrokerUnavailable

Written = list[tuple[int, bool]]  # the tag of each ACK, and whether it means all tags up to it


class Line:
    """A channel whose client writes a frame only when the test lets it."""

    def __init__(self, *tags: int) -> None:
        self.queue = asyncio.Queue[ChannelFrame]()
        connection = SimpleNamespace(write_queue=self.queue)
        channel: Any = SimpleNamespace(number=7, is_closed=False, connection=connection)
        self.channel, self.acks = channel, Acks(cast("AbstractChannel", channel))
        for tag in tags:
            self.acks.delivered(tag)

    def settle(self, *tags: int) -> None:
        for tag in tags:
            self.acks.settle(tag)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[Written]:
        """The ACKs of the next write, which ends with the block."""
        written = await self.queue.get()
        assert not written.should_close
        acks, rest = Written(), written.payload
        while rest:
            size, channel, method = unmarshal(rest)
            assert isinstance(method, spec.Basic.Ack)
            assert channel == self.channel.number
            acks.append((method.delivery_tag, method.multiple))
            rest = rest[size:]
        yield acks
        written.drain()

    async def written(self) -> Written:
        async with self.writing() as acks:
            return acks


@asynccontextmanager
async def running(acks: Acks) -> AsyncIterator[None]:
    task = asyncio.create_task(acks.run())
    yield
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


def waits(coroutine: Coroutine[Any, Any, None]) -> bool:
    """Whether it does not return at once."""
    try:
        coroutine.send(None)
    except StopIteration:
        return False
    coroutine.close()
    return True


async def test_what_is_not_settled_is_not_acked_with_what_came_before_and_after_it() -> None:
    line = Line(1, 2, 3, 4, 5, 6)
    line.settle(6, 4, 2, 1)
    async with running(line.acks):
        assert await line.written() == [(2, True), (4, False), (6, False)]
        line.settle(5)
        assert await line.written() == [(5, False)]
        line.settle(3)
        assert await line.written() == [(3, True)]
        await line.acks.drained()
    assert line.queue.empty()


async def test_the_first_of_all_may_be_the_last_that_is_settled() -> None:
    line = Line(1, 2)
    line.settle(2)
    async with running(line.acks):
        assert await line.written() == [(2, False)]


async def test_a_delivery_that_is_settled_twice_or_came_on_another_channel_is_acked_once() -> None:
    """RabbitMQ closes the channel otherwise, and delivers all that is unacknowledged again."""
    line = Line(1, 2)
    line.settle(9, 1, 1)
    async with running(line.acks):
        assert await line.written() == [(1, True)]
        line.settle(1, 2)
        assert await line.written() == [(2, True)]
        await line.acks.drained()
    assert line.queue.empty()


async def test_who_stops_waits_for_the_acks_that_are_settled_while_others_are_written() -> None:
    line = Line(1, 2)
    assert not waits(line.acks.drained())
    line.settle(1)
    assert waits(line.acks.drained())
    async with running(line.acks):
        async with line.writing() as first:
            assert waits(line.acks.drained())
            line.settle(2)
        async with line.writing() as second:
            assert waits(line.acks.drained())
        await line.acks.drained()
    assert [first, second] == [[(1, True)], [(2, True)]]


async def test_who_stops_does_not_wait_for_a_channel_that_is_lost() -> None:
    line = Line(1)
    line.settle(1)
    line.channel.is_closed = True
    with pytest.raises(BrokerUnavailable):
        await line.acks.run()
    assert line.queue.empty()
    assert not waits(line.acks.drained())
