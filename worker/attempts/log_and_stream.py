"""Collects the log of each attempt, and its stream (the values that its handler emits), and writes them into the
database. The runner opens both for a new attempt, and finishes them at the attempt's end.

Most attempts log and emit nothing. So an attempt has no buffers until its first line or value.
"""

from __future__ import annotations

from threading import Lock

from leasehold.settings import Settings
from leasehold.telemetry.attempt_logs import Recorder
from leasehold.telemetry.emissions import Emissions
from leasehold.transitions import logs, streams
from leasehold.transitions.claims import Claimed
from leasehold.transitions.logs import LogChunk
from leasehold.transitions.streams import StreamChunk
from leasehold.worker.attempts.chunk_writer import AttemptBuffer, ChunkWriter


class LogAndStream:
    """The buffers of one attempt: the lines that its handler logs, and the values that it emits. Functions that log and
    emit find the attempt's `recorder` here (the Protocol `Source` of leasehold.telemetry.attempt_logs).
    """

    __slots__ = ("_claimed", "_closed", "_writers", "log", "stream")

    def __init__(self, writers: LogAndStreamWriters, claimed: Claimed) -> None:
        self._writers = writers
        self._claimed = claimed
        self._closed = False
        self.log: AttemptBuffer[Recorder] | None = None
        self.stream: AttemptBuffer[Emissions] | None = None

    @property
    def recorder(self) -> Recorder:
        """The recorder of the attempt's lines. Any thread may read this. The first read makes the buffers."""
        if self.log is None:
            with self._writers.lock:
                if self.log is None:
                    self.stream, self.log = self._writers.make(self._claimed)
                    if self._closed:  # the caller is a thread that outlived its attempt: its lines are dropped
                        self.log.buffer.close()
                        self.stream.buffer.close()
        return self.log.buffer

    def close(self) -> bool:
        """Record that the attempt has ended. Returns whether the attempt has buffers."""
        with self._writers.lock:
            self._closed = True
            return self.log is not None


class LogAndStreamWriters:
    """Opens the buffers of all attempts of this worker, and writes them into the database."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.lock = Lock()  # held while an attempt makes its buffers; one lock for all attempts
        self._buffer_lock = Lock()  # held while the contents of a buffer change; one lock for all attempts
        self.logs: ChunkWriter[Recorder, LogChunk] = ChunkWriter(settings, "logs", _log_chunk, logs.append)
        self.streams: ChunkWriter[Emissions, StreamChunk] = ChunkWriter(
            settings, "streams", _stream_chunk, streams.append
        )

    def open(self, claimed: Claimed) -> LogAndStream:
        return LogAndStream(self, claimed)

    def make(self, claimed: Claimed) -> tuple[AttemptBuffer[Emissions], AttemptBuffer[Recorder]]:
        """The buffers of the attempt: for its stream, and for its log."""
        settings, lock = self._settings, self._buffer_lock
        emissions = Emissions(settings.stream_chunks, settings.stream_bytes, lock)
        recorder = Recorder(settings.job_log_lines, settings.job_log_bytes, lock, stream=emissions)
        return self.streams.open(claimed, emissions), self.logs.open(claimed, recorder)

    async def finish(self, log_and_stream: LogAndStream) -> None:
        """Write the last lines and values of an attempt that has ended, and return once PostgreSQL has them. An attempt
        without lines and values costs no statement.
        """
        if log_and_stream.close() and log_and_stream.log is not None and log_and_stream.stream is not None:
            await self.logs.finish(log_and_stream.log)
            await self.streams.finish(log_and_stream.stream)


def _log_chunk(claimed: Claimed, first_number: int, lines: list[bytes]) -> LogChunk:
    lease = claimed.lease
    return LogChunk(lease.task_id, lease.epoch, lease.attempt, first_number, lines)


def _stream_chunk(claimed: Claimed, first_number: int, chunks: list[bytes]) -> StreamChunk:
    # The task's first attempt (epoch 1) begins the stream. An attempt after a snooze or a suspension (`waiting`)
    # continues the stream, and any other later attempt begins it again. Exception: an attempt after `waiting` also
    # begins it again if an attempt has failed since the last chunk. The statement of `streams.append` finds this case.
    begins_again = claimed.lease.epoch > 1 and claimed.previous_state != "waiting"
    return StreamChunk(claimed.lease, first_number, chunks, restarts=begins_again)
