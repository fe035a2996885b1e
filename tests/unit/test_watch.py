"""The loop that wakes long polls: how long it pauses between two queries, and what each query reads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic as real_monotonic
from typing import Any

import pytest

from leasehold.api.process import watch
from leasehold.api.process.watch import QueueWatch, _Watch
from leasehold.transitions.jobs import external_queue


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


class Read(QueueWatch):
    """Notes the queues of each query. `due`: the queues that have a task."""

    def __init__(self) -> None:
        pool: Any = None
        super().__init__(pool, interval=0.0)
        self.reads: list[Sequence[str]] = []
        self.due: set[str] = set()

    async def _read_numbers(self, keys: Sequence[str]) -> Mapping[str, int]:
        self.reads.append(keys)
        return dict.fromkeys(self.due.intersection(keys), 1)

    async def until(self, reads: int) -> None:
        async with asyncio.timeout(10):
            while len(self.reads) < reads:
                await asyncio.sleep(0)


async def test_a_tenant_that_waits_for_very_many_queues_makes_no_query_longer_and_no_other_tenant_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "_MAX_KEYS", 10)
    read = Read()
    many = [[external_queue("a", f"q{poll}-{number}") for number in range(5)] for poll in range(7)]
    own = external_queue("b", "q")
    polls = [asyncio.create_task(read.runnable([*queues, queues[0]], 60)) for queues in many]
    poll = asyncio.create_task(read.runnable([own], 60))
    await read.until(4)
    assert all(len(keys) == len(set(keys)) <= 10 for keys in read.reads)
    assert all(own in keys for keys in read.reads)
    assert {key for keys in read.reads[:4] for key in keys} == {own, *(queue for queues in many for queue in queues)}
    read.due = {own, many[6][4]}
    assert await poll
    assert await polls[6]
    await read.close()
    assert [await one for one in polls[:6]] == [False] * 6
    assert (read._keys, dict(read._waiters), read.waiting) == ({}, {}, 0)


async def test_more_tenants_than_a_query_reads_queues_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_MAX_KEYS", 10)
    read = Read()
    tenants = [f"t:{number}" for number in range(25)]
    queues = {tenant: [external_queue(tenant, name) for name in ("p", "q")] for tenant in tenants}
    polls = [asyncio.create_task(read.runnable(of_tenant, 60)) for of_tenant in queues.values()]
    await read.until(5)
    await read.close()
    await asyncio.gather(*polls)
    of_reads = [key for keys in read.reads[:5] for key in keys]
    assert [key.rpartition(":")[0].removeprefix("ext:") for key in of_reads] == tenants * 2
    assert set(of_reads) == {queue for of_tenant in queues.values() for queue in of_tenant}
