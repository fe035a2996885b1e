"""The connection of an app to its installation. `Link` is its interface. `DatabaseLink` connects to PostgreSQL and the
broker. (`HttpLink`, in another module, connects to the API.)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol, TypeVar
from uuid import UUID

import asyncpg

from leasehold.app.calls import Call
from leasehold.app.chunks import AT_MOST, PAUSE_SECONDS, Chunks, chunks_of
from leasehold.app.endings import Endings
from leasehold.app.logging import log_to_the_program
from leasehold.app.results import OUTPUT, missing_result
from leasehold.app.writing import Written, write, write_plain
from leasehold.broker import open_broker
from leasehold.broker.announcer import Announcer, announcing
from leasehold.broker.base import Broker
from leasehold.db import celery_ids, log_reads
from leasehold.db.database import Connection, Pool, make_pool
from leasehold.db.log_reads import ENDED, LogFilter
from leasehold.db.pool_sizes import pool_of_app
from leasehold.domain.errors import Conflict, Invalid, NotFound, Unanswered, Unreachable
from leasehold.domain.template import encoded_payload
from leasehold.runtime.gather import check_not_cancelled
from leasehold.runtime.transient import TRY_AGAIN, may_try_again, until_answered
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.telemetry.outages import DATABASE
from leasehold.transitions import concurrency, jobs
from leasehold.transitions.workflows import signals
from leasehold.urls import check_urls

T = TypeVar("T")  # what `work`, the argument of `_repeat_while_away`, returns

#: Seconds for which hints (messages that tell workers of new work) wait for a connection to the broker after a commit.
#: After that time a worker's relay sends them.
_BROKER_SECONDS = 1.0
#: Seconds before a request that PostgreSQL did not answer is repeated.
_PAUSE_SECONDS = 0.2
#: Seconds that the first read of `wait` may take, even if the timeout of the wait is shorter. So `wait(0)` can find out
#: whether the run has ended.
_READ_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The state of a run. `error`: code and message, if the run ended without success. `value`: what the task returned,
    encoded (results.py), if the run has succeeded. A large result is stored as an output. Then `value` only names the
    output, and `large` is the result's JSON.
    """

    status: str
    ended: bool
    error: tuple[str, str] | None = None
    value: Any = None
    large: bytes | None = None


class Link(Protocol):
    """Submits calls, and follows their runs. Each method reaches only runs of the link's tenant. When PostgreSQL does
    not answer for `submit_seconds`, `submit` of a DatabaseLink raises Unanswered, and its other methods raise
    Unreachable. An HttpLink raises Unavailable when the API does not answer.
    """

    async def submit(self, calls: Sequence[Call[Any]]) -> list[UUID]: ...
    async def find(self, celery_id: str) -> UUID | None: ...
    async def wait(self, run_id: UUID, seconds: float | None) -> bool: ...
    async def outcome(self, run_id: UUID) -> Outcome: ...
    async def cancel(self, run_id: UUID, reason: str) -> str: ...
    async def signal(self, run_id: UUID, name: str, payload: Any) -> None: ...
    async def chunks(self, run_id: UUID, after: int) -> Chunks: ...


# $1: the run's id. $2: its tenant. $3: the name of the task's only step. $4: the name of the output that holds a large
# result.
_OUTCOME = """
-- app_outcome
SELECT j.status, j.error, j.cancel, j.finished_at IS NOT NULL AS ended, r.value, o.key, o.sha256
FROM job j
LEFT JOIN task t ON t.job_id = j.id AND t.step = $3
LEFT JOIN result r ON r.task_id = t.id
LEFT JOIN output o ON o.task_id = t.id AND o.name = $4
WHERE j.id = $1 AND j.tenant_id = $2
"""


