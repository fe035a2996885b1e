"""Stores the log lines and stream chunks of external workers, within the bounds of an attempt. The API's endpoints for
external workers call this module. PostgreSQL counts how much the attempt has stored already, because the requests of an
attempt may reach different API processes.
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
    """A log line of an external worker. `at`: seconds since 1970; None: now."""

    message: str
    level: str = "info"
    logger: str = "external"
    fields: Mapping[str, Any] = field(default_factory=dict)
    traceback: str = ""
    at: float | None = None


@dataclass(frozen=True, slots=True)
class StoredItems:
    """The outcome of a request. `items`: how many of the request's items are stored. `cut`: whether the attempt has
    reached its bounds; if so, no more of its items are stored.
    """

    items: int
    cut: bool


@dataclass(frozen=True, slots=True)
class _Usage:
    """How much the attempt has stored. `attempt`: the attempt's number. `cut`: whether the attempt has reached its
    bounds. `is_known`: whether a stored row has the same `first` (the number of its first item) as this request; if so,
    the request was stored before. `known_items`: how many items that row has, without the mark of a cut (see
    `_usage_sql`).
    """

    attempt: int
    items: int
    bytes: int
    cut: bool
    is_known: bool
    known_items: int


def _usage_sql(table: Literal["job_log", "job_stream"], column: Literal["lines", "chunks"]) -> str:
    """SQL that reads how much an attempt has stored. $1 to $3: the lease; $4: `first` of the request. The result is one
    row, or no row if the lease is lost. Each row of `stored` has `n` items of the attempt in a JSON array, the column
    `column`. The item at the place where the attempt's output is cut has the member `cut` (the mark). The mark does not
    count as a stored item.
    """
    is_cut = f"""stored.{column} @> '[{{"cut": true}}]'"""
    return f"""
-- external_{column}
SELECT t.attempt, coalesce(sum(stored.n), 0)::int AS items,
       coalesce(sum(octet_length(stored.{column}::text)), 0)::int AS bytes,
       coalesce(bool_or({is_cut}), false) AS cut,
       coalesce(bool_or(stored.first = $4), false) AS is_known,
       coalesce(sum(stored.n - ({is_cut})::int) FILTER (WHERE stored.first = $4), 0)::int AS known_items
FROM task t LEFT JOIN {table} stored ON stored.task_id = t.id AND stored.epoch = t.epoch
WHERE t.id = $1 AND t.lease_owner = $2 AND t.epoch = $3 AND {unindexed("t.status = 'running'")}
GROUP BY t.attempt
"""


_LINES = _usage_sql("job_log", "lines")
_CHUNKS = _usage_sql("job_stream", "chunks")


async def log(
    connection: Connection, settings: Settings, lease: Lease, first: int, lines: Sequence[Line]
) -> StoredItems | None:
    """Store lines of the attempt. `first`: the number of the first of these lines within the attempt. A later request
    with the same number is a repetition, and stores nothing. Call this in a transaction that has locked the job (as
    `external.lock` does), because two requests at once could otherwise exceed the bounds. Returns None if the lease is
    lost.
    """
    usage = await _read_usage(connection, _LINES, lease, first)
    if usage is None or usage.is_known or usage.cut:
        return _outcome_without_write(usage)
    recorder = Recorder(settings.job_log_lines, settings.job_log_bytes, Lock())
    recorder.resume(usage.items, usage.bytes)
    for line in lines:
        values = asdict(line)
        recorder.add(values.pop("level"), values.pop("logger"), values.pop("message"), trace=values.pop("traceback"),
                     **values)  # fmt: skip
    _, encoded = recorder.take()
    if not encoded:
        return StoredItems(0, recorder.is_cut)
    await logs.append(connection, [LogChunk(lease.task_id, lease.epoch, usage.attempt, first, encoded)])
    marks = 1 if recorder.is_cut else 0  # the last encoded line is then the mark of the cut
    return StoredItems(len(encoded) - marks, recorder.is_cut)


async def emit(
    connection: Connection, settings: Settings, lease: Lease, first: int, chunks: Sequence[Any]
) -> StoredItems | None:
    """Store chunks that the attempt emits, in the same way as `log` stores lines. Raises ValueError for a chunk that
    has a NUL character.
    """
    usage = await _read_usage(connection, _CHUNKS, lease, first)
    if usage is None or usage.is_known or usage.cut:
        return _outcome_without_write(usage)
    emissions = Emissions(settings.stream_chunks, settings.stream_bytes, Lock())
    emissions.resume(usage.items, usage.bytes)
    stored_count = sum(emissions.emit(chunk) for chunk in chunks)
    _, encoded = emissions.take()
    # `restarts`: an attempt after the first begins the step's stream again.
    await streams.append(connection, [StreamChunk(lease, first, encoded, restarts=lease.epoch > 1)])
    return StoredItems(stored_count, stored_count < len(chunks))


async def _read_usage(connection: Connection, statement: str, lease: Lease, first: int) -> _Usage | None:
    """How much the attempt has stored; None: the lease is lost."""
    row = await connection.fetchrow(statement, lease.task_id, lease.owner, lease.epoch, first)
    return None if row is None else _Usage(**row)


def _outcome_without_write(usage: _Usage | None) -> StoredItems | None:
    return None if usage is None else StoredItems(usage.known_items, usage.cut)
