"""Copies a job's artifacts to the promotion target, all or none, and undoes the copies of a call that failed or died.

The promote endpoint makes a call: it begins a turn with `ownership` and hands the turn to `Promoter`. The leading
worker undoes the copies of dead calls (`undo_dead`). Neither holds a database connection during a request to the
target or the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from leasehold.db.database import Connection
from leasehold.domain.errors import BadGateway, LeaseholdError, StoreError
from leasehold.limits.uploads import Acquire
from leasehold.pipelines.conversion.promotion import ownership as promotions
from leasehold.pipelines.conversion.promotion.ownership import Trace, Turn, exists
from leasehold.pipelines.conversion.promotion.targets import Existing, Target, is_configured, open_target
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Copy:
    """One artifact to copy: from the object `source` of the installation's store to the target's `key`."""

    key: str
    source: str
    size: int
    replace: bool


class Promoter:
    """Copies and undoes for one call, or undoes for the leading worker."""

    def __init__(self, connections: Acquire, store: ObjectStore, target: Target) -> None:
        self._connections = connections
        self._store = store
        self._target = target

    async def promote(
        self,
        turn: Turn,
        traces: Sequence[Trace],
        copies: Sequence[Copy],
        on_finish: Callable[[Connection], Awaitable[None]],
    ) -> None:
        """Undo the `traces` of earlier calls, claim the keys, copy, and record that the job is promoted. The record
        commits in one transaction with the writes of `on_finish`.

        Raises Conflict or BadGateway. Then the call has copied nothing, or its copies are undone: now, or later by the
        leading worker.
        """
        await self._undo_earlier(traces)
        replaceable = [copy.key for copy in copies if copy.replace]
        async with self._connections() as connection:
            owned = await promotions.claim(connection, turn, [copy.key for copy in copies], replaceable)
        try:
            async with asyncio.timeout(promotions.COPY_SECONDS):
                for nth, copy in enumerate(copies):
                    await self._copy(turn, copy, f"jobs/{turn.job_id}/promotion/{turn.id}/{nth}", owned)
            async with self._connections() as connection:
                backups = [trace.backup for trace in await promotions.traces(connection, turn) if trace.backup]
                async with connection.transaction():
                    await promotions.finish(connection, turn, [copy.key for copy in copies])
                    await on_finish(connection)
        except TimeoutError:
            await asyncio.shield(self._undo_turn(turn))
            raise BadGateway("promotion_failed", "The target took too long; nothing was promoted.") from None
        except BaseException:
            await asyncio.shield(self._undo_turn(turn))
            raise
        await self._delete_backups(backups)

    async def _undo_earlier(self, traces: Sequence[Trace]) -> None:
        is_undone = False
        with suppress(TimeoutError):
            async with asyncio.timeout(promotions.UNDO_SECONDS):
                is_undone = await self.undo(traces)
        if not is_undone:
            raise BadGateway("promotion_failed", "The copies of an earlier call could not be removed.")

    async def _copy(self, turn: Turn, copy: Copy, backup: str, owned: Mapping[str, bool]) -> None:
        existing = await self._target.existing(copy.key)
        if existing is not Existing.NOTHING and owned[copy.key]:
            await self._target.back_up(copy.key, backup)
            async with self._connections() as connection:
                await promotions.touch(connection, turn, copy.key, "replaced", backup)
            await self._target.replace(copy.key, copy.source, copy.size, str(turn.id))
            return
        if existing is Existing.SOMETHING:
            raise exists(copy.key)  # nobody knows who wrote this object, so nobody may overwrite it
        surely_absent = existing is Existing.NOTHING
        async with self._connections() as connection:
            await promotions.touch(connection, turn, copy.key, "created" if surely_absent else "unsure")
        try:
            created = await self._target.create(copy.key, copy.source, copy.size, str(turn.id))
        except LeaseholdError as error:
            if getattr(error, "code", None) == "target_exists":
                await self._release_key(turn, copy.key)
            raise
        if created and not surely_absent:
            async with self._connections() as connection:
                await promotions.touch(connection, turn, copy.key, "created")

    async def _release_key(self, turn: Turn, key: str) -> None:
        """Release the key: the target refused to create the object, so this call may not remove the object that lies
        there.
        """
        async with self._connections() as connection:
            await promotions.record_undone(connection, Trace(turn.id, key, None, None))

    async def _undo_turn(self, turn: Turn) -> None:
        try:
            async with asyncio.timeout(promotions.UNDO_SECONDS):
                async with self._connections() as connection:
                    traces = await promotions.traces(connection, turn)
                await self.undo(traces)
        except TRY_AGAIN as error:
            log.warning("a failed promotion will be undone later", error=type(error).__name__)

    async def undo(self, traces: Sequence[Trace]) -> bool:
        """Remove created objects and restore replaced objects. False: the leading worker must try some of
        them again.
        """
        complete = True
        for trace in traces:
            try:
                await self._undo_trace(trace)
            except (BadGateway, StoreError) as error:
                log.warning(
                    "a copy of a failed promotion could not be undone", key=trace.key, error=type(error).__name__
                )
                complete = False
                continue
            async with self._connections() as connection:
                await promotions.record_undone(connection, trace)
            await self._delete_backups([trace.backup] if trace.backup else [])
        return complete

    async def _undo_trace(self, trace: Trace) -> None:
        match trace.reached:
            case "created":
                await self._target.remove(trace.key, str(trace.turn))
            case "replaced" if trace.backup is not None:
                await self._target.restore(trace.key, trace.backup)
            case "unsure":
                log.warning("a copy stays: the target does not report whether this call wrote it", key=trace.key)

    async def _delete_backups(self, backups: Sequence[str]) -> None:
        try:
            await self._store.delete(*backups)
        except StoreError as error:  # the backups lie under the job's prefix: they are deleted with the job
            log.warning("backups of a promotion could not be deleted", error=type(error).__name__)


async def undo_dead(settings: Settings, connections: Acquire, store: ObjectStore) -> int:
    """Undo the copies of dead calls at the target. Returns the number of their keys."""
    if not is_configured(settings):
        return 0
    async with connections() as connection:
        traces, turns = await promotions.dead(connection)
    if not traces:
        return 0
    try:
        async with asyncio.timeout(promotions.UNDO_SECONDS), open_target(settings, store) as target:
            await Promoter(connections, store, target).undo(traces)
    except TimeoutError:
        log.warning("the target took too long: copies of dead promotions are undone later")
    finally:
        async with connections() as connection:
            for turn in turns:
                await promotions.give_up(connection, turn)
    return len(traces)
