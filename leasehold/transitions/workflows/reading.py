"""Reads journals. `read_each` reads, from many journals, the parts that a worker needs. `read` reads a whole journal.
`read_signal` reads one further signal.

A workflow's journal has a row (`Entry`) for each call of the workflow's code that waits or has a result: a sleep, a
signal, a step, a run. The place of a row is its branch (one of the coroutines that run at the same time) and its number
in the branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg

from leasehold.db.database import Connection, unindexed
from leasehold.domain.errors import LeaseLost
from leasehold.domain.lease import Lease
from leasehold.transitions.settlements.guard import lease_columns

# SQL: the rows `e` of the journal of the task `t`, as a JSON array. Each element has the fields of `Entry`, in their
# order. Each LIMIT makes PostgreSQL find the row by its key. With plain joins the planner may compare every row with
# every other row. The CASE around `greatest` is needed because `greatest` ignores NULL. Without the CASE, a wait that
# does not end by itself would get 0 seconds, as if it were over. A wait for a run (`result`) never ends by itself,
# because its `due_at` is the end of the run. `contained`: a workflow started the task.
_ENTRIES = """
    SELECT coalesce(jsonb_agg(jsonb_build_array(
        e.branch, e.number, e.kind, e.name, e.state, coalesce(e.value, r.value), e.child_id,
        coalesce(step.status, child.status), coalesce(f.code, child.error ->> 'code'),
        coalesce(f.message, child.error ->> 'message', child.cancel ->> 'reason'),
        CASE WHEN e.kind <> 'result' AND e.due_at IS NOT NULL
             THEN greatest(extract(epoch FROM e.due_at - clock_timestamp()), 0)::float8 END,
        coalesce(step.finished_at, child.finished_at, CASE WHEN e.kind IN ('sleep', 'signal') THEN e.due_at END, e.at))
        ORDER BY e.branch, e.number), '[]')
    FROM {rows}
    LEFT JOIN LATERAL (SELECT * FROM task s WHERE e.kind = 'run' AND s.id = e.child_id LIMIT 1) AS step ON true
    LEFT JOIN LATERAL (
        SELECT * FROM job c WHERE e.kind = 'result' AND c.id = e.child_id AND {of_tenant} LIMIT 1
    ) AS child ON true
    LEFT JOIN LATERAL (
        SELECT r.value FROM result r
        WHERE r.task_id = CASE WHEN step.status = 'succeeded' THEN step.id WHEN child.status = 'succeeded'
            THEN (SELECT o.id FROM task o WHERE o.job_id = child.id AND NOT o.contained) END
        LIMIT 1) AS r ON true
    LEFT JOIN LATERAL (
        SELECT f.code, f.message FROM failure f
        WHERE f.task_id = step.id AND step.status = 'failed' ORDER BY f.epoch DESC LIMIT 1) AS f ON true"""


#: At most `_SIGNALS` signals are read with the journal. A signal is left out if the signals before it together have
#: `_SIGNAL_BYTES` or more, because a client may have sent a thousand large signals, and a workflow mostly needs none of
#: them when it goes on. When a call waits for a signal that was left out, READ_SIGNAL reads this signal.
_SIGNALS, _SIGNAL_BYTES = 16, 64 * 1024
# SQL: the oldest unconsumed signals of the job of task `t`, and whether the job has more of them.
_FIRST_SIGNALS = f"""
    SELECT coalesce(jsonb_agg(jsonb_build_object('id', s.id, 'name', s.name, 'payload', s.payload, 'at', s.at)
                              ORDER BY s.id) FILTER (WHERE s.is_read), '[]') AS signals,
           coalesce(bool_or(NOT s.is_read), false) AS has_more
    FROM (
        SELECT x.*, row_number() OVER earlier <= {_SIGNALS}
                    AND sum(x.bytes) OVER earlier - x.bytes < {_SIGNAL_BYTES} AS is_read
        FROM (SELECT y.*, octet_length(y.payload::text) AS bytes FROM signal y WHERE y.job_id = t.job_id
              ORDER BY y.id LIMIT {_SIGNALS + 1}) AS x
        WINDOW earlier AS (ORDER BY x.id)
    ) AS s"""


def _read(name: str, rows: str) -> str:
    """SQL: a statement that reads journals. `rows`: the SQL that selects, from each journal, the rows `e` to read."""
    return f"""
