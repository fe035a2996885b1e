"""Lends connections to a standby of PostgreSQL, and computes how old reads from the standby can be at most.

A standby replays the log (WAL) of the primary. Every second the process makes a note: the length of the primary's WAL,
and the time. When the standby has replayed that length, its reads have everything that was committed before the note.
So a read is at most as old as the newest note that the standby has reached. For this bound, the process needs only its
own clock. The bound also holds while the primary is idle, and while replication stands still. The standby may reach a
note about a second late, because the length includes records that the primary has not written to its disk yet.

Nobody can write through these connections, because PostgreSQL refuses writes on a standby, and this module refuses a
server that is not a standby.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import NamedTuple

import structlog

from leasehold.db.database import Connection, Pool, make_pool
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.settings import Settings
from leasehold.telemetry.meters import counter, gauge

log = structlog.get_logger(__name__)

#: Seconds between two notes.
NOTE_SECONDS = 1.0
#: Seconds between two checks in `caught_up` of how much the standby has replayed.
_POLL_SECONDS = 0.05

LAG = gauge(
    "replica_lag_seconds", "How old reads from the standby are at most. It grows while the standby is away", ["part"]
)
SERVES = gauge("replica_serves", "1 while reads go to the standby; 0 while they go to the primary", ["part"])
READS = counter(
    "replica_reads_total",
    "Reads that may be stale. standby: it answered; primary: the standby was away or too far behind; repeated: the "
    "standby failed during the read or lacked what it was asked for, so the primary answered; fresh: the client wanted "
    "no stale answer",
    ["part", "server"],
)
#: The values of the label `part`: reads of the API's requests, and reads of the exporter.
REQUESTS, EXPORTER = "requests", "exporter"

# The end of the primary's WAL (`position`, in bytes), and its timeline, which each promotion raises. Both are NULL if
# this server is a standby. The system identifier is the same on a primary and on its standbys.
#
# The position is where the next record goes. It is not the end of what the primary has written, because a commit with
# synchronous_commit = off is visible before its record is written.
#
# Exception: the first record of a page goes behind the page's header (24 bytes; 40 at the start of a segment). Until
# this record is written, a standby that has replayed every record is at the start of the page, in front of the header.
# So the position is then the start of the page.
_PRIMARY_POSITION = """
-- replica_primary_place
WITH wal AS MATERIALIZED (
    SELECT CASE WHEN NOT pg_is_in_recovery() THEN (pg_current_wal_insert_lsn() - '0/0')::bigint END AS next_record,
           current_setting('wal_block_size')::bigint AS page,
           pg_size_bytes(current_setting('wal_segment_size')) AS segment
)
SELECT next_record - CASE WHEN next_record % segment = 40 THEN 40 WHEN next_record % page = 24 THEN 24 ELSE 0 END
    AS position, system_identifier,
  CASE WHEN NOT pg_is_in_recovery()
    THEN ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer END AS timeline
FROM wal CROSS JOIN pg_control_system()
"""

# How much of the WAL the standby has replayed (`position`, in bytes; NULL: this server is not a standby), and the
# newest timeline that the standby is known to have reached. pg_stat_wal_receiver has the current timeline, but shows it
# only to some roles. The control file has only the timeline of the last restart point.
_STANDBY_POSITION = """
-- replica_standby_place
SELECT CASE WHEN pg_is_in_recovery() THEN (pg_last_wal_replay_lsn() - '0/0')::bigint END AS position, system_identifier,
  greatest(
    (SELECT received_tli FROM pg_stat_wal_receiver),
    (SELECT timeline_id FROM pg_control_checkpoint()),
    (SELECT min_recovery_end_timeline FROM pg_control_recovery())
  ) AS timeline
