"""Group commit: a Batcher runs one statement for all items that callers added during the previous round trip.

Each of these has a Batcher of its own: the worker's claims, settlements (the ends of attempts), journals, log lines and
streams, and the API's submissions of jobs. No timer delays an item.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import asyncpg

from leasehold.db.database import Connection, end_timed_out
from leasehold.db.servers import check_takes_writes
from leasehold.runtime.gather import cancel_and_wait
from leasehold.runtime.transient import TRY_AGAIN, may_try_again
from leasehold.telemetry.outages import DATABASE

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")
#: An item that is set aside is tried again after this many times the duration of its statement.
_ASIDE_FACTOR = 2.0


class _NoConnection(ConnectionError):
    """A connection could not be opened. `__cause__`: the error."""


class _TimedOut(Exception):
    """A statement was cancelled, because it took too long. Mostly it has waited for a lock."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


class Batcher(Generic[_Item, _Answer]):
    """Runs one batched statement on one connection, to a server that takes writes.

    `statement` takes the connection, the items, and the flag `repeated`. It returns one answer for each item, in order.
    `repeated`: an earlier try of these items may have committed something. Either the answer of that try was lost. Or
    that try ran a larger batch, committed a part of it, and failed. So `statement` must be safe to repeat.
    `name`: the batcher's name in the log. `at_most`: the most items of one statement. `pause`: seconds between two
    tries. `patience`: seconds without an answer after which callers get the error.

    `sets_aside`: if a statement takes too long, try each of its items alone. If an item alone takes too long, set it
    aside and try it again later. So a row that somebody has locked for minutes delays no other item. Items that are set
    aside lose their place in the order. With `sets_aside`, `patience` does not bound a statement that takes too long.
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
        #: The answer of each item that is set aside -> the timer that ends the item's pause.
        self._aside: dict[asyncio.Future[_Answer], asyncio.TimerHandle] = {}
        #: The answers of those items in `_waiting` that were set aside before. Each of these items is tried alone.
        self._alone: set[asyncio.Future[_Answer]] = set()
        self._waiting: deque[tuple[_Item, asyncio.Future[_Answer]]] = deque()
        self._has_items = asyncio.Event()
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
        for _, answer in self._waiting:
            answer.cancel()
        for answer, timer in self._aside.items():
            timer.cancel()
            answer.cancel()
        self._waiting.clear()
        self._aside.clear()
        self._drop_connection()

    async def ask(self, item: _Item) -> _Answer:
        """Add `item` to the next round trip and return its answer. Raises the error that the statement raised for the
        item. If PostgreSQL did not answer for `patience` seconds, raises an error of TRY_AGAIN (no connection, no
        answer).
        """
        if self._is_closed:  # no round trip follows: the caller would wait for ever
            raise asyncio.CancelledError
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        self._has_items.set()
        return await answer

    async def _run(self) -> None:
        while True:
            await self._has_items.wait()
            batch, repeated = self._next_batch()
            if not self._waiting:
                self._has_items.clear()
            try:
                await self._run_batch(batch, repeated=repeated)
            except BaseException as error:  # `close` cancels this task
                _fail(batch, error)
                raise

    def _next_batch(self) -> tuple[list[tuple[_Item, asyncio.Future[_Answer]]], bool]:
        """The items of the next statement, and whether an earlier try may have committed something. An item that was
        set aside before gets a statement of its own.
        """
        batch: list[tuple[_Item, asyncio.Future[_Answer]]] = []
        while self._waiting and len(batch) < self._at_most:
            _, answer = self._waiting[0]
            if answer in self._alone:
                if not batch:
                    self._alone.remove(answer)
                    return [self._waiting.popleft()], True
                break
            batch.append(self._waiting.popleft())
        return batch, False

    async def _run_batch(self, batch: list[tuple[_Item, asyncio.Future[_Answer]]], *, repeated: bool = False) -> None:
        try:
            _resolve(batch, await self._answer([item for item, _ in batch], repeated))
        except _TimedOut as error:
            if len(batch) == 1:
                self._set_aside(batch[0], _ASIDE_FACTOR * error.seconds)
                return
            for entry in batch:
                await self._run_batch([entry], repeated=True)
        except Exception as error:  # noqa: BLE001 - each caller gets the error
            if len(batch) == 1 or may_try_again(error):
                _fail(batch, error)
                return
            # Run each item alone, because an item that PostgreSQL refuses must not fail the others. `repeated`: a part
            # of the batch may have committed before the refusal.
            for entry in batch:
                await self._run_batch([entry], repeated=True)

    def _set_aside(self, entry: tuple[_Item, asyncio.Future[_Answer]], seconds: float) -> None:
        _, answer = entry

        def try_again() -> None:
            del self._aside[answer]
            self._alone.add(answer)
            self._waiting.append(entry)
            self._has_items.set()

        self._aside[answer] = asyncio.get_running_loop().call_later(max(seconds, self._pause), try_again)

    async def _answer(self, items: Sequence[_Item], repeated: bool) -> Sequence[_Answer]:  # noqa: FBT001 - passed on to the statement
        """Run the statement. While PostgreSQL does not answer, reconnect and try again, for `patience` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience
        while True:
            began: float | None = None
            try:
                if self._connection is None or self._connection.is_closed():  # the server may close an idle connection
                    self._connection = await self._new_connection()
                check_takes_writes(self._connection)
                began = loop.time()
                answers = await self._statement(self._connection, items, repeated)
            except TRY_AGAIN as error:
                if not may_try_again(error):  # a value that asyncpg cannot encode
                    raise
                cause = error.__cause__ if isinstance(error, _NoConnection) else None
                DATABASE.record_error(cause or error, self._name)
                has_timed_out = isinstance(error, (TimeoutError, asyncpg.QueryCanceledError))
                if has_timed_out and self._connection is not None:
                    await end_timed_out(self._connection)
                self._drop_connection()
                if self._sets_aside and has_timed_out and began is not None:
                    raise _TimedOut(loop.time() - began) from error
                repeated = True
                if loop.time() + self._pause > deadline:
                    raise
                await asyncio.sleep(self._pause)
            else:
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


def _resolve(batch: Sequence[tuple[_Item, asyncio.Future[_Answer]]], answers: Sequence[_Answer]) -> None:
    for (_, future), answer in zip(batch, answers, strict=True):
        if not future.done():
            future.set_result(answer)


def _fail(batch: Sequence[tuple[_Item, asyncio.Future[_Answer]]], error: BaseException) -> None:
    """Give each caller the error. If the batcher's own task is cancelled, cancel the futures of the callers instead."""
    for _, future in batch:
        if future.done():
            continue
        if isinstance(error, Exception):
            future.set_exception(error)
        else:
            future.cancel()
