"""Stores the log lines and stream chunks of external workers, within the bounds of an attempt. The endpoints of
external workers call it. PostgreSQL counts how much the attempt has stored already, because its requests may reach
different API processes.
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
class StoredItems:
    """The outcome of a request. `items`: how many of its items are stored. `cut`: the attempt is over its bounds."""

    items: int
    cut: bool


@dataclass(frozen=True, slots=True)
class _Used:
    """How much the attempt has stored. `attempt`: its number. `is_known`: this request was stored before: a stored row
    has the same first number. `known_items`: how many items that row has, without the mark of a cut.
    """

    attempt: int
    items: int
    bytes: int
    cut: bool
    is_known: bool
    known_items: int


def _usage_sql(table: Literal["job_log", "job_stream"], column: Literal["lines", "chunks"], mark: str) -> str:
    """SQL that reads how much an attempt has stored: one row, or no row if the lease is lost. `mark`: the item, as
    JSON, that is stored at the place where the attempt's output is cut. The mark does not count as a stored item.
    """
    return f"""
-- external_{column}
SELECT t.attempt, coalesce(sum(stored.n), 0)::int AS items,
       coalesce(sum(octet_length(stored.{column}::text)), 0)::int AS bytes,
       coalesce(bool_or(stored.{column} @> '[{mark}]'), false) AS cut,
       coalesce(bool_or(stored.first = $4), false) AS is_known,
       coalesce(sum(stored.n - (stored.{column} @> '[{mark}]')::int) FILTER (WHERE stored.first = $4), 0)::int
         AS known_items
FROM task t LEFT JOIN {table} stored ON stored.task_id = t.id AND stored.epoch = t.epoch
WHERE t.id = $1 AND t.lease_owner = $2 AND t.epoch = $3 AND {unindexed("t.status = 'running'")}
GROUP BY t.attempt
"""


_LINES = _usage_sql("job_log", "lines", '{"logger": "leasehold", "fields": {"cut": true}}')
_CHUNKS = _usage_sql("job_stream", "chunks", '{"cut": true}')


async def log(
    connection: Connection, settings: Settings, lease: Lease, first: int, lines: Sequence[Line]
) -> StoredItems | None:
    """Store lines of the attempt. `first`: the number of the first line within the attempt; two requests with the same
    number are stored once. Call this in a transaction that has locked the job, as `external.is_late` does: else two
    requests at once may exceed the bounds. None: the lease is lost.
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
    if not encoded:
        return StoredItems(0, recorder.is_cut)
    await logs.append(connection, [LogChunk(lease.task_id, lease.epoch, used.attempt, first, encoded)])
    mark = 1 if recorder.is_cut else 0  # the last encoded line
    return StoredItems(len(encoded) - mark, recorder.is_cut)


async def emit(
    connection: Connection, settings: Settings, lease: Lease, first: int, chunks: Sequence[Any]
) -> StoredItems | None:
    """Store chunks that the attempt emits, as `log` stores lines. Raises ValueError if a chunk has a NUL character."""
    used = await _read(connection, _CHUNKS, lease, first)
    if used is None or used.is_known or used.cut:
        return _without_writing(used)
    emissions = Emissions(settings.stream_chunks, settings.stream_bytes, Lock())
    emissions.resume(used.items, used.bytes)
    fitting = sum(emissions.emit(chunk) for chunk in chunks)
    _, encoded = emissions.take()
    restarts = lease.epoch > 1 and used.items == 0  # a later attempt's first chunk begins the step's stream again
    await streams.append(connection, [StreamChunk(lease, first, encoded, restarts)])
    return StoredItems(fitting, fitting < len(chunks))


async def _read(connection: Connection, statement: str, lease: Lease, first: int) -> _Used | None:
    """How much the attempt has stored; None: the lease is lost."""
    row = await connection.fetchrow(statement, lease.task_id, lease.owner, lease.epoch, first)
    return None if row is None else _Used(**row)


def _without_writing(used: _Used | None) -> StoredItems | None:
    return None if used is None else StoredItems(used.known_items, used.cut)
