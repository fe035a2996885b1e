"""What an attempt says while it runs: its log and its stream. The runner opens an outlet for each attempt."""

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


class Outlet:
    """Of one attempt."""

    __slots__ = ("log", "stream")

    def __init__(self, log: Written[Recorder], stream: Written[Emissions]) -> None:
        self.log = log
        self.stream = stream

    @property
    def recorder(self) -> Recorder:
        return self.log.buffer


class Outlets:
    """The worker has one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = Lock()  # buffers of all attempts share it: it is held for a moment
        self.logs: ChunkWriter[Recorder, LogChunk] = ChunkWriter(settings, "logs", _log_chunk, logs.append)
        self.streams: ChunkWriter[Emissions, StreamChunk] = ChunkWriter(
            settings, "streams", _stream_chunk, streams.append
        )

    def open(self, claimed: Claimed) -> Outlet:
        settings, lock = self._settings, self._lock
        emissions = Emissions(settings.stream_chunks, settings.stream_bytes, lock)
        recorder = Recorder(settings.job_log_lines, settings.job_log_bytes, lock, stream=emissions)
        return Outlet(self.logs.open(claimed, recorder), self.streams.open(claimed, emissions))

    async def finish(self, outlet: Outlet) -> None:
        """The attempt has ended. Return once its last lines and chunks are written. An attempt without any costs
        nothing.
        """
        for writer, written in ((self.logs, outlet.log), (self.streams, outlet.stream)):
            if written.buffer.used:
                await writer.finish(written)  # type: ignore[arg-type]  # each writer has its own buffers
            else:
                written.buffer.close()


def _log_chunk(claimed: Claimed, first: int, lines: list[bytes]) -> LogChunk:
    lease = claimed.lease
    return LogChunk(lease.task_id, lease.epoch, lease.attempt, first, lines)


def _stream_chunk(claimed: Claimed, first: int, chunks: list[bytes]) -> StreamChunk:
    begins_anew = claimed.lease.epoch > 1 and claimed.was != "waiting"
    return StreamChunk(claimed.lease, first, chunks, restarts=begins_anew and first == 1)
