"""Writes the items of attempts into the database. An item is a log line, or a value that a handler emits to its job's
stream. A chunk is the items of one attempt that are written together.

While an attempt runs, its new items are written every EVERY_SECONDS. The last items are written before the attempt's
settlement (the write of how it ended).

An attempt that produces nothing costs no statement. The settlement of an attempt waits until the attempt's last chunk
is written. So a settled attempt has all its items, except those that PostgreSQL refused. A killed attempt loses at most
the items since the last write. All attempts share one connection for log lines and one for emitted items. Each
connection opens when its first chunk is written.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

import structlog

from leasehold.db.batcher import Batcher
from leasehold.db.database import Connection, connect
from leasehold.settings import Settings
from leasehold.transitions.claims import Claimed
from leasehold.worker import metrics

log = structlog.get_logger(__name__)

#: Seconds between two writes of the items of one attempt.
EVERY_SECONDS = 0.2
#: The most chunks in one statement.
_BATCH = 128
#: The most seconds that a write waits while the database is away: no limit. A settlement has no limit either.
_PATIENCE = float("inf")


class Buffer(Protocol):
    """The items that an attempt has produced and that are not yet being written. The buffer calls `on_first` each time
    that it is empty and gets an item.
    """

    on_first: Callable[[], None] | None

    def take(self) -> tuple[int, list[bytes]]:
        """Remove all items. Returns the number of the first one, and the items."""

    def close(self) -> None: ...


_Buffer = TypeVar("_Buffer", bound=Buffer)
_Chunk = TypeVar("_Chunk")  # a chunk in the form that the statement of its table needs


class AttemptBuffer(Generic[_Buffer]):
    """The buffer of one attempt. `writing`: the write of this buffer that began last."""

    __slots__ = ("buffer", "claimed", "writing")

    def __init__(self, claimed: Claimed, buffer: _Buffer) -> None:
        self.claimed = claimed
        self.buffer = buffer
        self.writing: asyncio.Task[None] | None = None


class ChunkWriter(Generic[_Buffer, _Chunk]):
    """Writes one sort of item for all attempts of the worker. Create it in the event loop that runs the attempts.

    `name`: the name of the connection and of the periodic task, and the metric's label. `chunk_of(claimed,
    first_number, items)`: makes the chunk that `append` writes; `first_number` is the number of the first item.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        chunk_of: Callable[[Claimed, int, list[bytes]], _Chunk],
        append: Callable[[Connection, Sequence[_Chunk]], Awaitable[None]],
    ) -> None:
        self.name = name
        self._chunk_of = chunk_of
        self._loop = asyncio.get_running_loop()
        self._unwritten: deque[AttemptBuffer[_Buffer]] = deque()
        self._wake = asyncio.Event()
        self._writes: set[asyncio.Task[None]] = set()

        async def write(
            connection: Connection,
            chunks: Sequence[_Chunk],
            _repeated: bool,  # noqa: FBT001 - the Batcher's signature
        ) -> Sequence[None]:
            await append(connection, chunks)
            return [None] * len(chunks)

        self._batcher: Batcher[_Chunk, None] = Batcher(
            lambda: connect(settings, name),
            write,
            name=name,
            at_most=_BATCH,
            patience=_PATIENCE,
            sets_aside=True,  # a chunk that takes too long is written apart, so that it delays no other job's chunks
        )
        self.start = self._batcher.start

    def open(self, claimed: Claimed, buffer: _Buffer) -> AttemptBuffer[_Buffer]:
        """From now on, write the items that the attempt puts into `buffer`."""
        attempt = AttemptBuffer(claimed, buffer)
        buffer.on_first = partial(self._enqueue, attempt)
        return attempt

    def _enqueue(self, attempt: AttemptBuffer[_Buffer]) -> None:
        """Remember that this attempt's buffer has unwritten items. Any thread may call this.

        This method first appends the buffer, and then checks the event. `turn` first clears the event, and then empties
        the queue. So either the current turn takes the buffer, or the event is set for the next turn.
        """
        self._unwritten.append(attempt)
        if not self._wake.is_set():
            self._loop.call_soon_threadsafe(self._wake.set)

    async def turn(self) -> None:
        """Wait until a buffer has items, then begin to write all buffers that have items."""
        await self._wake.wait()
        self._wake.clear()
        while self._unwritten:
            self._begin_write(self._unwritten.popleft())

    async def finish(self, attempt: AttemptBuffer[_Buffer]) -> None:
        """End the writing for an attempt that has ended. Returns once all its items are written, or dropped because
        PostgreSQL refused them.
        """
        attempt.buffer.close()
        self._begin_write(attempt)
        if attempt.writing is not None:
            await asyncio.shield(attempt.writing)

    async def close(self) -> None:
        """End the writing. Items that are not in the database by now are lost, and a metric counts them."""
        await self._batcher.close()
        while self._unwritten:
            # The closed batcher refuses the chunk, and `_count_lost` counts its items.
            self._begin_write(self._unwritten.popleft())
        await asyncio.gather(*self._writes, return_exceptions=True)

    def _begin_write(self, attempt: AttemptBuffer[_Buffer]) -> None:
        """Begin to write the items of the attempt's buffer, if it has any."""
        attempt.writing = asyncio.create_task(self._write(attempt, attempt.writing))
        self._writes.add(attempt.writing)
        attempt.writing.add_done_callback(self._writes.discard)

    async def _write(self, attempt: AttemptBuffer[_Buffer], earlier: asyncio.Task[None] | None) -> None:
        """Wait until the attempt's `earlier` write has ended. Then write the items that the buffer has by then.

        So the chunks of an attempt are written in their order, and the last write ends last. The batcher alone does not
        keep the order, because it sets a chunk aside if another transaction has locked the job.
        """
        if earlier is not None:
            await asyncio.wait([earlier])
        first_number, items = attempt.buffer.take()
        if items:
            await self._write_chunk(self._chunk_of(attempt.claimed, first_number, items), len(items))

    async def _write_chunk(self, chunk: _Chunk, items: int) -> None:
        """Write the chunk. If PostgreSQL refuses the chunk, drop it, because an item that cannot be stored must not
        fail its attempt.
        """
        try:
            await self._batcher.ask(chunk)
        except asyncio.CancelledError:  # only `close` cancels a write
            self._count_lost(items, "the worker ended before PostgreSQL had them")
            raise
        except Exception as error:  # noqa: BLE001 - no error of a chunk, of whatever kind, may fail the attempt
            self._count_lost(items, "PostgreSQL refused them", error=type(error).__name__)

    def _count_lost(self, items: int, reason: str, **fields: str) -> None:
        metrics.LOST_ITEMS.labels(self.name).inc(items)
        log.warning("items of an attempt are lost", reason=reason, kind=self.name, items=items, **fields)
