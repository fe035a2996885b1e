"""Group commit: a Batcher runs one statement for all items that callers added during the previous round trip.

Each of these has a Batcher of its own: the worker's claims, settlements (the ends of attempts), journals, log lines and
streams, and the API's submissions of jobs. No timer delays an item.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar

from leasehold.db.database import Connection, end_timed_out
from leasehold.db.servers import check_takes_writes
from leasehold.runtime.gather import cancel_and_wait, check_not_cancelled
from leasehold.runtime.transient import TIMED_OUT, TRY_AGAIN, may_try_again
from leasehold.telemetry.outages import DATABASE

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")
#: For Batchers with `sets_aside` (see Batcher). A statement for a single item that is tried alone may always take this
#: many seconds. Most such statements take some milliseconds.
_ALONE_SECONDS = 1.0
#: Such a statement may take longer if the last statement that PostgreSQL answered, or the item's last try alone, took
#: long. Its limit is then this many times the longer of the two durations. So an item gets its answer in the end,
#: however slow the database is.
_LIMIT_FACTOR = 2.0
#: The items that are set aside are tried again one by one. Before the first of them is tried, the batcher waits for
#: this many times the duration of that item's last try.
_PAUSE_FACTOR = 2.0


class _NoConnection(ConnectionError):
    """A connection could not be opened. `__cause__`: the error."""


class _TimedOut(Exception):
    """A statement was cancelled, because it took too long. In most cases it has waited for a lock."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


@dataclass(slots=True, eq=False)
class _Request(Generic[_Item, _Answer]):
    """An item, and the answer that its caller awaits. `alone_seconds`: how long the last try of the item alone took, if
    it took too long; None: no such try took too long.
    """

    item: _Item
    answer: asyncio.Future[_Answer]
    alone_seconds: float | None = None


