"""Answers that all open pages of a tenant share for some seconds, in one process. So a hundred open pages cost the
database as much as one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, TypeVar

from leasehold.api.process import deadline, replica_reads
from leasehold.api.process.replica_reads import Reading
from leasehold.api.process.tenant_pool import current_tenant
from leasehold.db.replica import STANDBY_FAILED
from leasehold.runtime.gather import has_failed
from leasehold.runtime.transient import TRY_AGAIN

#: The answer that is shared, for example the rows of a page.
_Answer = TypeVar("_Answer")
#: One `Shared` remembers at most this many answers, to bound the memory of the process.
_MAX_ANSWERS = 500


@dataclass(frozen=True, slots=True)
class _Shareable(Generic[_Answer]):
    """An answer that the asyncio task `task` makes or has made. It is shared until the time `shared_until`. `reading`:
    reads the rows from the standby, and knows their age; None: the rows are read from the primary.
    """

    task: asyncio.Task[_Answer]
    shared_until: float
    reading: Reading | None

    @property
    def may_be_shared(self) -> bool:
        return not self.task.done() or (monotonic() < self.shared_until and not has_failed(self.task))


class Shared(Generic[_Answer]):
    """The answers of one kind, each under a key. `seconds`: how long an answer is shared. Requests that arrive while an
    answer is being made wait for this answer. Each request waits until its own deadline. If the request that began the
    answer has no time left, the answer is still made, and the other requests go on waiting for it. Tenants share no
    answers, because the making of an answer waits for the turn of one tenant at the database.

    If a new answer equals the previous answer, `get` returns the object of the previous answer. So
    `rendering.unchanged`, which compares the answers of two renderings, is fast, because in most cases they are the
    same object.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # In the order in which the answers were made, so the oldest is the first.
        self._answers: OrderedDict[Hashable, _Shareable[_Answer]] = OrderedDict()

    async def get(self, key: Hashable, make: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """The shared answer, or a new answer from `make`. If the answer depends on the scopes, `key` must name them.
        Raises the errors of `make`, and TimeoutError when the request has no time left.
        """
        reading = replica_reads.current()
        # Answers from the primary have separate keys, because a request that reads from the primary must not get an
        # older answer from the standby.
        key = (current_tenant(), key, reading is None)
        shareable, is_own = self._begun(key, make, reading)
        try:
            answer = await _wait_for(shareable, reading)
        except TRY_AGAIN:
            # Another request may have begun the failed answer long ago, so this request tries once more. If the request
            # reads from the standby, it does not try again, because the primary answers it instead.
            if is_own or reading is not None or deadline.current().is_over:
                raise
            shareable, _ = self._begun(key, make, reading)
            answer = await _wait_for(shareable, reading)
        if reading is not None and shareable.reading is not None:
            reading.include(shareable.reading)  # the response names the age of these rows
        return answer

    def _begun(
        self, key: Hashable, make: Callable[[], Awaitable[_Answer]], reading: Reading | None
    ) -> tuple[_Shareable[_Answer], bool]:
        """An answer, and whether this call has begun it. If an earlier answer may be shared, this call begins none.
        `reading`: of the current request; None: it reads from the primary.
        """
        shareable = self._answers.get(key)
        if shareable is not None and shareable.may_be_shared:
            return shareable, False
        # If an answer can no longer be shared, its asyncio task is done, so `result` returns immediately.
        previous = None if shareable is None or has_failed(shareable.task) else shareable.task.result()
        shared_reading = None if reading is None else reading.without_limit()
        task = asyncio.create_task(_make_or_keep(make, previous, shared_reading))
        shareable = _Shareable(task, monotonic() + self._seconds, shared_reading)
        self._remember(key, shareable)
        return shareable, True

    def _remember(self, key: Hashable, shareable: _Shareable[_Answer]) -> None:
        self._answers[key] = shareable
        self._answers.move_to_end(key)
        if len(self._answers) > _MAX_ANSWERS:
            self._answers.popitem(last=False)

    def forget(self) -> None:
        """Forget all answers, because the caller has changed rows from which they were made."""
        self._answers.clear()


async def _wait_for(shareable: _Shareable[_Answer], reading: Reading | None) -> _Answer:
    """Wait for the answer until the current request has no time left. The asyncio task that makes the answer then goes
    on without the request.
    """
    async with deadline.current().waiting(), nullcontext() if reading is None else reading.waiting():
        try:
            return await asyncio.shield(shareable.task)
        except STANDBY_FAILED:
            if reading is not None and shareable.reading is not None and shareable.reading.has_failed:
                reading.has_failed = True
            raise


async def _make_or_keep(
    make: Callable[[], Awaitable[_Answer]], previous: _Answer | None, reading: Reading | None
) -> _Answer:
    """The answer of `make`, or `previous` if the two are equal. This function runs in an asyncio task of its own. Each
    wait in this task keeps its own limit, but no deadline of a request applies to the task.
    """
    with deadline.without_limit(), replica_reads.reading_as(reading):
        answer = await make()
    return previous if previous is not None and answer == previous else answer


class SharedAnswers:
    """The shared answers of all pages, by the name that a page gives them."""

    def __init__(self) -> None:
        self._by_name: dict[str, Shared[Any]] = {}

    def named(self, name: str, seconds: float) -> Shared[Any]:
        return self._by_name.setdefault(name, Shared(seconds))
