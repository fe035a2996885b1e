"""Measures the effect of a fault. A fault without an effect does not count, even if it was switched on."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import fields
from pathlib import Path

from chaos.plan import Fault
from chaos.proxy import Carried, Link

#: Makes a fault happen, and ends it. Returns the size of its effect, in a unit of the fault's own; 0: no effect.
FaultMaker = Callable[[Fault], Awaitable[int]]
_WAIT_SECONDS = 6.0


class TrafficWatch:
    """Counts the traffic of links. `since`: what they carried, held and lost since this object was made."""

    def __init__(self, links: Iterable[Link]) -> None:
        self._links = list(links)
        self._before = self._sum()

    def _sum(self) -> Carried:
        return Carried(**{
            field.name: sum(getattr(link.carried, field.name) for link in self._links) for field in fields(Carried)
        })  # fmt: skip

    @property
    def since(self) -> Carried:
        now = self._sum()
        return Carried(**{
            field.name: getattr(now, field.name) - getattr(self._before, field.name) for field in fields(Carried)
        })  # fmt: skip


class LogWatch:
    """The lines that a server has written into its log since this object was made."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._from = log.stat().st_size if log.exists() else 0

    def count(self, pattern: str) -> int:
        with self._log.open("rb") as log:
            log.seek(self._from)
            return len(re.findall(pattern.encode(), log.read()))


async def wait_until(is_true: Callable[[], bool], seconds: float = _WAIT_SECONDS) -> bool:
    """Wait until the condition is true, at most `seconds`. Returns whether it is."""
    until = time.monotonic() + seconds
    while not is_true() and time.monotonic() < until:  # noqa: ASYNC110 - a condition has no event
        await asyncio.sleep(0.02)
    return is_true()


async def largest_value(count: Callable[[], int], seconds: float) -> int:
    """The largest value of `count` during the next `seconds`."""
    until, largest = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        largest = max(largest, await asyncio.to_thread(count))
        await asyncio.sleep(0.05)
    return largest
