"""The loop that wakes long polls: how long it pauses between two queries."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic as real_monotonic

import pytest

from leasehold.api.process import watch
from leasehold.api.process.watch import _Watch


class Counted(_Watch[str]):
    """Each query takes 10 seconds by the clock that the watch reads; the first one fails."""

    def __init__(self) -> None:
        super().__init__(interval=0.25)
        self.queries = 0
        self.now = real_monotonic()

    async def _read_numbers(self, keys: Sequence[str]) -> Mapping[str, int]:
        self.queries += 1
        self.now += 10.0
        if self.queries == 1:
            raise TimeoutError
        return dict.fromkeys(keys, 0 if self.queries == 2 else 1)

    def _ready(self, waiters: Mapping[asyncio.Future[bool], int], number: int | None) -> Iterator[asyncio.Future[bool]]:
        return (waiter for waiter, mark in waiters.items() if number is not None and number > mark)


async def test_slow_queries_are_spread_out_and_one_that_failed_is_repeated_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While PostgreSQL hangs, a query fails after seconds. Nobody must wait for five times as long afterwards."""
    counted = Counted()
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(watch, "monotonic", lambda: counted.now)
    monkeypatch.setattr("leasehold.api.process.watch.asyncio.sleep", pause)
    assert await counted._wait(["a"], 0, 1000.0)
    await counted.close()
    assert pauses[:2] == [0.25, 10.0 / watch._QUERY_SHARE]