class DatabaseLink:
    """Writes runs to PostgreSQL and announces them through the broker, as the API does. The program is trusted. It may
    name any tenant, and no rate limit or quota applies to it. Concurrency limits apply to its runs as to all other
    runs.
    """

    def __init__(self, settings: Settings, tenant: str, pool: Pool, broker: Broker, announcer: Announcer) -> None:
        self._settings = settings
        self._tenant = tenant
        self._pool = pool
        self._broker = broker
        self._announcer = announcer
        self._endings = Endings(pool)
        self._store: ObjectStore | None = None
        self._store_lock = asyncio.Lock()
        self._announcing: set[asyncio.Task[None]] = set()  # asyncio tasks that run `_announce`

    @classmethod
    @asynccontextmanager
    async def opened(cls, settings: Settings, tenant: str) -> AsyncIterator[DatabaseLink]:
        """Make a link, which connects when it is first used. So this succeeds even if no server answers. Raises
        BadSetting for a URL that cannot be used.
        """
        check_urls(settings)
        log_to_the_program()  # the platform's log lines go to the program's own logging
        async with AsyncExitStack() as stack:
            pool = await make_pool(settings, "app", pool_of_app(settings))
            stack.callback(pool.terminate)
            broker = await stack.enter_async_context(open_broker(settings))
            announcer = await stack.enter_async_context(announcing(broker, pool))
            link = cls(settings, tenant, pool, broker, announcer)
            stack.push_async_callback(link._close)
            yield link

    async def submit(self, calls: Sequence[Call[Any]]) -> list[UUID]:
        """Write all runs or none. Returns their ids. If PostgreSQL does not answer, try again for `submit_seconds`.

        After that time, raises Unanswered, which means that the runs may or may not have been written. Raises Invalid,
        and Conflict for an id that another run has.
        """
        if len(calls) > self._settings.batch_max_tasks:
            limit = self._settings.batch_max_tasks
            raise Invalid("batch_too_large", f"At most {limit} runs are submitted at once, not {len(calls)}.")
        deadline = monotonic() + self._settings.submit_seconds
        # The id of a call -> the id of its run, for the runs that an earlier try or submission has written. Several
        # calls with the same debounce key have the same run.
        earlier_ids: dict[UUID, UUID] = {}
        written: Written | None = None
        # Each iteration of this loop tries to write the runs that do not exist yet. If some of these runs exist after
        # all, `_write_or_find` writes nothing, and the next iteration leaves them out.
        while written is None:
            new_calls = [call for call in calls if call.run_id not in earlier_ids]
            try:
                written, earlier_ids = await self._write_or_find(new_calls, calls, earlier_ids)
            except TRY_AGAIN as error:
                check_not_cancelled()
                if not may_try_again(error):
                    raise
                if monotonic() + _PAUSE_SECONDS > deadline:
                    raise Unanswered([call.run_id for call in calls], self._settings.submit_seconds) from error
                await asyncio.sleep(_PAUSE_SECONDS)
        self.announce_soon(written)
        ids = earlier_ids | dict(zip((call.run_id for call in new_calls), written.ids, strict=True))
        return [ids[call.run_id] for call in calls]

    async def _write_or_find(
        self, new_calls: Sequence[Call[Any]], calls: Sequence[Call[Any]], earlier_ids: dict[UUID, UUID]
    ) -> tuple[Written | None, dict[UUID, UUID]]:
        """Write the runs of `new_calls`. These are the calls of `calls` whose ids are not in `earlier_ids`. Returns
        what was written, and `earlier_ids`.

        If some of these runs exist, write nothing. Return None and the new `earlier_ids`. The next try leaves their
        calls out. The existing runs were written by an earlier submission with the same ids, or by an earlier try of
        this submission, whose answer was lost. Raises Conflict for an id that another run has.
        """
        try:
            return await self._write(new_calls), earlier_ids
        except asyncpg.UniqueViolationError as error:
            stored_ids = await self._ids_written_earlier(calls)
            # A run with one of the ids exists. If the tenant has no further run to leave out, the run belongs to
            # another tenant.
            if not stored_ids.keys() - earlier_ids.keys():
                raise Conflict("run_exists", "Another run has one of these ids.") from error
            return None, stored_ids

    async def _write(self, calls: Sequence[Call[Any]]) -> Written:
        keep_seconds = self._settings.retention_days * 86_400
        async with self._pool.acquire() as connection:
            if (written := await write_plain(connection, calls, self._tenant, keep_seconds)) is not None:
                return written
            # Nothing is written yet, because `write_plain` writes only a single call without a key, a Celery id, a
            # debounce or a limit.
            async with connection.transaction():
                return await write(connection, calls, self._tenant, keep_seconds)

    async def _ids_written_earlier(self, calls: Sequence[Call[Any]]) -> dict[UUID, UUID]:
        """The id of a call -> the id of its run, for the calls whose run exists already. Several calls with the same
        debounce key have one run, which has the id of the first of these calls. Raises Conflict if a run of another
        task has one of the ids.
        """
        first_ids: dict[tuple[str, str], UUID] = {}  # (task, debounce key) -> id of the first call
        # The id of a call -> the id that its run has if the run exists.
        run_ids = {call.run_id: call.run_id for call in calls}
        for call in calls:
            if call.debounce_key is not None:
                first_id = first_ids.setdefault((call.task.name, call.debounce_key), call.run_id)
                run_ids[call.run_id] = first_id
        async with self._pool.acquire() as connection:
            rows = await connection.fetch(
                "SELECT id, pipeline FROM job WHERE id = ANY($1::uuid[]) AND tenant_id = $2",
                list(run_ids),
                self._tenant,
            )
        stored_tasks = {row["id"]: row["pipeline"] for row in rows}
        if any(stored_tasks.get(call.run_id) not in (None, call.task.name) for call in calls):
            raise Conflict("run_exists", "Another run has one of these ids.")
        return {call_id: run_id for call_id, run_id in run_ids.items() if run_id in stored_tasks}

    async def find(self, celery_id: str) -> UUID | None:
        """The run with this Celery id, or None. Raises Unreachable."""

        async def read() -> UUID | None:
            async with self._pool.acquire() as connection:
                return await celery_ids.find(connection, self._tenant, celery_id)

        return await self._repeat_while_away(celery_id, read)

    def announce_soon(self, written: Written) -> None:
        """Announce a commit in the background. If the broker is connected, announce the commit's hints immediately."""
        if self._broker.connected:
            self._announcer.announce(written.hints)
            written.hints = []
        if not written.hints and not written.limits:
            return  # nothing is left to do, so make no asyncio task
        task = asyncio.create_task(self._announce(written))
        self._announcing.add(task)
        task.add_done_callback(self._announcing.discard)

    async def _announce(self, written: Written) -> None:
        """Publish the hints of a commit. Then admit runs that wait at the commit's concurrency limits, as many as the
        limits have room for. If this process cannot publish or admit, workers do so a little later.
        """
        if written.hints:
            deadline = monotonic() + _BROKER_SECONDS
            while not self._broker.connected and monotonic() < deadline:  # noqa: ASYNC110 - a broker offers no event
                await asyncio.sleep(0.005)
            self._announcer.announce(written.hints)
        if written.limits:
            try:
                async with self._pool.acquire() as connection:
                    hints = await concurrency.admit(connection, written.limits, ended=())
                self._announcer.announce(hints)
            except TRY_AGAIN as error:
                DATABASE.record_error(error, "admitting runs")

    async def wait(self, run_id: UUID, seconds: float | None) -> bool:
        """Whether the run ended within `seconds`. If `seconds` is None, wait without a limit. Raises NotFound. If
        PostgreSQL does not answer the first read, raises Unreachable after `submit_seconds`, or returns False if
        `seconds` pass first. An outage that begins later raises no error, and the wait goes on, up to `seconds`.
        """
        deadline = None if seconds is None else monotonic() + seconds
        try:
            async with asyncio.timeout(None if seconds is None else max(seconds, _READ_SECONDS)):
                row = await self._row_of(run_id)
        except TimeoutError:
            return False
        remaining_seconds = None if deadline is None else max(deadline - monotonic(), 0.0)
        return row["ended"] or await self._endings.wait(run_id, remaining_seconds)

    async def outcome(self, run_id: UUID) -> Outcome:
        """The state of the run. Raises NotFound if there is no such run, if it belongs to another tenant, or if
        retention has deleted it. Raises Unreachable. Raises ObjectMissing if the output that holds the result is gone.
        """
        row = await self._row_of(run_id)
        large: bytes | None = None
        if row["status"] == "succeeded" and row["value"] is not None and "output" in row["value"]:
            if row["key"] is None:
                raise missing_result(run_id)
            store = await self._open_store()
            limit = self._settings.result_max_bytes
            large = await store.fetch_bytes(row["key"], sha256=row["sha256"], max_bytes=limit)
        return Outcome(row["status"], row["ended"], _error_of(row), row["value"], large)

    async def _row_of(self, run_id: UUID) -> asyncpg.Record:
        """The row of the run. Raises NotFound, and Unreachable."""

        async def read() -> asyncpg.Record | None:
            async with self._pool.acquire() as connection:
                return await connection.fetchrow(_OUTCOME, run_id, self._tenant, "run", OUTPUT)

        row = await self._repeat_while_away(run_id, read)
        if row is None:
            raise NotFound("run_not_found", "There is no such run.")
        return row

    async def cancel(self, run_id: UUID, reason: str) -> str:
        """Request the cancel of the run. Returns the status that the run then has. Raises NotFound, and Unreachable."""

        async def request() -> None:
            async with self._pool.acquire() as connection:
                limits = await concurrency.limits_of(connection, [run_id])
                cancellation = await jobs.request_cancel(connection, [run_id], self._tenant, reason=reason, by="code")
                self._announcer.announce(cancellation.hints)
                if limits:  # if the cancel has ended the run, other runs get its places at these limits
                    self._announcer.announce(await concurrency.admit(connection, limits, ended=[run_id]))

        await self._repeat_while_away(run_id, request)
        return (await self.outcome(run_id)).status

    async def signal(self, run_id: UUID, name: str, payload: Any) -> None:
        """Send a signal to the run. Raises NotFound, Conflict `run_ended`, TooMany, Unreachable, and Invalid
        `payload_too_large`, as the API does. The statement that stores the signal is sent only once. If PostgreSQL
        stored the signal and only the answer was lost, a repetition would store the signal twice.
        """
        encoded_payload({"payload": payload})

        async def begin() -> tuple[AsyncExitStack, Connection]:
            """Begin a transaction. When the caller leaves the stack, the transaction ends and the connection returns to
            the pool.
            """
            async with AsyncExitStack() as stack:
                connection = await stack.enter_async_context(self._pool.acquire())
                await stack.enter_async_context(connection.transaction())
                return stack.pop_all(), connection

        at_most = self._settings.run_signals
        stack, connection = await self._repeat_while_away(run_id, begin)
        try:
            async with stack:
                hints = await signals.send(connection, run_id, self._tenant, name, payload, at_most=at_most)
        except TRY_AGAIN as error:
            if not may_try_again(error):
                raise
            raise Unreachable(run_id, "the signal may or may not be stored") from error
        self._announcer.announce(hints)

    async def chunks(self, run_id: UUID, after: int) -> Chunks:
        """The chunks (values that the run's step emits while it runs) after number `after`. If there is no chunk yet,
        waits a moment before it returns. Raises NotFound, and Unreachable.
        """

        async def read() -> Chunks:
            async with self._pool.acquire() as connection:
                # Read whether the run has ended before reading the page. So if the run has ended, no chunk can follow
                # this page. `stream_numbers` returns ENDED for such a run. It leaves out a deleted run, which counts as
                # ended here.
                has_ended = (await log_reads.stream_numbers(connection, [run_id])).get(run_id, ENDED) == ENDED
                page = await log_reads.stream_page(connection, self._tenant, run_id, after, LogFilter(), AT_MOST)
            return chunks_of(page, after, ended=has_ended)

        if not after:
            await self._row_of(run_id)  # raises NotFound
        chunks = await self._repeat_while_away(run_id, read)
        if not chunks.items and not chunks.is_end:
            await asyncio.sleep(PAUSE_SECONDS)
        return chunks

    async def _repeat_while_away(self, run_id: UUID | str, work: Callable[[], Awaitable[T]]) -> T:
        """Call `work`, and return its result. While PostgreSQL does not answer, repeat `work` for `submit_seconds`, and
        then raise Unreachable. `work` must be safe to repeat. `run_id`: the run's id or its Celery id, which the error
        names.
        """
        seconds = self._settings.submit_seconds
        try:
            return await until_answered(work, within=seconds, pause=_PAUSE_SECONDS)
        except TRY_AGAIN as error:
            if not may_try_again(error):
                raise
            raise Unreachable(run_id, f"it was away for {seconds:g} s") from error

    async def _open_store(self) -> ObjectStore:
        async with self._store_lock:  # two readers at the same time must not open two stores
            if self._store is None:
                store = ObjectStore.from_settings(self._settings)
                await store.open()
                self._store = store
            return self._store

    async def _close(self) -> None:
        # Wait a moment, so that the hints of the last commits are still published.
        await self._endings.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_BROKER_SECONDS):
                if self._announcing:
                    await asyncio.wait(self._announcing)
                await self._announcer.until_idle()
        for task in self._announcing:
            task.cancel()
        if self._store is not None:
            await self._store.close()


def _error_of(row: Any) -> tuple[str, str] | None:
    """The code and the message with which the run ended, or None if the run has no error."""
    if row["status"] == "cancelled":
        return "cancelled", (row["cancel"] or {}).get("reason") or "the run was cancelled"
    if row["error"] is None:
        return None
    return row["error"]["code"], row["error"]["message"]
