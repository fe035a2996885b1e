from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import asyncpg

from tests.factories import assert_histories

_T = TypeVar("_T")


@dataclass
class Two:
    first: asyncpg.Connection[Any]
    second: asyncpg.Connection[Any]

    async def close(self) -> None:
        await self.first.close()
        await self.second.close()


#: What is odd about a case; None: nothing.
Judge: TypeAlias = Callable[[Two, _T], Awaitable[object | None]]


async def surprises(batchers: Sequence[Two], cases: Iterable[_T], judge: Judge[_T]) -> list[object]:
    """What `judge` found of all cases. The history of every job that they leave behind adds up."""
    waiting = iter(cases)
    found = await asyncio.gather(*(_along(batcher, waiting, judge) for batcher in batchers))
    return [result for of_database in found for result in of_database]


async def _along(
    batcher: Two, waiting: Iterator[_T], judge: Callable[[Two, _T], Awaitable[object | None]]
) -> list[object]:
    found = [one for case in waiting if (one := await judge(batcher, case)) is not None]
    await assert_histories(batcher.first)
    return found
