"""Copying a job's artifacts to the target, all or none; and taking back what a call that failed or died has done.

No database connection is held while the target or the store is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from leasehold.domain.errors import BadGateway, LeaseholdError, StoreError
from leasehold.limits.uploads import Acquire
from leasehold.pipelines.conversion.promotion import ownership as promotions
from leasehold.pipelines.conversion.promotion.ownership import Trace, Turn, exists
from leasehold.pipelines.conversion.promotion.targets import Found, Target, is_configured, open_target
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Copy:
    """One artifact: of our store's object `source` to the target's `key`."""

    key: str
    source: str
    size: int
    replace: bool


class Promoter:
    """Of one call, or of the sweeper."""

    def __init__(self, connections: Acquire, store: ObjectStore, target: Target) -> None:
        self._connections = connections
        self._store = store
        self._target = target

    async def promote(self, turn: Turn, left: Sequence[Trace], copies: Sequence[Copy]) -> None:
        """Take back what earlier calls left, claim the keys, copy, and say that the job is promoted.

        Raises Conflict, BadGateway; then nothing was done, or what was is taken back, if need be by the sweeper.
        """
        if not await self.take_back(left):
            raise BadGateway("promotion_failed", "What an earlier call left could not be taken back.")
        replaceable = [copy.key for copy in copies if copy.replace]
        async with self._connections() as connection:
            ours = await promotions.claim(connection, turn, [copy.key for copy in copies], replaceable)
        try:
            async with asyncio.timeout(promotions.COPY_SECONDS):
                for nth, copy in enumerate(copies):
                    await self._copy(turn, copy, f"jobs/{turn.job_id}/promotion/{turn.id}/{nth}", ours)
            async with self._connections() as connection:
                backups = [trace.backup for trace in await promotions.traces(connection, turn) if trace.backup]
                await promotions.finish(connection, turn, [copy.key for copy in copies])
        except TimeoutError:
            await asyncio.shield(self._take_back_turn(turn))
            raise BadGateway("promotion_failed", "The target took too long; nothing was promoted.") from None
        except BaseException:
            await asyncio.shield(self._take_back_turn(turn))
            raise
        await self._forget(backups)

    async def _copy(self, turn: Turn, copy: Copy, backup: str, ours: Mapping[str, bool]) -> None:
        found = await self._target.look(copy.key)
        if found is not Found.NOTHING and ours[copy.key]:
            await self._target.back_up(copy.key, backup)
            async with self._connections() as connection:
                await promotions.touch(connection, turn, copy.key, "replaced", backup)
            await self._target.replace(copy.key, copy.source, copy.size, str(turn.id))
            return
        if found is Found.SOMETHING:
            raise exists(copy.key)  # by whom nobody here knows, so it is nobody's to overwrite
        certain = found is Found.NOTHING
        async with self._connections() as connection:
            await promotions.touch(connection, turn, copy.key, "created" if certain else "unsure")
        try:
            made = await self._target.create(copy.key, copy.source, copy.size, str(turn.id))
        except LeaseholdError as error:
            if getattr(error, "code", None) == "target_exists":
                await self._untouch(turn, copy.key)
            raise
        if made and not certain:
            async with self._connections() as connection:
                await promotions.touch(connection, turn, copy.key, "created")

    async def _untouch(self, turn: Turn, key: str) -> None:
        """The target refused: what lies there is not this call's to remove."""
        async with self._connections() as connection:
            await promotions.settle_back(connection, Trace(turn.id, key, None, None))

    async def _take_back_turn(self, turn: Turn) -> None:
        try:
            async with asyncio.timeout(promotions.UNDO_SECONDS):
                async with self._connections() as connection:
                    left = await promotions.traces(connection, turn)
                await self.take_back(left)
        except TRY_AGAIN as error:
            log.warning("a promotion is taken back later", error=type(error).__name__)

    async def take_back(self, left: Sequence[Trace]) -> bool:
        """Remove what was created, restore what was replaced. False: some is left for the sweeper."""
        whole = True
        for trace in left:
            try:
                await self._take_back(trace)
            except (BadGateway, StoreError) as error:
                log.warning("a copy is left at the target", key=trace.key, error=type(error).__name__)
                whole = False
                continue
            async with self._connections() as connection:
                await promotions.settle_back(connection, trace)
            await self._forget([trace.backup] if trace.backup else [])
        return whole

    async def _take_back(self, trace: Trace) -> None:
        match trace.reached:
            case "created":
                await self._target.remove(trace.key, str(trace.turn))
            case "replaced" if trace.backup is not None:
                await self._target.restore(trace.key, trace.backup)
            case "unsure":
                log.warning("the target does not tell whether a copy is its call's own: it stays", key=trace.key)

    async def _forget(self, backups: Sequence[str]) -> None:
        try:
            await self._store.delete(*backups)
        except StoreError as error:  # they lie under the job's prefix, and go with it
            log.warning("backups of a promotion are left", error=type(error).__name__)


async def take_back_dead(settings: Settings, connections: Acquire, store: ObjectStore) -> int:
    """Take back what calls that died have done at the target. Returns at how many keys."""
    if not is_configured(settings):
        return 0
    async with connections() as connection:
        left = await promotions.dead(connection)
    if left:
        async with open_target(settings, store) as target:
            await Promoter(connections, store, target).take_back(left)
    return len(left)