-- {name}
SELECT a.nth, t.news, coalesce(j.started_at, j.created_at) AS started_at, j.pipeline_version AS version,
    clock_timestamp() AS read_at,
    CASE WHEN j.status = 'cancel_requested' THEN (j.cancel ->> 'at')::timestamptz END AS cancelled_at,
    first_signals.signals, first_signals.has_more AS has_more_signals,
    NOT t.journaled AND EXISTS (SELECT 1 FROM task o WHERE o.job_id = t.job_id AND NOT o.contained AND o.journaled)
        AS is_of_other_step,
    ({_ENTRIES.format(rows=rows, of_tenant=unindexed("c.tenant_id = t.tenant_id"))}) AS entries
FROM unnest($1::uuid[], $2::uuid[], $3::int[]) WITH ORDINALITY AS a(owner, id, epoch, nth)
JOIN task t ON t.id = a.id JOIN job j ON j.id = t.job_id
CROSS JOIN LATERAL ({_FIRST_SIGNALS}) AS first_signals
WHERE t.lease_owner = a.owner AND t.epoch = a.epoch AND {unindexed("t.status = 'running'")}
"""


# $1, $2 and $3: the owners, tasks and epochs of the leases. $4 and $5: the page begins after this place (branch,
# number). $6: the page has at most this many rows.
READ = _read(
    "read_journal",
    "(SELECT * FROM journal x WHERE x.job_id = t.job_id AND (x.branch, x.number) > ($4::text, $5::int)"
    " ORDER BY x.branch, x.number LIMIT $6::int) AS e",
)
#: A journal with at most this many rows is read in one query with other journals. The same holds for the calls that a
#: workflow still waits for, if they are at most this many. The limit bounds the bytes of the answer.
SHORT = 16
#: The most rows of one page of a long journal. If the results of a page do not fit into one JSON value of PostgreSQL,
#: `read` makes the pages smaller. PostgreSQL's limit for such a value is 256 MB in its binary form, in which a number
#: takes 12 bytes.
_PAGE = 200
# $1 to $3: as for READ.
READ_SHORT = _read(
    "read_short_journal",
    f"(SELECT * FROM journal x WHERE x.job_id = t.job_id ORDER BY x.branch, x.number LIMIT {SHORT + 1}) AS e",
)
# $1 to $3: as for READ. $4: for each lease, the places of the calls that the workflow still waits for, {"of": [[branch,
# number]]}.
READ_OPEN = _read(
    "read_open_calls",
    "jsonb_array_elements(($4::jsonb[])[a.nth] -> 'of') AS p(place)"
    " CROSS JOIN LATERAL (SELECT * FROM journal x WHERE x.job_id = t.job_id AND x.branch = p.place ->> 0"
    " AND x.number = (p.place ->> 1)::int LIMIT 1) AS e",
)
# $1, $2 and $3: the owner, task and epoch of the lease. $4: the signal's name. $5: the signal's id is greater than
# this.
READ_SIGNAL = f"""
-- read_signal
SELECT s.id, s.name, s.payload, s.at
FROM task t JOIN signal s ON s.job_id = t.job_id
WHERE t.id = $2 AND t.lease_owner = $1 AND t.epoch = $3 AND {unindexed("t.status = 'running'")}
  AND s.name = $4 AND s.id > $5
