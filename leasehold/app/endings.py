"""Waits for the ends of runs. One query at a time serves all waiters of the process."""

from __future__ import annotations

import asyncio
from contextvars import Context
from uuid import UUID

from leasehold.db.database import Pool
from leasehold.runtime.gather import cancel_and_wait, check_not_cancelled
from leasehold.runtime.transient import TRY_AGAIN, may_try_again
from leasehold.telemetry.outages import DATABASE

#: Seconds between two queries. After a run has ended or a waiter has come, the pause is _SHORTEST_PAUSE. While nothing
#: happens, each pause is _PAUSE_GROWTH times as long as the previous one, up to _LONGEST_PAUSE.
_SHORTEST_PAUSE, _LONGEST_PAUSE, _PAUSE_GROWTH = 0.004, 0.15, 1.3

# $1: ids of runs. The statement returns the ids of the runs that have ended or do not exist.
_ENDED = """
-- app_ended
SELECT awaited_run.id FROM unnest($1::uuid[]) AS awaited_run(id)
WHERE NOT EXISTS (SELECT 1 FROM job j WHERE j.id = awaited_run.id AND j.finished_at IS NULL)
"""


class Endings:
    """Wakes the waiters of runs that have ended. A deleted run counts as ended. The waiter's next read of the run then
    raises NotFound.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiters: dict[UUID, set[asyncio.Future[None]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._pause = _SHORTEST_PAUSE

    async def wait(self, run_id: UUID, seconds: float | None) -> bool:
        """Wait until the run ends, but not longer than `seconds` (None: without a limit). Returns whether it has ended.
        The caller must have checked that the run belongs to the caller's tenant, because the query of this class does
        not check the tenant.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(run_id, set()).add(waiter)
        self._pause = _SHORTEST_PAUSE
        if self._task is None or self._task.done():
            # The asyncio task gets an empty context, because the first waiter may be an attempt. In the attempt's
            # context, the lines that `_watch` logs would be stored with the attempt's run.
            self._task = asyncio.create_task(self._watch(), name="endings", context=Context())
        try:
            async with asyncio.timeout(seconds):
                await waiter
        except TimeoutError:
            return False
        finally:
            waiters = self._waiters.get(run_id, set())
            waiters.discard(waiter)
            if not waiters:
                self._waiters.pop(run_id, None)
        return True

    async def _watch(self) -> None:
        try:
            while self._waiters:
                await asyncio.sleep(self._pause)
                self._pause = min(self._pause * _PAUSE_GROWTH, _LONGEST_PAUSE)
                await self._wake_ended()
        except Exception as error:  # noqa: BLE001 - each waiter raises the error, because this loop has ended
            for waiter in [waiter for waiters in self._waiters.values() for waiter in waiters if not waiter.done()]:
                waiter.set_exception(error)

    async def _wake_ended(self) -> None:
        try:
            async with self._pool.acquire() as connection:
                rows = await connection.fetch(_ENDED, list(self._waiters))
        except TRY_AGAIN as error:
            check_not_cancelled()
            if not may_try_again(error):
                raise
            DATABASE.record_error(error, "waiting for runs to end")
            return
        for row in rows:
            self._pause = _SHORTEST_PAUSE
            for waiter in self._waiters.pop(row["id"], ()):
                if not waiter.done():
                    waiter.set_result(None)

    async def close(self) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)
