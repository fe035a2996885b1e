"""Group commit: whatever gathered while the last round trip ran goes into the next one. No timer, no delay."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from leasehold.db.database import Connection
from leasehold.runtime.transient import TRY_AGAIN, may_try_again
from leasehold.telemetry.outages import DATABASE

_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Batcher(Generic[_In, _Out]):
    """One connection and one batched statement on it.

    `statement` takes the connection, the items and whether this is a repetition (the answer to an earlier try was
    lost, so it may have been carried out), and returns one answer an item, in order. It must be safe to repeat.
    `name`: what the log calls it. After `patience` seconds without an answer the askers get the error.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        statement: Callable[[Connection, Sequence[_In], bool], Awaitable[Sequence[_Out]]],
        *,
        name: str = "statements",
        most: int = 64,
        patience: float = 60.0,
        pause: float = 0.25,
    ) -> None:
        self._connect = connect
        self._statement = statement
        self._name = name
        self._most = most
        self._patience = patience
        self._pause = pause
        self._waiting: deque[tuple[_In, asyncio.Future[_Out]]] = deque()
        self._gathered = asyncio.Event()
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop. Askers that still wait get CancelledError."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for _, answer in self._waiting:
            answer.cancel()
        self._waiting.clear()
        await self._drop()

    async def ask(self, item: _In) -> _Out:
        """The answer for `item`, from the next round trip. Raises one of TRY_AGAIN after `patience`."""
        answer: asyncio.Future[_Out] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        self._gathered.set()
        return await answer

    async def _run(self) -> None:
        while True:
            await self._gathered.wait()
            batch = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
            if not self._waiting:
                self._gathered.clear()
            await self._carry(batch)

    async def _carry(self, batch: list[tuple[_In, asyncio.Future[_Out]]]) -> None:
        try:
            _tell(batch, await self._answer([item for item, _ in batch]))
        except Exception as error:  # noqa: BLE001 - belongs to the askers, each of whom gets it
            if len(batch) == 1 or may_try_again(error):
                _refuse(batch, error)
                return
            for one in batch:  # what the database will not take of one must not cost the others
                await self._carry([one])
        except BaseException as error:
            _refuse(batch, error)
            raise

    async def _answer(self, items: Sequence[_In]) -> Sequence[_Out]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience
        repeated = False
        while True:
            try:
                if self._connection is None or self._connection.is_closed():  # by the server, while nobody asked
                    self._connection = await self._connect()
                answers = await self._statement(self._connection, items, repeated)
            except TRY_AGAIN as error:
                if not may_try_again(error):
                    raise
                DATABASE.met(error, self._name)
                await self._drop()
                repeated = True
                if loop.time() + self._pause > deadline:
                    raise
                await asyncio.sleep(self._pause)
            else:
                DATABASE.answered()
                return answers

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()


def _tell(batch: Sequence[tuple[_In, asyncio.Future[_Out]]], answers: Sequence[_Out]) -> None:
    for (_, answer), said in zip(batch, answers, strict=True):
        if not answer.done():
            answer.set_result(said)


def _refuse(batch: Sequence[tuple[_In, asyncio.Future[_Out]]], error: BaseException) -> None:
    """An error belongs to the askers, each of whom gets it; when the lane itself is cancelled, so are they."""
    for _, answer in batch:
        if answer.done():
            continue
        if isinstance(error, Exception):
            answer.set_exception(error)
        else:
            answer.cancel()
