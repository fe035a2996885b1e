"""Samples which transactions of the run's database are in progress, and which tasks they lock.

The triggers that record changes of rows know when a row was changed, not when its transaction ended. Until then the row
is locked, and others see it as it was before. A commit that waits for a standby, or for a processor, may take a second.
A transaction that is rolled back leaves no record of a change, but it locks its rows until then, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from bisect import bisect_right
from collections.abc import Callable

import asyncpg

from leasehold.runtime.transient import TRY_AGAIN

_SAMPLE_SECONDS = 0.05
#: A server that gives no answer for this long may be frozen, or no longer the primary.
_PATIENCE_SECONDS = 2.0
# xmax: the transaction that has locked or changed the row; it may have ended. $1 and $2, of a snapshot: transactions in
# progress, and the number from which on no transaction had ended.
_LOCKED = """
SELECT id::text, xmax::text::bigint AS xact FROM task
WHERE xmax::text::bigint = ANY($1::bigint[]) OR xmax::text::bigint >= $2
"""


class TransactionWatch:
    """`url`: returns the URL of the database at the primary of the moment."""

    def __init__(self, url: Callable[[], str]) -> None:
        self._url = url
        #: Transaction -> time of the last sample whose snapshot listed it as in progress.
        self._last_seen: dict[int, float] = {}
        # For each sample: its time, and the snapshot's xmax. No transaction from this number on had ended.
        self._times: list[float] = []
        self._xmaxes: list[int] = []
        #: Task and transaction -> time of the first sample at which the transaction had locked the task.
        self._locked_since: dict[tuple[str, int], float] = {}

    def last_seen(self, transaction: int) -> float:
        """The time of the last sample, in seconds since 1970, at which the transaction had not ended; 0: there is no
        such sample. A sample from before the transaction began counts, too: its number was then not given yet, so it
        had not ended.
        """
        index = bisect_right(self._xmaxes, transaction)
        return max(self._times[index - 1] if index else 0.0, self._last_seen.get(transaction, 0.0))

    def locks(self) -> dict[str, list[tuple[float, float]]]:
        """For each task, when it was certainly locked: from when until when, in seconds since 1970. A short lock
        (for less than two samples) may be missing.
        """
        locks: dict[str, list[tuple[float, float]]] = {}
        for (task, transaction), since in self._locked_since.items():
            until = self.last_seen(transaction)
            if since < until:
                locks.setdefault(task, []).append((since, until))
        return locks

    async def watch(self) -> None:
        """Never returns."""
        while True:
            with contextlib.suppress(*TRY_AGAIN):
                await self._watch(self._url())
            await asyncio.sleep(_SAMPLE_SECONDS)

    async def _watch(self, url: str) -> None:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            connection = await asyncpg.connect(url)
        try:
            oldest = 0  # of the transactions in progress at the sample before
            while url == self._url():
                oldest = await self._sample(connection, oldest)
                await asyncio.sleep(_SAMPLE_SECONDS)
        finally:
            connection.terminate()

    async def _sample(self, connection: asyncpg.Connection[asyncpg.Record], oldest_before: int) -> int:
        """Returns the number of the oldest transaction in progress. If it is the same as at the sample before, look for
        the tasks that transactions lock.
        """
        before = time.time()
        async with asyncio.timeout(_PATIENCE_SECONDS):
            snapshot = await connection.fetchval("SELECT pg_current_snapshot()::text")
        oldest, xmax, in_progress = snapshot.split(":")
        self._times.append(before)
        self._xmaxes.append(max(int(xmax), self._xmaxes[-1] if self._xmaxes else 0))
        running = list(map(int, in_progress.split(",") if in_progress else ()))
        self._last_seen |= dict.fromkeys(running, before)
        if int(oldest) == oldest_before:
            at = time.time()
            async with asyncio.timeout(_PATIENCE_SECONDS):
                for row in await connection.fetch(_LOCKED, running, int(xmax)):
                    self._locked_since.setdefault((row["id"], row["xact"]), at)
        return int(oldest)
