"""Deletes objects and rows that are no longer needed: first the objects in the store, then the rows that name them.

A unit is a job, an upload, or a row of another kind. A duty is a maintenance loop of a worker. Each turn of the loop
handles a batch of units, and deletes the objects of several units at the same time. If the store refuses to delete a
unit's objects, the duty sets the unit aside (table `quarantine`), and goes on with the other units. Later the duty
tries the unit again. No turn holds a database connection while it waits for the store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from leasehold.db.database import Connection
from leasehold.domain.errors import DeclarationError, StoreError, StoreUnavailable
from leasehold.domain.kind import Kind
from leasehold.kinds.housekeeping import (
    Forgetting,
    HousekeepingContext,
    Tidying,
    Turn,
    hooks_after_expiry,
    hooks_before_jobs_go,
    housekeeping_of,
)
from leasehold.limits import uploads
from leasehold.limits.uploads import Acquire
from leasehold.runtime.gather import gather_or_cancel
from leasehold.runtime.transient import TIMED_OUT, TRY_AGAIN, may_try_again
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.transitions import sweeps
from leasehold.transitions.quarantine import run_known_units, set_aside

#: For how long housekeeping keeps the objects that processes wrote at their start to probe the store.
_PROBES_KEPT = timedelta(hours=1)
#: A turn handles one batch. If more units may be due after it, the next turn comes after this many seconds.
NEXT_BATCH_SECONDS = 0.1
#: The most expired jobs of a batch. After a full batch the next turn comes immediately, because any number of jobs may
#: expire in a second.
_BATCH = 100
#: After this many full batches of jobs, retention begins again with the jobs that expired first. Some of them had to
#: stay at the earlier turns, but may be deleted now.
_BATCHES_IN_A_PASS = 100
#: The objects of this many units of a batch are deleted at the same time. The process has 50 connections to the store,
#: which the worker's attempts also use.
_UNITS_AT_ONCE = 20
#: A key that no object has. A request for this key shows only whether the store answers.
_ABSENT_KEY = "probes/nothing"
_Unit = TypeVar("_Unit")


class Housekeeping:
    """The turns of the housekeeping duties: each loop in duties.py calls its turn again and again. `kinds`: the kinds
    of work (such as pictures), which add rows and objects of their own to delete.
    """

    def __init__(self, settings: Settings, connections: Acquire, store: ObjectStore, kinds: Iterable[Kind]) -> None:
        self._connections = connections
        self._store = store
        self._housekeeping_of_kinds = housekeeping_of(kinds, HousekeepingContext(settings, connections, store))
        #: The next turn of `retention` reads the jobs that have expired since this time; None: all expired jobs.
        self._expired_since: datetime | None = None
        #: How many turns of `retention` in a row have had a full batch.
        self._full_batches = 0
        #: Functions of the kinds, which the duty `deadlines` calls with the jobs that it ends.
        self.hooks_after_expiry = hooks_after_expiry(self._housekeeping_of_kinds)

    def turns_of_kinds(self) -> dict[str, Callable[[], Awaitable[float | None]]]:
        """The turns of the kinds' own duties, by name. Raises DeclarationError if two duties have the same name."""
        duties = [duty for housekeeping in self._housekeeping_of_kinds for duty in housekeeping.duties]
        turns = {duty.duty: self._turn_of(duty) for duty in duties}
        if len(turns) < len(duties):
            names = [duty.duty for duty in duties]
            raise DeclarationError(f"two duties of the kinds of work have the same name: {names}")
        return turns

    def _turn_of(self, duty: Tidying | Forgetting[Any] | Turn) -> Callable[[], Awaitable[float | None]]:
        """The turn of a duty. A Tidying is a statement. A Forgetting finds units, and deletes their objects and rows. A
        Turn is any other function.
        """
        if isinstance(duty, Turn):
            return duty.turn

        async def forget(duty: Forgetting[Any]) -> float | None:
            units = await self._read(duty.find)
            return await self._forget(duty.duty, units, duty.key, duty.delete, duty.forget)

        return partial(self.tidy, duty.statement) if isinstance(duty, Tidying) else partial(forget, duty)

    async def tidy(self, statement: Callable[[Connection], Awaitable[bool | None]]) -> float | None:
        """Run the statement of a duty. The statement returns True if more rows may be due. This method returns the
        pause to the next turn; None: the usual pause.
        """
        async with self._connections() as connection:
            return NEXT_BATCH_SECONDS if await statement(connection) else None

    async def uploads(self) -> float | None:
        """Inspect the uploads of clients, and delete objects that no row refers to."""

        # This is called for an upload whose object is too large, before the object is deleted. The kinds of work then
        # write rows of their own.
        async def on_too_large(connection: Connection, upload: uploads.Due, size: int) -> None:
            for housekeeping in self._housekeeping_of_kinds:
                if housekeeping.upload_too_large is not None:
                    await housekeeping.upload_too_large(connection, upload, size)

        async def check(upload: uploads.Due) -> None:
            await uploads.inspect(self._connections, self._store, upload, on_too_large)

        async def forget(_connection: Connection, _units: Sequence[uploads.Due]) -> None:
            """Do nothing: each check has written its result already."""

        units = await self._read(uploads.due)
        return await self._forget(uploads.UPLOADS, units, lambda upload: upload.key, check, forget)

    async def parts(self) -> None:
        """End multipart uploads that nobody completes."""
        prefixes = [prefix for housekeeping in self._housekeeping_of_kinds for prefix in housekeeping.prefixes]
        await uploads.abort_dead_uploads(self._store, prefixes)

    async def retention(self) -> float | None:
        """Delete ended jobs after their retention time, with their objects."""

        async def delete_objects(job: sweeps.Forgettable) -> None:
            await self._store.delete(*[stored.key async for stored in self._store.list(job.prefix + "/")])

        async def forget(connection: Connection, units: Sequence[sweeps.Forgettable]) -> None:
            # Before the rows of jobs, the kinds of work delete rows of their own that name the jobs.
            hooks = hooks_before_jobs_go(self._housekeeping_of_kinds)
            await sweeps.forget_jobs(connection, [job.job_id for job in units], hooks)

        # Some expired jobs must stay (see `forgettable_jobs`). If there are many of them, not every turn should pass
        # over them again. So a turn after a full batch begins where that batch ended. After a batch that is not full,
        # and after each `_BATCHES_IN_A_PASS` full batches, the next turn reads all expired jobs again.
        since, self._expired_since = self._expired_since, None
        units = await self._read(partial(sweeps.forgettable_jobs, since=since, limit=_BATCH))
        pause = await self._forget(sweeps.RETENTION, units, lambda job: job.job_id, delete_objects, forget)
        is_full = len(units) == _BATCH
        self._full_batches = self._full_batches + 1 if is_full else 0
        if self._full_batches % _BATCHES_IN_A_PASS:
            self._expired_since = units[-1].expires_at
        return 0.0 if is_full and pause is not None else pause

    async def probes(self) -> None:
        """Delete the objects that processes wrote at their start to probe the store."""
        await self._store.delete_old_probes(_PROBES_KEPT)

    async def _read(self, statement: Callable[[Connection], Awaitable[Sequence[_Unit]]]) -> Sequence[_Unit]:
        async with self._connections() as connection:
            return await statement(connection)

    async def _forget(
        self,
        duty: str,
        units: Sequence[_Unit],
        key: Callable[[_Unit], object],
        delete: Callable[[_Unit], Awaitable[None]],
        forget: Callable[[Connection, Sequence[_Unit]], Awaitable[None]],
    ) -> float | None:
        """Call `delete` for the objects of each unit, then `forget` for the rows of the units whose objects are
        deleted.

        Returns the pause to the next turn; None: the usual pause, because this turn had no units, or because the store
        refused each of them. (If the store refuses every unit, frequent turns would soon set all units aside.) Raises
        StoreUnavailable if the store does not answer, and one of the errors in TRY_AGAIN if the database does not
        answer.
        """
        deleted, refused, outage = await self._delete_objects(units, delete)
        if deleted or refused:
            await self._forget_rows(duty, deleted, refused, key, forget)
        if outage is not None:
            raise outage
        return NEXT_BATCH_SECONDS if deleted else None

    async def _delete_objects(
        self, units: Sequence[_Unit], delete: Callable[[_Unit], Awaitable[None]]
    ) -> tuple[list[_Unit], list[tuple[_Unit, Exception]], Exception | None]:
        """Call `delete` for each unit, for _UNITS_AT_ONCE units at the same time. Stop if the store or the database
        does not answer. Returns three values. First: the units whose objects are deleted. Second: the units whose
        `delete` raised an error that concerns only them, each with its error. Third: the error of the server that does
        not answer, or None.
        """
        deleted: list[_Unit] = []
        refused: list[tuple[_Unit, Exception]] = []
        outages: list[Exception] = []
        waiting = iter(units)  # every `delete_next` takes its next unit from this one iterator

        async def delete_next() -> None:
            for unit in waiting:
                try:
                    await delete(unit)
                except Exception as error:  # noqa: BLE001 - any error sets the unit aside, unless a server is away
                    if (outage := await self._outage_of(error)) is not None:
                        outages.append(outage)
                    else:
                        refused.append((unit, error))
                else:
                    deleted.append(unit)
                if outages:
                    return

        await gather_or_cancel(delete_next() for _ in range(_UNITS_AT_ONCE))
        return deleted, refused, outages[0] if outages else None

    async def _outage_of(self, error: Exception) -> Exception | None:
        """Decides what the error of a unit's `delete` means. If the store or the database does not answer, returns the
        error of that server. Returns None if the error concerns only this unit.
        """
        if isinstance(error, StoreUnavailable):
            return await self._probe_store()
        return error if await self._is_outage(error) else None

    async def _is_outage(self, error: Exception) -> bool:
        """Whether the error of a unit's `delete` means that the database does not answer, or could not do the work now.
        But an OSError may also come from the code of a kind of work, and a timeout may come from a slow statement for
        this unit. So after an OSError or a timeout, this method sends a query. If the query gets no answer, the result
        is True.
        """
        if not may_try_again(error):
            return False
        is_unclear = isinstance(error, (OSError, *TIMED_OUT)) and not isinstance(error, ConnectionError)
        if not is_unclear:
            return True
        try:
            async with self._connections() as connection:
                await connection.fetchval("SELECT true")
        except TRY_AGAIN:
            return True
        return False

    async def _probe_store(self) -> StoreUnavailable | None:
        """The store's error if the store does not answer. Returns None if the store answers, because then the last
        error was about one unit.
        """
        try:
            await self._store.head(_ABSENT_KEY)
        except StoreUnavailable as error:
            return error
        except StoreError:  # the store has answered
            return None
        return None

    async def _forget_rows(
        self,
        duty: str,
        deleted: Sequence[_Unit],
        refused: Sequence[tuple[_Unit, Exception]],
        key: Callable[[_Unit], object],
        forget: Callable[[Connection, Sequence[_Unit]], Awaitable[None]],
    ) -> None:
        """Call `forget` for the rows of the `deleted` units, and set the `refused` units aside."""
        async with self._connections() as connection:

            async def forget_batch(units: Sequence[_Unit]) -> Sequence[None]:
                await forget(connection, units)
                return ()

            await run_known_units(connection, duty, deleted, forget_batch, key)
            for unit, error in refused:
                await set_aside(connection, duty, key(unit), error)
