"""Samples which transactions of the run's database are in progress, and notices when the database has restarted.

The triggers that record changes of rows know when a row was changed, not when its transaction ended. Until then the row
is locked, and others see it as it was before. A commit that waits for a standby, or for a processor, may take a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from bisect import bisect_right
from collections.abc import Callable
from datetime import datetime

import asyncpg

from leasehold.runtime.transient import TRY_AGAIN
from leasehold.transitions.workers import INCARNATION

_SAMPLE_SECONDS = 0.05
#: A server that gives no answer for this long may be frozen, or no longer the primary.
_PATIENCE_SECONDS = 2.0
_SAMPLE = f"SELECT pg_current_snapshot()::text, {INCARNATION}"


class TransactionWatch:
    """`url`: returns the URL of the database at the primary of the moment."""

    def __init__(self, url: Callable[[], str]) -> None:
        self._url = url
        #: Transaction -> time of the last sample whose snapshot listed it as in progress.
        self._last_seen: dict[int, float] = {}
        # For each sample: its time, and the snapshot's xmax. No transaction from this number on had ended.
        self._times: list[float] = []
        self._xmaxes: list[int] = []
        #: For each restart of the database, and each failover: the time of the last sample before it.
        self.restarts: list[float] = []
        self._began_at: datetime | None = None  # the database, by its own clock

    def last_seen(self, transaction: int) -> float:
        """The time of the last sample, in seconds since 1970, at which the transaction had not ended; 0: there is no
        such sample. A sample from before the transaction began counts, too: its number was then not given yet, so it
        had not ended.
        """
        index = bisect_right(self._xmaxes, transaction)
        return max(self._times[index - 1] if index else 0.0, self._last_seen.get(transaction, 0.0))

    def begun_by(self, transaction: int) -> float:
        """A time, in seconds since 1970, by which the transaction had certainly begun: that of the sample after the
        first one that knew its number, because a sample's time is from before its query.
        """
        index = bisect_right(self._xmaxes, transaction) + 1
        return self._times[index] if index < len(self._times) else float("inf")

    def may_last_until(self, transaction: int) -> float:
        """The latest time, in seconds since 1970, at which the transaction may have been in progress. If a sample saw
        it, it may have ended at any time before the next sample.
        """
        seen = self._last_seen.get(transaction)
        if seen is None:
            return self.last_seen(transaction)
        index = bisect_right(self._times, seen)
        return self._times[index] if index < len(self._times) else seen

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
            while url == self._url():
                before = time.time()
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    [(snapshot, began_at)] = await connection.fetch(_SAMPLE)
                if self._began_at not in (None, began_at):
                    self.restarts.append(self._times[-1])
                self._began_at = began_at
                _, xmax, in_progress = snapshot.split(":")
                self._times.append(before)
                self._xmaxes.append(max(int(xmax), self._xmaxes[-1] if self._xmaxes else 0))
                self._last_seen |= dict.fromkeys(map(int, in_progress.split(",") if in_progress else ()), before)
                await asyncio.sleep(_SAMPLE_SECONDS)
        finally:
            connection.terminate()
