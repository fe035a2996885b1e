"""Waiting for what other processes do: by looking, with a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_BOUND_SECONDS = 60


async def until(holds: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(_BOUND_SECONDS):
            while not holds():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {_BOUND_SECONDS} s: {what}") from None
