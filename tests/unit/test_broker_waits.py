"""Waiting on the broker: whose end it was, and that ours is never lost."""

from __future__ import annotations

import asyncio

import pytest

from leasehold.broker.amqp.connection import guarded
from leasehold.domain.errors import BrokerUnavailable


async def test_a_cancellation_that_came_with_the_brokers_answer_is_not_lost() -> None:
    waiting = asyncio.Event()

    async def client_that_swallows_it() -> None:
        waiting.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return

    async def work() -> None:
        async with guarded(60):
            await client_that_swallows_it()
        raise AssertionError("went on although it was cancelled")

    task = asyncio.create_task(work())
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_connection_that_dies_under_us_is_not_our_end() -> None:
    async def work() -> str:
        try:
            async with guarded(60):
                raise asyncio.CancelledError  # what the client raises in everybody who waits on a dying connection
        except BrokerUnavailable:
            return "goes on"

    assert await asyncio.create_task(work()) == "goes on"


async def test_while_we_are_being_cancelled_a_dying_connection_is_still_told_apart() -> None:
    told: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            try:
                async with guarded(60):
                    raise asyncio.CancelledError
            except BrokerUnavailable:
                told.append("the farewell failed")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert told == ["the farewell failed"]
