"""Copies a job's artifacts to the promotion target (a bucket or an HTTP file service), all or none. If the copying
fails, or the process dies, this module undoes the copies that were made.

A call is one request to the promote endpoint. The endpoint claims the job (`ownership.begin` returns the call) and
passes the call to `Promoter`. The leader (the worker that does the fleet's maintenance) undoes the copies of calls
whose process died (`undo_dead`). While `Promoter` and `undo_dead` wait for the target or the store, they hold no
database connection.

The backup of a replaced object lies under the prefix BACKUPS. It does not lie under the prefix of its job, because the
job may be deleted while a call still needs the backup.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import structlog

from leasehold.db.database import Connection
from leasehold.domain.errors import BadGateway, Conflict, StoreError
from leasehold.limits.uploads import Acquire
from leasehold.pipelines.conversion.pipeline import BACKUPS
from leasehold.pipelines.conversion.promotion import ownership as promotions
from leasehold.pipelines.conversion.promotion.ownership import KeyChange, PromoteCall, target_exists
from leasehold.pipelines.conversion.promotion.targets import Existing, Target, is_configured, open_target
from leasehold.runtime.transient import TRY_AGAIN, until_answered
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore

log = structlog.get_logger(__name__)

#: If the answer to its COMMIT is lost, a call asks PostgreSQL for this many seconds whether the COMMIT took effect.
_FINISH_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Copy:
    """One artifact to copy: from the object `source` of the installation's store to the target's `key`. `replace`:
    whether the copy may replace an object that the tenant promoted to the key earlier.
    """

    key: str
    source: str
    size: int
    replace: bool


@asynccontextmanager
async def _time_limit(seconds: float) -> AsyncIterator[None]:
    """Raises BadGateway if the block takes longer than `seconds`. A TimeoutError of the block itself, for example of a
    request to PostgreSQL, passes unchanged.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise BadGateway("promotion_failed", "The target took too long; nothing was promoted.") from None


