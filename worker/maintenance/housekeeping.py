"""Forgetting what nobody needs any more, where objects go before their rows. The store is asked while no connection to
the database is held; an object that it will not delete is set aside, and the others go on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from leasehold.db.database import Connection
from leasehold.domain.errors import DeclarationError, StoreError, StoreUnavailable
from leasehold.domain.kind import Kind
from leasehold.kinds.housekeeping import Forgetting, HousekeepingContext, Tidying, Turn, housekeeping_of
from leasehold.limits import uploads
from leasehold.limits.uploads import Acquire
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.transitions import sweeps
from leasehold.transitions.quarantine import each_of, set_aside

_PROBES_KEPT = timedelta(hours=1)
#: A turn takes one batch; while there is more, the next one comes after so many seconds.
_NEXT_BATCH_SECONDS = 0.1
#: A key that no object of ours has.
_NOTHING = "probes/nothing"
_U = TypeVar("_U")


class Housekeeping:
    """`connections`: each duty takes one at a time, and none while the store is asked. `kinds`: whose rows and objects
    are kept, too.
    """

    def __init__(self, settings: Settings, connections: Acquire, store: ObjectStore, kinds: Iterable[Kind]) -> None:
        self._connections = connections
        self._store = store
        self._of_kinds = housekeeping_of(kinds, HousekeepingContext(settings, connections, store))

    def of_kinds(self) -> dict[str, Callable[[], Awaitable[float | None]]]:
        """The turns of the kinds' own duties, by name. Raises DeclarationError where two have one name."""
        duties = [duty for kind in self._of_kinds for duty in kind.duties]
        turns = {duty.duty: self._turn_of(duty) for duty in duties}
        if len(turns) < len(duties):
            raise DeclarationError(f"two kinds of work have a duty of one name: {[duty.duty for duty in duties]}")
        return turns

    def _turn_of(self, duty: Tidying | Forgetting[Any] | Turn) -> Callable[[], Awaitable[float | None]]:
        if isinstance(duty, Turn):
            return duty.turn

        async def tidy(statement: Callable[[Connection], Awaitable[None]]) -> None:
            async with self._connections() as connection:
                await statement(connection)

        async def forget(one: Forgetting[Any]) -> float | None:
            found = await self._ask(one.find)
            return await self._forget(one.duty, found, one.key, one.delete, one.forget)

        return partial(tidy, duty.statement) if isinstance(duty, Tidying) else partial(forget, duty)

    async def uploads(self) -> float | None:
        """What lies where clients may send."""

        async def on_too_large(connection: Connection, due: uploads.Due, size: int) -> None:
            for kind in self._of_kinds:
                if kind.upload_too_large is not None:
                    await kind.upload_too_large(connection, due, size)

        async def look(one: uploads.Due) -> None:
            await uploads.inspect(self._connections, self._store, one, on_too_large)

        async def noted(_connection: Connection, _units: Sequence[uploads.Due]) -> None:
            """Each look has written down itself what it saw."""

        found = await self._ask(uploads.due)
        return await self._forget(uploads.UPLOADS, found, lambda one: one.key, look, noted)

    async def parts(self) -> None:
        await uploads.give_up_parts(self._store, [prefix for kind in self._of_kinds for prefix in kind.prefixes])

    async def retention(self) -> float | None:
        async def empty(job: sweeps.Forgettable) -> None:
            await self._store.delete(*[found.key async for found in self._store.list(job.prefix + "/")])

        async def forget(connection: Connection, units: Sequence[sweeps.Forgettable]) -> None:
            before = [kind.before_jobs_go for kind in self._of_kinds if kind.before_jobs_go is not None]
            await sweeps.forget_jobs(connection, [job.job_id for job in units], before)

        found = await self._ask(sweeps.forgettable_jobs)
        return await self._forget(sweeps.RETENTION, found, lambda job: job.job_id, empty, forget)

    async def probes(self) -> None:
        await self._store.forget_probes(_PROBES_KEPT)

    async def _ask(self, statement: Callable[[Connection], Awaitable[Sequence[_U]]]) -> Sequence[_U]:
        async with self._connections() as connection:
            return await statement(connection)

    async def _forget(
        self,
        duty: str,
        units: Sequence[_U],
        key: Callable[[_U], object],
        delete: Callable[[_U], Awaitable[None]],
        forget: Callable[[Connection, Sequence[_U]], Awaitable[None]],
    ) -> float | None:
        """Delete the objects of each unit, then the rows of those whose objects are gone. Returns the pause to the next
        turn, None if this one found nothing. Raises StoreUnavailable where it is the store that is away.
        """
        gone: list[_U] = []
        refused: list[tuple[_U, Exception]] = []
        away: StoreUnavailable | None = None
        for unit in units:
            try:
                await delete(unit)
            except StoreUnavailable as error:
                away = await self._away()
                if away is not None:
                    break
                refused.append((unit, error))
            except Exception as error:  # noqa: BLE001 - of this unit, whatever it is: it is written down
                refused.append((unit, error))
            else:
                gone.append(unit)
        if gone or refused:
            await self._write_down(duty, gone, refused, key, forget)
        if away is not None:
            raise away
        return _NEXT_BATCH_SECONDS if gone or refused else None

    async def _away(self) -> StoreUnavailable | None:
        """What the store says to a question about nothing: None if it answers, and so was silent for another reason."""
        try:
            await self._store.head(_NOTHING)
        except StoreUnavailable as error:
            return error
        except StoreError:
            return None
        return None

    async def _write_down(
        self,
        duty: str,
        gone: Sequence[_U],
        refused: Sequence[tuple[_U, Exception]],
        key: Callable[[_U], object],
        forget: Callable[[Connection, Sequence[_U]], Awaitable[None]],
    ) -> None:
        async with self._connections() as connection:

            async def rows(some: Sequence[_U]) -> Sequence[None]:
                await forget(connection, some)
                return ()

            await each_of(connection, duty, gone, rows, key)
            for unit, error in refused:
                await set_aside(connection, duty, key(unit), error)
