"""Iterates over thousands of items of one request without blocking the event loop for other requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

_T = TypeVar("_T")

#: Items between two pauses. Callers also use it as the number of items of one statement. PIECE items are handled in a
#: few milliseconds.
PIECE = 100


async def paced(items: Sequence[_T]) -> AsyncIterator[_T]:
    """Yield each item. After every `PIECE` items let the event loop run other tasks."""
    for number, item in enumerate(items, 1):
        yield item
        if number % PIECE == 0:
            await asyncio.sleep(0)
