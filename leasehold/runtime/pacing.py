"""Iterates over thousands of items of one request without blocking the event loop for other requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

_T = TypeVar("_T")

#: Items between two pauses: a few milliseconds of work. Callers also write this many items in one statement.
PIECE_SIZE = 100


async def paced(items: Sequence[_T]) -> AsyncIterator[_T]:
    """Yield each item. After every `PIECE_SIZE` items, let the event loop run other asyncio tasks."""
    for number, item in enumerate(items, 1):
        yield item
        if number % PIECE_SIZE == 0:
            await asyncio.sleep(0)
