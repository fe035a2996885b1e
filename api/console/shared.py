"""Answers that all open pages of a process share for some seconds: many consoles cost the database as much as one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from time import monotonic
from typing import Any, Generic, TypeVar

from leasehold.api.process import replica_reads
from leasehold.api.process.replica_reads import Reading

_Answer = TypeVar("_Answer")
_MAX_KEYS = 500


class Shared(Generic[_Answer]):
    """`seconds`: how long an answer is shared. Requests that arrive while an answer is being made wait for it.

    If a new answer equals the answer before, `get` returns the earlier object again. So `rendering.page` sees by
    identity that a page need not be rendered again.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # By key: until when the answer is shared, the task that makes it, and what it reads from the standby. Answers
        # of the primary are shared apart: a request for them wants no stale ones.
        self._tasks: OrderedDict[Hashable, tuple[float, asyncio.Task[_Answer], Reading | None]] = OrderedDict()

    async def get(self, key: Hashable, make: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """The shared answer, or the answer of `make`. `key` must name the tenant and the scopes if the answer depends
        on them. Raises what `make` raises.
        """
        reading = replica_reads.current()
        key = (key, reading is None)
        until, task, made_by = self._tasks.get(key, (0.0, None, None))
        if task is None or (task.done() and (monotonic() >= until or _failed(task))):
            previous = None if task is None or _failed(task) else task.result()
            task = asyncio.create_task(_make_or_keep(make, previous))
            self._tasks[key] = monotonic() + self._seconds, task, reading
            self._tasks.move_to_end(key)
            if len(self._tasks) > _MAX_KEYS:
                self._tasks.popitem(last=False)
            made_by = reading
        answer = await asyncio.shield(task)
        if reading is not None and made_by is not None:
            reading.include(made_by)
        return answer

    def forget(self) -> None:
        """Make every answer anew: the caller has changed the rows behind the answers."""
        self._tasks.clear()


async def _make_or_keep(make: Callable[[], Awaitable[_Answer]], previous: _Answer | None) -> _Answer:
    """The answer of `make`; `previous` if the two are equal."""
    answer = await make()
    return previous if previous is not None and answer == previous else answer


def _failed(task: asyncio.Task[_Answer]) -> bool:
    return task.cancelled() or task.exception() is not None


class SharedAnswers:
    """The shared answers of all pages, by the name that a page gives them."""

    def __init__(self) -> None:
        self._by_name: dict[str, Shared[Any]] = {}

    def of(self, name: str, seconds: float) -> Shared[Any]:
        return self._by_name.setdefault(name, Shared(seconds))
