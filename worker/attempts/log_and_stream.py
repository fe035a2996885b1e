"""The log and the stream of each attempt. The runner opens both for a new attempt, and finishes both when it ends."""

from __future__ import annotations

from threading import Lock

from leasehold.settings import Settings
from leasehold.telemetry.attempt_logs import Recorder
from leasehold.telemetry.emissions import Emissions
from leasehold.transitions import logs, streams
from leasehold.transitions.claims import Claimed
from leasehold.transitions.logs import LogChunk
from leasehold.transitions.streams import StreamChunk
from leasehold.worker.attempts.chunk_writer import ChunkWriter, Written


class LogAndStream:
    """The buffers of one attempt: the lines that its handler logs, and the chunks that it emits."""

    __slots__ = ("log", "stream")

    def __init__(self, log: Written[Recorder], stream: Written[Emissions]) -> None:
        self.log = log
        self.stream = stream

    @property
    def recorder(self) -> Recorder:
        return self.log.buffer


class LogAndStreamWriters:
    """Opens the buffers of all attempts of this worker, and writes them into the database."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = Lock()  # the buffers of all attempts share this lock; each holds it for a moment
        self.logs: ChunkWriter[Recorder, LogChunk] = ChunkWriter(settings, "logs", _log_chunk, logs.append)
        self.streams: ChunkWriter[Emissions, StreamChunk] = ChunkWriter(
            settings, "streams", _stream_chunk, streams.append
        )

    def open(self, claimed: Claimed) -> LogAndStream:
        settings, lock = self._settings, self._lock
        emissions = Emissions(settings.stream_chunks, settings.stream_bytes, lock)
        recorder = Recorder(settings.job_log_lines, settings.job_log_bytes, lock, stream=emissions)
        return LogAndStream(self.logs.open(claimed, recorder), self.streams.open(claimed, emissions))

    async def finish(self, log_and_stream: LogAndStream) -> None:
        """The attempt has ended: return once PostgreSQL has its last lines and chunks. An attempt that produced none
        costs no statement.
        """
        for writer, written in ((self.logs, log_and_stream.log), (self.streams, log_and_stream.stream)):
            if written.buffer.used:
                await writer.finish(written)  # type: ignore[arg-type]  # each writer has its own buffers
            else:
                written.buffer.close()


def _log_chunk(claimed: Claimed, first_number: int, lines: list[bytes]) -> LogChunk:
    lease = claimed.lease
    return LogChunk(lease.task_id, lease.epoch, lease.attempt, first_number, lines)


def _stream_chunk(claimed: Claimed, first_number: int, chunks: list[bytes]) -> StreamChunk:
    begins_anew = claimed.lease.epoch > 1 and claimed.was != "waiting"
    return StreamChunk(claimed.lease, first_number, chunks, restarts=begins_anew and first_number == 1)
