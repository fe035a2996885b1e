"""Batches in a worker. Runs of one task function (`@app.task(batch=...)`) wait for each other. Then one call of the
function serves them all. The function takes the list of their items, and returns the list of their results.

Each run has its own item, lease, retries and result. A call never serves runs of different tenants.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any, TypeAlias

from leasehold.app.run_limits import Batch
from leasehold.domain.errors import Cancelled, Permanent
from leasehold.domain.sentences import counted, with_article
from leasehold.runtime.foreign_errors import begin_foreign_code, contained
from leasehold.runtime.gather import being_cancelled

#: Calls the task function with a list of items. Returns what the function returned.
CallAll: TypeAlias = "Callable[[list[Any]], Awaitable[Any]]"
#: An item, and a future, which gets the item's result. The attempt that brought the item awaits the future.
_Entry: TypeAlias = "tuple[Any, asyncio.Future[Any]]"


class Batches:
    """The batches of one app in one worker."""

    def __init__(self) -> None:
        self._collectors: dict[tuple[str, str], _Collector] = {}  # (name of the task function, tenant) -> collector

    async def result_of(self, task: str, tenant: str, batch: Batch, item: Any, call_all: CallAll) -> Any:
        """The item's result, from a call that may also have the items of other runs. Raises the error that the function
        raised, or that it returned for this item.

        `task`: the name of the task function. A collector exists while at least one attempt waits for a result.
        """
        collector = self._collectors.setdefault((task, tenant), _Collector(batch))
        collector.users += 1
        try:
            return await collector.result_of(item, call_all)
        finally:
            collector.users -= 1
            if collector.users == 0:
                del self._collectors[task, tenant]


async def result_alone(item: Any, call_all: CallAll) -> Any:
    """The item's result, from a call of the function with this item only."""
    return result_of_one(await call_all([item]))


def result_of_one(returned: Any) -> Any:
    """The result of a call with one item. Raises the error that the function returned for the item. Raises Permanent if
    the function did not return a list with exactly one item.
    """
    (result,) = _checked_results(returned, 1)
    if isinstance(result, BaseException):
        raise result
    return result


class _Collector:
    """Collects the items of one task function and tenant, and calls the function. A call begins when `batch.size` items
    wait, or at the latest `batch.wait` after the first of them came.
    """

    def __init__(self, batch: Batch) -> None:
        self.users = 0  # the number of attempts that wait for a result
        self._batch = batch
        self._waiting: list[_Entry] = []
        self._timer: asyncio.TimerHandle | None = None
        self._calls: dict[asyncio.Task[None], list[_Entry]] = {}  # the asyncio task of a call -> the call's items

    async def result_of(self, item: Any, call_all: CallAll) -> Any:
        """Add the item to the next call, and wait for its result."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()
        entry = (item, result)
        self._waiting.append(entry)
        if len(self._waiting) >= self._batch.size:
            self._begin_call(call_all)
        elif self._timer is None:
            self._timer = loop.call_later(self._batch.wait.total_seconds(), self._begin_call, call_all)
        try:
            return await result
        finally:
            self._remove(entry)

    def _begin_call(self, call_all: CallAll) -> None:
        # Begin a call with all items that wait now. There may be none, if their attempts were cancelled meanwhile.
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        entries, self._waiting = self._waiting, []
        if entries:
            # The call gets an empty context. In the context of one attempt, `current()` and the log would belong to
            # this attempt's run, but the call serves several runs.
            task = asyncio.get_running_loop().create_task(_call_for(entries, call_all), context=Context())
            self._calls[task] = entries
            task.add_done_callback(self._calls.pop)

    def _remove(self, entry: _Entry) -> None:
        """Forget the item of an attempt that has its result or was cancelled. If all attempts of the item's call were
        cancelled, cancel the call.
        """
        if entry in self._waiting:
            self._waiting.remove(entry)
        for task, entries in list(self._calls.items()):
            if entry in entries and all(future.cancelled() for _, future in entries):
                task.cancel()


async def _call_for(entries: list[_Entry], call_all: CallAll) -> None:
    """Call the function with the items. If the function raises, each item gets the error."""
    begin_foreign_code()  # from here on, this asyncio task runs the app's code (see foreign_errors.py)
    try:
        results = _checked_results(await call_all([item for item, _ in entries]), len(entries))
    except (Exception, asyncio.CancelledError, Cancelled) as error:  # each item's attempt will raise this error
        if being_cancelled():  # `_remove` (or the loop's end) cancels this call, so no attempt waits for it
            raise
        results = [error] * len(entries)
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:  # in a future these would do harm, see `contained`
        results = [contained(error)] * len(entries)
    _give_results(entries, results)


def _give_results(entries: list[_Entry], results: list[Any]) -> None:
    """Give each attempt the result or the error of its item. Leave out the attempts that were cancelled meanwhile."""
    for (_, future), result in zip(entries, results, strict=True):
        if future.done():
            continue
        if isinstance(result, StopIteration):  # a future cannot hold a StopIteration
            future.set_exception(RuntimeError(f"the function gave a StopIteration for an item: {result!r}"))
        elif isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)


def _checked_results(results: Any, count: int) -> list[Any]:
    """The results as a list. Raises Permanent `batch_mismatch` unless they are a list of `count` items."""
    if not isinstance(results, list) or len(results) != count:
        kind = type(results).__name__
        returned = counted(len(results), "result", "results") if isinstance(results, list) else with_article(kind)
        items = counted(count, "item", "items")
        raise Permanent(
            "batch_mismatch",
            f"the function got {items} and returned {returned}: return a list with one result for each item",
        )
    return results
