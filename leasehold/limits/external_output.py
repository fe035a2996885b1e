"""Stores the log lines and stream chunks of external workers, within the bounds of an attempt. What the attempt has
used is counted in its rows: an API process remembers nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from threading import Lock
from typing import Any, Literal

from leasehold.db.database import Connection, unindexed
from leasehold.domain.lease import Lease
from leasehold.settings import Settings
from leasehold.telemetry.attempt_logs import Recorder
from leasehold.telemetry.emissions import Emissions
from leasehold.transitions import logs, streams
from leasehold.transitions.logs import LogChunk
from leasehold.transitions.streams import StreamChunk


@dataclass(frozen=True, slots=True)
class Line:
    """A line of an external worker. `at`: seconds since 1970; None: now."""

    message: str
    level: str = "info"
    logger: str = "external"
    fields: Mapping[str, Any] = field(default_factory=dict)
    traceback: str = ""
    at: float | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """`items`: how many of the request's items are kept. `cut`: the attempt is over its bounds."""

    items: int
    cut: bool


@dataclass(frozen=True, slots=True)
class _Used:
    """What the attempt has used. `attempt`: its number. `is_known`: an earlier request has brought the same items."""

    attempt: int
    items: int
    bytes: int
    cut: bool
    is_known: bool
    known_items: int


def _usage_sql(table: Literal["job_log", "job_stream"], column: Literal["lines", "chunks"], mark: str) -> str:
    """SQL that reads what an attempt has used: one row, or no row if the lease is lost. `mark`: the item, as JSON, that
    is stored where the attempt's output is cut. It does not count as kept.
    """
    return f"""
-- external_{column}
SELECT t.attempt, coalesce(sum(k.n), 0)::int AS items, coalesce(sum(octet_length(k.{column}::text)), 0)::int AS bytes,
       coalesce(bool_or(k.{column} @> '[{mark}]'), false) AS cut,
       coalesce(bool_or(k.first = $4), false) AS is_known,
       coalesce(sum(k.n - (k.{column} @> '[{mark}]')::int) FILTER (WHERE k.first = $4), 0)::int AS known_items
FROM task t LEFT JOIN {table} k ON k.task_id = t.id AND k.epoch = t.epoch
WHERE t.id = $1 AND t.lease_owner = $2 AND t.epoch = $3 AND {unindexed("t.status = 'running'")}
GROUP BY t.attempt
"""


_LINES = _usage_sql("job_log", "lines", '{"logger": "leasehold", "fields": {"cut": true}}')
_CHUNKS = _usage_sql("job_stream", "chunks", '{"cut": true}')


async def log(
    connection: Connection, settings: Settings, lease: Lease, first: int, lines: Sequence[Line]
) -> Kept | None:
    """Keep lines of the attempt. `first`: the number of the first one in its attempt; a request with the same number is
    kept once. Call it in a transaction that has locked the job, as `external.is_late` does: else two requests at once
    may exceed the bounds. None: the lease is lost.
    """
    used = await _read(connection, _LINES, lease, first)
    if used is None or used.is_known or used.cut:
        return _without_writing(used)
    recorder = Recorder(settings.job_log_lines, settings.job_log_bytes, Lock())
    recorder.resume(used.items, used.bytes)
    for line in lines:
        values = asdict(line)
        recorder.add(values.pop("level"), values.pop("logger"), values.pop("message"), trace=values.pop("traceback"),
                     **values)  # fmt: skip
    _, encoded = recorder.take()
    if encoded:
        await logs.append(connection, [LogChunk(lease.task_id, lease.epoch, used.attempt, first, encoded)])
    return Kept(len(encoded) - recorder.is_cut if encoded else 0, recorder.is_cut)


async def emit(
    connection: Connection, settings: Settings, lease: Lease, first: int, chunks: Sequence[Any]
) -> Kept | None:
    """Keep chunks that the attempt emits, as `log` keeps lines. Raises ValueError for a chunk with a NUL character."""
    used = await _read(connection, _CHUNKS, lease, first)
    if used is None or used.is_known or used.cut:
        return _without_writing(used)
    emissions = Emissions(settings.stream_chunks, settings.stream_bytes, Lock())
    emissions.resume(used.items, used.bytes)
    fits = sum(emissions.emit(chunk) for chunk in chunks)
    _, encoded = emissions.take()
    restarts = lease.epoch > 1 and used.items == 0
    await streams.append(connection, [StreamChunk(lease, first, encoded, restarts)])
    return Kept(fits, fits < len(chunks))


async def _read(connection: Connection, statement: str, lease: Lease, first: int) -> _Used | None:
    """What the attempt has used; None: the lease is lost."""
    row = await connection.fetchrow(statement, lease.task_id, lease.owner, lease.epoch, first)
    return None if row is None else _Used(**row)


def _without_writing(used: _Used | None) -> Kept | None:
    return None if used is None else Kept(used.known_items, used.cut)