FROM pg_control_system()
"""


class _LogPosition(NamedTuple):
    """How far a server is in the WAL, as one of the two statements above returns it."""

    position: int | None
    system_identifier: int
    timeline: int | None

    @property
    def history(self) -> tuple[int, int | None]:
        """Servers with the same history write or replay the same WAL. A promotion begins another history."""
        return self.system_identifier, self.timeline


class ReplicaUnusable(Exception):
    """The standby must not be read now. Clients may see the text."""


class ReplicaBusy(ReplicaUnusable):
    """The standby works, but too many reads wait for a connection to it."""


#: What a read from the standby may raise. The caller then reads the primary instead.
STANDBY_FAILED: tuple[type[BaseException], ...] = (ReplicaUnusable, *TRY_AGAIN)


class Replica:
    """A standby. `pool` leads to the standby (`make_pool(..., replica=True)`), and `primary` leads to the primary."""

    def __init__(self, settings: Settings, pool: Pool, primary: Pool) -> None:
        self._pool, self._primary = pool, primary
        self._max_lag = settings.database_replica_max_lag
        self._host_timeout = settings.database_host_timeout
        self._notes: deque[tuple[float, int]] = deque()  # (monotonic time, length of the primary's WAL in bytes)
        self._history: tuple[int, int | None] | None = None  # of the primary, when it last answered
        #: When `note` last found the standby usable, the standby had every commit before this instant.
        self._as_of = monotonic()
        self._problem = "it was not read yet"

    @property
    def pool(self) -> Pool:
        return self._pool

    @property
    def serves(self) -> bool:
        """Whether reads go to the standby. They do if the last `note` found the standby usable, and no read from the
        standby has failed since.
        """
        return not self._problem

    @property
    def problem(self) -> str:
        """Why reads do not go to the standby; empty: reads go to the standby. Clients may see the text."""
        return self._problem

    async def note(self) -> None:
        """Compare the standby with the primary. A maintenance loop of the process calls this every NOTE_SECONDS.

        Raises an error of TRY_AGAIN if the primary does not answer. If only the standby does not answer, raises
        nothing, and reads go to the primary.
        """
        standby, problem = None, ""
        try:
            async with asyncio.timeout(2 * self._host_timeout):  # once to connect, and once to answer
                standby = await self._position_of(self._pool, _STANDBY_POSITION)
        except TRY_AGAIN as error:
            problem = f"it does not answer: {type(error).__name__}"
        # Read the time before the primary's position, so that the position covers every commit until this instant.
        noted_at = monotonic()
        primary = await self._position_of(self._primary, _PRIMARY_POSITION)
        if primary.position is not None:
            self._history = primary.history
            self._remember(noted_at, primary.position)
        if standby is not None:
            try:
                self._as_of = self._instant_of(standby, primary.position)
            except ReplicaUnusable as error:
                problem = str(error)
        self._record(problem)

    async def check(self, connection: Connection) -> float:
        """The instant, by monotonic(), up to which reads on this connection to the standby see every commit. Raises an
        error of STANDBY_FAILED.
        """
        return self._instant_of(await _ask(connection, _STANDBY_POSITION))

    def leave(self, error: BaseException) -> None:
        """Call this when a read from the standby has failed. Reads go to the primary until the next note."""
        self._record(str(error) if isinstance(error, ReplicaUnusable) else f"a read failed: {type(error).__name__}")

    @asynccontextmanager
    async def caught_up(self, primary: Connection) -> AsyncIterator[Connection]:
        """Wait until the standby has replayed what `primary` has now, and lend a connection to the standby. The
        exporter uses this instead of notes, because the exporter rarely reads. Raises an error of STANDBY_FAILED, at
        the latest after twice `database_host_timeout`: once to connect to the standby, and once to wait for it.
        """
        target = await _ask(primary, _PRIMARY_POSITION)
        async with self._pool.acquire(timeout=self._host_timeout) as connection:
            try:
                async with asyncio.timeout(self._host_timeout):
                    while not await self._has_replayed(connection, target):  # noqa: ASYNC110 - the event is on another machine
                        await asyncio.sleep(_POLL_SECONDS)
                yield connection
            except BaseException:
                connection.terminate()  # otherwise the pool waits for a silent server when it takes the connection back
                raise

    async def _has_replayed(self, connection: Connection, primary: _LogPosition) -> bool:
        standby = await _ask(connection, _STANDBY_POSITION)
        if standby.position is None or primary.position is None or standby.history != primary.history:
            raise ReplicaUnusable("it is not a standby of this primary")
        return standby.position >= primary.position

    async def _position_of(self, pool: Pool, statement: str) -> _LogPosition:
        async with pool.acquire() as connection:
            try:
                return await _ask(connection, statement, self._host_timeout)
            except BaseException:
                connection.terminate()  # as in `caught_up`
                raise

    def _remember(self, now: float, length: int) -> None:
        """Add a note, and drop the notes that are too old for any read. `length`: the length of the primary's WAL."""
        if self._notes and length < self._notes[-1][1]:
            self._notes.clear()  # a new primary, which lacks the end of the old primary's WAL
        self._notes.append((now, length))
        while self._notes[0][0] < now - self._max_lag:
            self._notes.popleft()

    def _instant_of(self, standby: _LogPosition, length: int | None = None) -> float:
        """The instant up to which the standby has every commit, which is the time of the newest note that it has
        reached. `length`: the length of the primary's WAL; None: it is not known. This length was read after `standby`,
        so a standby of this primary never has more than this length. Raises ReplicaUnusable.
        """
        position = standby.position
        if position is None:
            raise ReplicaUnusable("it takes writes, so it is not a standby")
        if standby.history != self._history or (length is not None and position > length):
            raise ReplicaUnusable("it follows another primary, or has not reached the last promotion yet")
        noted_at = next((at for at, noted_length in reversed(self._notes) if noted_length <= position), None)
        if noted_at is None or monotonic() - noted_at > self._max_lag:
            raise ReplicaUnusable("it is too far behind")
        return noted_at

    def _record(self, problem: str) -> None:
        """Store the problem (empty: the standby is usable), set the metrics, and log when the standby becomes usable or
        unusable.
        """
        LAG.labels(REQUESTS).set(round(monotonic() - self._as_of, 3))
        SERVES.labels(REQUESTS).set(not problem)
        if self._problem and not problem:
            log.info("reads that may be stale go to the standby")
        elif problem and not self._problem:
            log.warning("reads that may be stale go to the primary", standby=problem)
        self._problem = problem


async def _ask(connection: Connection, statement: str, timeout: float | None = None) -> _LogPosition:
    row = await connection.fetchrow(statement, timeout=timeout)
    assert row is not None
    return _LogPosition(**row)


@asynccontextmanager
async def open_replica(settings: Settings, name: str, size: int, primary: Pool) -> AsyncIterator[Replica | None]:
    """Lend the standby to the block, with a pool of at most `size` connections. Yields None if the settings name no
    standby. The opening of the pool makes no connection.
    """
    if not settings.database_replica_url.get_secret_value():
        yield None
        return
    pool = await make_pool(settings, f"{name} replica", size, replica=True)
    try:
        yield Replica(settings, pool, primary)
    finally:
        pool.terminate()