ORDER BY s.id LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the journal, with the state of the task or run that the row awaits. `child`: the id of this task or run.

    `kind`: see records.Call. `state`: open | done | failed | timed_out | cancelled, as the workflow recorded it.
    `status`: the state of the task or run; None: the row awaits neither, or the run is deleted. `code` and `message`
    describe the error of the task or run. For a cancelled run, `message` is the reason of the cancel.
    `seconds`: seconds until the wait ends by itself; 0: this time has passed; None: the wait does not end by itself.
    `at`: when the step or run ended, or when the wait ends by itself; in all other cases, when the row was written.
    """

    branch: str
    number: int
    kind: str
    name: str
    state: str
    value: Any
    child: UUID | None
    status: str | None
    code: str | None
    message: str | None
    seconds: float | None
    at: datetime


@dataclass(frozen=True, slots=True)
class StoredSignal:
    """A signal that no wait has consumed."""

    id: int
    name: str
    payload: Any
    at: datetime


@dataclass(frozen=True, slots=True)
class Journal:
    """What a worker has read of a workflow's journal. `entries`: its rows. `news`: how many signals and ends of steps
    have come for the workflow. `suspend` checks whether more have come since this read. `version`: the version of the
    workflow's code when the run was submitted. `read_at`: PostgreSQL's time of the read. `cancelled_at`: when the
    cancel of the run was requested. `is_of_other_step`: this workflow has called nothing yet, but another step of its
    run is a workflow and has made calls. So the journal belongs to that other step. `is_cut`: the journal has more rows
    than were read. `signals`: the oldest signals. `has_more_signals`: further signals came after them.
    """

    news: int
    started_at: datetime
    version: int
    entries: list[Entry]
    signals: list[StoredSignal]
    read_at: datetime
    cancelled_at: datetime | None = None
    is_cut: bool = False
    has_more_signals: bool = False
    is_of_other_step: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """Which rows of a workflow's journal its worker reads. `places`: only the rows at these places (branch, number);
    None: all rows, but a journal with more than SHORT rows is cut (`Journal.is_cut`).
    """

    lease: Lease
    places: Sequence[tuple[str, int]] | None = None


async def read_each(connection: Connection, readings: Sequence[Reading]) -> list[Journal | None]:
    """The journals, in the order of `readings`. An element is None if the lease is not valid."""
    journals: list[Journal | None] = [None] * len(readings)
    # One statement reads all readings without `places`, and another statement the readings with `places`. `nth` of a
    # row is the position of its lease in the statement's arrays, and begins at 1.
    short_indexes = [index for index, reading in enumerate(readings) if reading.places is None]
    if short_indexes:
        leases = lease_columns([readings[index].lease for index in short_indexes])
        for row in await connection.fetch(READ_SHORT, *leases):
            journals[short_indexes[row["nth"] - 1]] = _journal(row, is_cut=len(row["entries"]) > SHORT)
    open_indexes = [index for index, reading in enumerate(readings) if reading.places is not None]
    if open_indexes:
        leases = lease_columns([readings[index].lease for index in open_indexes])
        # Each element is a mapping, because PostgreSQL would read a list of lists as an array of two dimensions.
        places = [{"of": readings[index].places} for index in open_indexes]
        for row in await connection.fetch(READ_OPEN, *leases, places):
            journals[open_indexes[row["nth"] - 1]] = _journal(row)
    return journals


async def read(connection: Connection, lease: Lease, places: Sequence[tuple[str, int]] | None = None) -> Journal:
    """The whole journal of the workflow, for the worker that has its lease. `places`: only the rows at these places.
    The rows are read page by page. If a page is too large for PostgreSQL, the function halves the size of the pages.
    Raises LeaseLost.
    """
    columns = lease_columns([lease])
    journal: Journal | None = None
    size, places_read, last = _PAGE, 0, ("", 0)
    while True:
        try:
            if places is None:
                row = await connection.fetchrow(READ, *columns, *last, size)
            else:
                page_places = {"of": places[places_read : places_read + size]}
                row = await connection.fetchrow(READ_OPEN, *columns, [page_places])
        except asyncpg.ProgramLimitExceededError:
            if size == 1:
                raise
            size //= 2
            continue
        if row is None:
            raise LeaseLost
        page = _journal(row)
        if journal is None:
            journal = page  # its `news` is kept, so signals and ends that come after the first page count as news
        else:
            journal.entries.extend(page.entries)
        places_read += size
        # This is the last page if all `places` are read, or, without `places`, if the page has fewer rows than `size`.
        if places_read >= len(places) if places is not None else len(page.entries) < size:
            return journal
        if page.entries:
            last = page.entries[-1].branch, page.entries[-1].number


async def read_signal(connection: Connection, lease: Lease, name: str, after: int) -> StoredSignal | None:
    """The oldest of the workflow's signals `name` that no wait has consumed and that have an id greater than `after`.
    None: there is no such signal, or the lease is lost.
    """
    row = await connection.fetchrow(READ_SIGNAL, lease.owner, lease.task_id, lease.epoch, name, after)
    return None if row is None else StoredSignal(row["id"], row["name"], row["payload"], row["at"])


def _journal(row: Any, *, is_cut: bool = False) -> Journal:
    # `row`: what READ, READ_SHORT or READ_OPEN returns for one lease
    return Journal(
        is_cut=is_cut,
        news=row["news"],
        started_at=row["started_at"],
        version=row["version"],
        entries=[_entry(values) for values in row["entries"]],
        signals=[
            StoredSignal(signal["id"], signal["name"], signal["payload"], datetime.fromisoformat(signal["at"]))
            for signal in row["signals"]
        ],
        read_at=row["read_at"],
        cancelled_at=row["cancelled_at"],
        has_more_signals=row["has_more_signals"],
        is_of_other_step=row["is_of_other_step"],
    )


def _entry(values: list[Any]) -> Entry:
    branch, number, kind, name, state, value, child, status, code, message, seconds, at = values
    return Entry(
        branch, number, kind, name, state, value, UUID(child) if child else None, status, code, message, seconds,
        datetime.fromisoformat(at),
    )  # fmt: skip