class Batcher(Generic[_Item, _Answer]):
    """Runs one batched statement on one connection, to a server that takes writes.

    `statement` takes the connection, the items, and the flag `repeated`. It returns one answer for each item, in order.
    `repeated`: an earlier try of these items may have committed something. Perhaps the answer of that try was lost, or
    that try ran a larger batch, committed a part of it, and failed. So `statement` must be safe to repeat.
    `name`: the batcher's name in the log. `at_most`: the most items of one statement. `pause`: seconds between two
    tries. `patience`: seconds without an answer after which callers get the error.

    `sets_aside`: whether the batcher sets slow items aside. Then, if a statement takes too long, the batcher tries each
    of its items alone, for a short time. If an item alone takes too long, the batcher sets it aside, and tries it again
    later. After each try of an item alone that took too long, newer items get a statement first. So even many rows that
    somebody has locked for minutes delay no other item for long. Items that are tried alone lose their place in the
    order. `patience` then does not bound a statement that takes too long.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        statement: Callable[[Connection, Sequence[_Item], bool], Awaitable[Sequence[_Answer]]],
        *,
        name: str = "statements",
        at_most: int = 64,
        patience: float = 60.0,
        pause: float = 0.25,
        sets_aside: bool = False,
    ) -> None:
        self._connect = connect
        self._statement = statement
        self._name = name
        self._at_most = at_most
        self._patience = patience
        self._pause = pause
        self._sets_aside = sets_aside
        self._waiting: deque[_Request[_Item, _Answer]] = deque()
        #: Each of these items is tried alone, because a statement for its batch took too long, or was refused.
        self._alone: deque[_Request[_Item, _Answer]] = deque()
        #: The items that are set aside. `_timer` moves the first of them to `_alone`.
        self._aside: deque[_Request[_Item, _Answer]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._newer_first = False  # the next statement is for items of `_waiting`, if there are any
        self._answer_seconds = 0.0  # the duration of the last statement that PostgreSQL answered
        self._has_items = asyncio.Event()  # in `_waiting` or in `_alone`
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop. Callers of `ask` that still wait, and later callers, get CancelledError."""
        self._is_closed = True
        if self._task is not None:
            await cancel_and_wait(self._task)
        if self._timer is not None:
            self._timer.cancel()
        for items in (self._waiting, self._alone, self._aside):
            for request in items:
                request.answer.cancel()
            items.clear()
        self._drop_connection()

    async def ask(self, item: _Item) -> _Answer:
        """Add `item` to the next round trip and return its answer. Raises the error that the statement raised for the
        item. If PostgreSQL did not answer for `patience` seconds, raises an error of TRY_AGAIN (no connection, no
        answer).
        """
        if self._is_closed:  # no round trip follows, so the caller would wait for ever
            raise asyncio.CancelledError
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(item, answer))
        self._has_items.set()
        return await answer

    async def _run(self) -> None:
        while True:
            await self._has_items.wait()
            batch, is_alone = self._next_batch()
            if not self._waiting and not self._alone:
                self._has_items.clear()
            try:
                await self._run_batch(batch, is_alone=is_alone)
                check_not_cancelled()  # asyncpg may have turned the cancel into an error of the statement
            except BaseException as error:  # `close` cancels this task
                _fail(batch, error)
                raise

    def _next_batch(self) -> tuple[list[_Request[_Item, _Answer]], bool]:
        """The items of the next statement, and whether the statement tries a single item alone.

        Items that are tried alone come before newer ones, because they have waited longer. Exception: after a try that
        took too long, a batch of newer items comes first.
        """
        if self._alone and not (self._newer_first and self._waiting):
            return [self._alone.popleft()], True
        self._newer_first = False
        return [self._waiting.popleft() for _ in range(min(self._at_most, len(self._waiting)))], False

    async def _run_batch(self, batch: list[_Request[_Item, _Answer]], *, is_alone: bool) -> None:
        # Run the statement, and answer the callers. If the statement for a batch is refused, or (with `sets_aside`)
        # takes too long, each of its items is tried alone later. If an item that is tried alone takes too long, it is
        # set aside. If such an item is refused, its caller gets the error. If PostgreSQL does not answer, all callers
        # of the batch get the error.
        limit = self._limit_of(batch[0]) if is_alone and self._sets_aside else None
        try:
            # If an item is tried alone, the earlier statement for its whole batch may have committed a part of it.
            answers = await self._answer([request.item for request in batch], repeated=is_alone, limit=limit)
        except _TimedOut as error:
            if is_alone:
                self._set_aside(batch[0], error.seconds)
                return
            self._alone.extend(batch)
        except Exception as error:  # noqa: BLE001 - each caller gets the error
            if len(batch) > 1 and not may_try_again(error):
                # If PostgreSQL refuses one item, the other items of the batch must not fail with it.
                self._alone.extend(batch)
            else:
                _fail(batch, error)
        else:
            _resolve(batch, answers)
        if self._alone:
            self._has_items.set()
        # An item that was set aside is done now, so the lock for which it waited has gone. Perhaps the items that are
        # still set aside waited for the same lock, so try the first of them at once.
        if batch[0].alone_seconds is not None:
            self._resume_after(0.0)

    def _limit_of(self, request: _Request[_Item, _Answer]) -> float:
        """The most seconds for a try of this item alone. The connection has a limit of its own for each statement."""
        return max(_ALONE_SECONDS, _LIMIT_FACTOR * max(self._answer_seconds, request.alone_seconds or 0.0))

    def _set_aside(self, request: _Request[_Item, _Answer], seconds: float) -> None:
        """Set aside an item whose try alone was cancelled after `seconds`, because it took too long."""
        request.alone_seconds = seconds
        self._aside.append(request)
        self._newer_first = True
        # The pause depends on the last try of the item that is next, and not on the try of this item. So an item that
        # had a short try does not wait for long because of another item.
        self._resume_after(max(_PAUSE_FACTOR * (self._aside[0].alone_seconds or 0.0), self._pause))

    def _resume_after(self, seconds: float) -> None:
        """After `seconds`, try the first of the items that are set aside again. The end of this try decides when the
        next item is tried. So these tries take only a part of the time, however many items are set aside.
        """

        def try_again() -> None:
            self._timer = None
            self._alone.append(self._aside.popleft())
            self._has_items.set()

        if self._aside and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, try_again)

    async def _answer(self, items: Sequence[_Item], *, repeated: bool, limit: float | None) -> Sequence[_Answer]:
        """Run the statement, each try for at most `limit` seconds (None: no limit). While PostgreSQL does not answer,
        reconnect and try again, for `patience` seconds.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience
        while True:
            began: float | None = None
            try:
                if self._connection is None or self._connection.is_closed():  # the server may close an idle connection
                    self._connection = await self._new_connection()
                check_takes_writes(self._connection)
                began = monotonic()
                async with asyncio.timeout(limit):
                    answers = await self._statement(self._connection, items, repeated)
            except TRY_AGAIN as error:
                check_not_cancelled()
                if not may_try_again(error):  # a value that asyncpg cannot encode
                    raise
                cause = error.__cause__ if isinstance(error, _NoConnection) else None
                DATABASE.record_error(cause or error, self._name)
                has_timed_out = isinstance(error, TIMED_OUT)
                if has_timed_out and self._connection is not None:
                    await end_timed_out(self._connection)
                self._drop_connection()
                if self._sets_aside and has_timed_out and began is not None:
                    raise _TimedOut(monotonic() - began) from error
                repeated = True
                if loop.time() + self._pause > deadline:
                    raise
                await asyncio.sleep(self._pause)
            else:
                self._answer_seconds = monotonic() - began
                DATABASE.record_answer()
                return answers

    async def _new_connection(self) -> Connection:
        """Open a connection. Any error is raised as one of TRY_AGAIN, because no item is at fault. For example,
        PostgreSQL refuses the password while somebody changes it.
        """
        try:
            return await self._connect()
        except Exception as error:
            if may_try_again(error):
                raise
            raise _NoConnection(f"no connection can be opened: {type(error).__name__}") from error

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()


def _resolve(batch: Sequence[_Request[_Item, _Answer]], answers: Sequence[_Answer]) -> None:
    for request, answer in zip(batch, answers, strict=True):
        if not request.answer.done():
            request.answer.set_result(answer)


def _fail(batch: Sequence[_Request[_Item, _Answer]], error: BaseException) -> None:
    """Give each caller the error. If the batcher's own task is cancelled, cancel the futures of the callers instead."""
    for request in batch:
        if request.answer.done():
            continue
        if isinstance(error, Exception):
            request.answer.set_exception(error)
        else:
            request.answer.cancel()
