"""Answers that all open pages of a process share for some seconds. So a hundred open pages cost the database as much as
one.
"""

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
    """`seconds`: how long an answer is shared. Requests that arrive while an answer is being made wait for this answer.

    If a new answer equals the answer before it, `get` returns the earlier object. So `rendering.unchanged` compares
    objects that are mostly the same.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # By key: the time until which the answer is shared, the task that makes it, and how far behind the standby was
        # that the task read (its Reading). Answers from the primary have keys of their own, because a request that
        # reads from the primary must not get an older answer from the standby.
        self._tasks: OrderedDict[Hashable, tuple[float, asyncio.Task[_Answer], Reading | None]] = OrderedDict()

    async def get(self, key: Hashable, make: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """The shared answer, or a new answer from `make`. If the answer depends on the tenant or the scopes, `key` must
        name them. Raises the errors of `make`.
        """
        reading = replica_reads.current()
        is_from_primary = reading is None
        key = (key, is_from_primary)
        shared_until, task, reading_of_task = self._tasks.get(key, (0.0, None, None))
        if task is None or (task.done() and (monotonic() >= shared_until or _failed(task))):
            previous = None if task is None or _failed(task) else task.result()
            task = asyncio.create_task(_make_or_keep(make, previous))
            self._tasks[key] = monotonic() + self._seconds, task, reading
            self._tasks.move_to_end(key)
            if len(self._tasks) > _MAX_KEYS:
                self._tasks.popitem(last=False)
            reading_of_task = reading
        answer = await asyncio.shield(task)
        if reading is not None and reading_of_task is not None:
            reading.include(reading_of_task)
        return answer

    def forget(self) -> None:
        """Forget all answers, because the caller has changed rows from which they were made."""
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
