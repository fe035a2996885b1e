"""Counts, for each queue, the attempts that this worker starts. The heartbeat writes the counts into the worker's row.
The API's list of queues adds up the counts of all workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

_WINDOW_SECONDS = 60


class _Window:
    """How many attempts of one queue started in each of the last 60 seconds. Seconds are whole numbers of the clock.
    The count of a second has the index `second % 60`, until a later second with the same index replaces the count.
    """

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * _WINDOW_SECONDS
        self.seconds = [-_WINDOW_SECONDS] * _WINDOW_SECONDS  # by index: the second of the count with the same index

    def count(self, second: int) -> None:
        index = second % _WINDOW_SECONDS
        if self.seconds[index] != second:
            self.seconds[index], self.counts[index] = second, 0
        self.counts[index] += 1

    def total(self, second: int) -> int:
        """The starts in the minute that ends with `second`."""
        window_start = second - _WINDOW_SECONDS
        return sum(count for count, when in zip(self.counts, self.seconds, strict=True) if when > window_start)


class Starts:
    """The attempts that started within the last minute. The main loop counts them, and the heartbeat's thread reads
    them.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._windows: dict[str, _Window] = {}
        self._lock = threading.Lock()

    def count(self, queue: str) -> None:
        """Count an attempt of this queue that starts now."""
        with self._lock:
            window = self._windows.get(queue)
            if window is None:
                window = self._windows[queue] = _Window()
            window.count(int(self._clock()))

    def per_minute(self) -> dict[str, int]:
        """Queue -> how many attempts started within the last minute. A queue without such attempts is left out."""
        with self._lock:
            now = int(self._clock())
            totals = {queue: window.total(now) for queue, window in self._windows.items()}
        return {queue: total for queue, total in totals.items() if total}