class Promoter:
    """Copies the artifacts of one call, and undoes the copies if the call fails. The leader uses this class only to
    undo.
    """

    def __init__(self, connections: Acquire, store: ObjectStore, target: Target) -> None:
        self._connections = connections
        self._store = store
        self._target = target
        self._foreign_keys: set[str] = set()  # keys whose objects are somebody else's: an undo must not touch them

    async def promote(
        self,
        call: PromoteCall,
        earlier: Sequence[KeyChange],
        copies: Sequence[Copy],
        on_finish: Callable[[Connection], Awaitable[None]],
    ) -> None:
        """Undo the changes of earlier calls (`earlier`), claim the keys, copy, and record that the job is promoted. The
        record commits in one transaction with the writes of `on_finish`.

        Raises Conflict or BadGateway, and the errors of PostgreSQL. After an error, the copies of this call are undone,
        either before this function raises, or later by the leader. Exception: if the answer to the COMMIT was lost and
        PostgreSQL does not answer afterwards, the job may be promoted. A second request then shows whether it is
        promoted.
        """
        await self._undo_earlier(earlier)
        keys = [copy.key for copy in copies]
        async with self._connections() as connection:
            # Key -> whether the key holds an object that the tenant has promoted.
            is_own_by_key = await promotions.claim(
                connection, call, keys, [copy.key for copy in copies if copy.replace]
            )
        try:
            async with _time_limit(promotions.COPY_SECONDS):
                for number, copy in enumerate(copies):
                    backup = f"{BACKUPS}{call.id}/{number}"
                    await self._copy(call, copy, backup, is_own=is_own_by_key[copy.key])
            left_backups = await self._finish(call, keys, on_finish)
        except BaseException:
            await asyncio.shield(self._undo_call(call))
            raise
        await self._delete_backups(left_backups)

    async def _undo_earlier(self, changes: Sequence[KeyChange]) -> None:
        is_undone = False
        with suppress(BadGateway):
            async with _time_limit(promotions.UNDO_SECONDS):
                is_undone = await self.undo(changes)
        if not is_undone:
            raise BadGateway("promotion_failed", "The copies of an earlier call could not be removed.")

    async def _copy(self, call: PromoteCall, copy: Copy, backup: str, *, is_own: bool) -> None:
        """Copy one artifact. There are four cases:
        - The key holds no object: create one.
        - The key holds an object that the tenant has promoted (`is_own`): replace it, and keep a copy of the old object
          at the key `backup` of the installation's store.
        - The target does not report whether the key holds an object: create one, and ask the target not to overwrite.
        - The key holds an object of somebody else: raise Conflict.
        """
        existing = await self._target.existing(copy.key)
        if existing is Existing.NOTHING:
            await self._create(call, copy, known_absent=True)
        elif is_own:
            await self._replace(call, copy, backup)
        elif existing is Existing.UNKNOWN:
            await self._create(call, copy, known_absent=False)
        else:
            raise target_exists(copy.key)  # nobody knows who wrote this object, so nobody may overwrite it

    async def _replace(self, call: PromoteCall, copy: Copy, backup: str) -> None:
        # Record the backup before it is made, so that it is deleted even if this process dies.
        async with self._connections() as connection:
            await promotions.record_intent(connection, call, copy.key, None, backup)
        await self._target.back_up(copy.key, backup)
        async with self._connections() as connection:
            await promotions.record_intent(connection, call, copy.key, "replaced", backup)
        await self._target.replace(copy.key, copy.source, copy.size, str(call.id))

    async def _create(self, call: PromoteCall, copy: Copy, *, known_absent: bool) -> None:
        """Create the object. `known_absent`: the target has reported that the key holds no object. If it has not, the
        call's record of intent says "unsure", until the target confirms that it has created the object.
        """
        async with self._connections() as connection:
            await promotions.record_intent(connection, call, copy.key, "created" if known_absent else "unsure")
        try:
            was_created = await self._target.create(copy.key, copy.source, copy.size, str(call.id))
        except Conflict:  # somebody else has created an object at the key since the call of `existing`
            self._foreign_keys.add(copy.key)
            raise
        if was_created and not known_absent:
            async with self._connections() as connection:
                await promotions.record_intent(connection, call, copy.key, "created")

    async def _finish(
        self, call: PromoteCall, keys: Sequence[str], on_finish: Callable[[Connection], Awaitable[None]]
    ) -> list[KeyChange]:
        """Record that the job is promoted. Returns a KeyChange for each backup that is still to be deleted."""
        async with self._connections() as connection:
            changes = await promotions.changes_of(connection, call)
        try:
            async with self._connections() as connection, connection.transaction():
                await promotions.finish(connection, call, keys)
                await on_finish(connection)
        except TRY_AGAIN:  # PostgreSQL may have committed, and its answer was late or lost
            if not await until_answered(partial(self._is_finished, call, keys), within=_FINISH_SECONDS):
                raise
        # With `change=None`, `undo` deletes only the backup.
        return [replace(change, change=None) for change in changes if change.backup is not None]

    async def _is_finished(self, call: PromoteCall, keys: Sequence[str]) -> bool:
        async with self._connections() as connection:
            return await promotions.is_finished(connection, call, keys)

    async def _undo_call(self, call: PromoteCall) -> None:
        try:
            async with asyncio.timeout(promotions.UNDO_SECONDS):
                # Repeat until PostgreSQL answers. While the call's records still name `_foreign_keys`, the leader could
                # undo the call later, and remove the objects of others.
                if self._foreign_keys:
                    await until_answered(partial(self._release_foreign, call), within=promotions.UNDO_SECONDS)
                await until_answered(partial(self._undo_changes, call), within=promotions.UNDO_SECONDS)
        except TRY_AGAIN as error:
            log.warning("a failed promotion will be undone later", error=type(error).__name__)

    async def _undo_changes(self, call: PromoteCall) -> None:
        """Undo all changes that the call has made so far, and that an earlier run of this function has not undone."""
        async with self._connections() as connection:
            changes = await promotions.changes_of(connection, call)
        await self.undo(changes)

    async def _release_foreign(self, call: PromoteCall) -> None:
        """Delete this call's records of intent for `_foreign_keys`."""
        async with self._connections() as connection:
            for key in self._foreign_keys:
                await promotions.record_undone(connection, KeyChange(call.id, key, None, None))

    async def undo(self, changes: Sequence[KeyChange]) -> bool:
        """Remove created objects, restore replaced objects, and delete the backups. Returns False if some changes could
        not be undone now. The leader then tries them again.
        """
        is_complete = True
        for change in changes:
            try:
                await self._undo_change(change)
                if change.backup is not None:
                    await self._store.delete(change.backup)
            except (BadGateway, StoreError) as error:
                log.warning(
                    "a copy of a failed promotion could not be undone", key=change.key, error=type(error).__name__
                )
                is_complete = False
                continue
            async with self._connections() as connection:
                await promotions.record_undone(connection, change)
        return is_complete

    async def _undo_change(self, change: KeyChange) -> None:
        match change.change:
            case "created":
                await self._target.remove(change.key, str(change.call_id))
            case "replaced" if change.backup is not None:
                await self._restore(change, change.backup)
            case "unsure":
                log.warning("a copy stays: the target does not report whether this call wrote it", key=change.key)

    async def _restore(self, change: KeyChange, backup: str) -> None:
        """Restore the replaced object. If its backup does not exist, the key keeps the object that lies there now. A
        second try would not help, because the backup would still be missing, and the key would stay blocked for ever.
        """
        if await self._store.head(backup) is None:
            log.error("a replaced object is lost: its backup does not exist", key=change.key, backup=backup)
        else:
            await self._target.restore(change.key, backup)
        # Record the restore before the backup is deleted. If another worker takes over from here, it must not look for
        # the backup.
        async with self._connections() as connection:
            await promotions.record_restored(connection, change)

    async def _delete_backups(self, left_backups: Sequence[KeyChange]) -> None:
        """Delete the backups of a finished call. If this fails, the leader deletes them later."""
        try:
            await self.undo(left_backups)
        except TRY_AGAIN as error:
            log.warning("backups of a promotion will be deleted later", error=type(error).__name__)


async def undo_dead(settings: Settings, connections: Acquire, store: ObjectStore) -> int:
    """Undo the copies of dead calls at the target. Returns the number of keys that it tried to undo.

    The worker claims the keys for `_UNDO_LEASE_SECONDS` (ownership.py). If a key could not be undone, this function
    tries the key again when it is called after that time.
    """
    if not is_configured(settings):
        return 0
    async with connections() as connection:
        changes, calls = await promotions.claim_dead(connection)
    if not changes:
        return 0
    try:
        async with _time_limit(promotions.UNDO_SECONDS), open_target(settings, store) as target:
            await Promoter(connections, store, target).undo(changes)
    except BadGateway:
        log.warning("the target took too long: copies of dead promotions are undone later")
    finally:  # after a success, too: this ends the claims of the jobs
        async with connections() as connection:
            for call in calls:
                await promotions.give_up(connection, call)
    return len(changes)
