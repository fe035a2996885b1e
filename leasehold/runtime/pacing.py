"""Going through what a client sent by the thousand without keeping everybody else of the process waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

_T = TypeVar("_T")

#: Items that are handled, or written by one statement, before the event loop serves others: a few milliseconds.
PIECE = 100


async def paced(items: Sequence[_T]) -> AsyncIterator[_T]:
    """Each item; the event loop serves others after every `PIECE` of them."""
    for place, item in enumerate(items, 1):
        yield item
        if place % PIECE == 0:
            await asyncio.sleep(0)
