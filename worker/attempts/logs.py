"""Writes what attempts log into the database: in batches while they run, and the rest before their settlements.

An attempt that logs nothing costs no statement. One that fails, or is killed later, loses nothing that was written: its
settlement waits until its last lines are. All attempts share one connection, which the first line opens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from threading import Lock

import structlog

from leasehold.db.batcher import Batcher
from leasehold.db.database import Connection, connect
from leasehold.settings import Settings
from leasehold.telemetry.attempt_logs import Recorder
from leasehold.transitions import logs
from leasehold.transitions.claims import Claimed
from leasehold.transitions.logs import LogChunk
from leasehold.worker import metrics

log = structlog.get_logger(__name__)

#: The duty's name.
DUTY = "attempt_logs"
#: Between two writes of one attempt's lines.
EVERY_SECONDS = 0.3
#: The most chunks of one statement.
_BATCH = 128
#: The database may be away for any time, as for settlements.
_PATIENCE = float("inf")


class AttemptLog:
    """The log of one attempt: its recorder, and the last write of it that was begun."""

    __slots__ = ("claimed", "recorder", "writing")

    def __init__(self, claimed: Claimed, recorder: Recorder) -> None:
        self.claimed = claimed
        self.recorder = recorder
        self.writing: asyncio.Task[None] | None = None


class AttemptLogs:
    """The worker has one. Make it in the event loop that runs the attempts."""

    def __init__(self, settings: Settings) -> None:
        self._max_lines = settings.job_log_lines
        self._max_bytes = settings.job_log_bytes
        self._lock = Lock()  # recorders of all attempts share it: it is held for a moment
        self._loop = asyncio.get_running_loop()
        self._unwritten: deque[AttemptLog] = deque()
        self._wake = asyncio.Event()
        self._writes: set[asyncio.Task[None]] = set()
        self._batcher: Batcher[LogChunk, None] = Batcher(
            lambda: connect(settings, "logs"), _append, name="logs", at_most=_BATCH, patience=_PATIENCE
        )
        self.start = self._batcher.start

    def open(self, claimed: Claimed) -> AttemptLog:
        """The log of an attempt that begins."""
        attempt_log = AttemptLog(claimed, Recorder(self._max_lines, self._max_bytes, self._lock))
        attempt_log.recorder.on_first = partial(self._note, attempt_log)
        return attempt_log

    def _note(self, attempt_log: AttemptLog) -> None:
        """The attempt has a line that is not written yet. Any thread may call this."""
        self._unwritten.append(attempt_log)
        if not self._wake.is_set():
            self._loop.call_soon_threadsafe(self._wake.set)

    async def turn(self) -> None:
        """Wait for lines, then begin to write them."""
        await self._wake.wait()
        self._wake.clear()
        while self._unwritten:
            self._write(self._unwritten.popleft())

    async def finish(self, attempt_log: AttemptLog) -> None:
        """The attempt has ended: keep no more lines of it. Return once all of them are written."""
        attempt_log.recorder.close()
        self._write(attempt_log)
        if attempt_log.writing is not None:
            await asyncio.shield(attempt_log.writing)

    async def close(self) -> None:
        await self._batcher.close()
        await asyncio.gather(*self._writes, return_exceptions=True)

    def _write(self, attempt_log: AttemptLog) -> None:
        first, lines = attempt_log.recorder.take()
        if not lines:
            return
        lease = attempt_log.claimed.lease
        chunk = LogChunk(lease.task_id, lease.epoch, lease.attempt, first, lines)
        # The batcher writes chunks in the order in which they are added: so the last one is written after all others.
        attempt_log.writing = asyncio.create_task(self._ask(chunk))
        self._writes.add(attempt_log.writing)
        attempt_log.writing.add_done_callback(self._writes.discard)

    async def _ask(self, chunk: LogChunk) -> None:
        """Write the chunk. What PostgreSQL refuses is dropped: a line that cannot be kept must not fail an attempt."""
        try:
            await self._batcher.ask(chunk)
        except Exception as error:  # noqa: BLE001 - whatever it is: it is about the log, and not about the attempt
            metrics.LOG_LINES_LOST.inc(len(chunk.lines))
            log.warning("lines of an attempt are not kept", lines=len(chunk.lines), error=type(error).__name__)


async def _append(
    connection: Connection,
    chunks: Sequence[LogChunk],
    _repeated: bool,  # noqa: FBT001 - the Batcher's signature
) -> Sequence[None]:
    await logs.append(connection, chunks)
    return [None] * len(chunks)
