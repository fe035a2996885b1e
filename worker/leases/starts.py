"""Counts the attempts that this worker starts, by queue. The heartbeat writes the counts into the worker's row, and the
list of queues adds up those of all workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

_WINDOW_SECONDS = 60


class _Window:
    """The starts in one queue, by second. The starts of a second stand at `second % 60`, until a later second takes
    that place.
    """

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * _WINDOW_SECONDS
        self.seconds = [-_WINDOW_SECONDS] * _WINDOW_SECONDS  # the second whose starts stand at each place

    def count(self, second: int) -> None:
        place = second % _WINDOW_SECONDS
        if self.seconds[place] != second:
            self.seconds[place], self.counts[place] = second, 0
        self.counts[place] += 1

    def total(self, second: int) -> int:
        """The starts in the minute that ends with `second`."""
        oldest = second - _WINDOW_SECONDS
        return sum(count for count, at in zip(self.counts, self.seconds, strict=True) if at > oldest)


class Starts:
    """The attempts that started within the last minute. The main loop counts them, and the heartbeat's thread reads
    them.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._windows: dict[str, _Window] = {}
        self._lock = threading.Lock()

    def count(self, queue: str) -> None:
        """An attempt of this queue starts now."""
        with self._lock:
            window = self._windows.get(queue)
            if window is None:
                window = self._windows[queue] = _Window()
            window.count(int(self._clock()))

    def per_minute(self) -> dict[str, int]:
        """Queue -> attempts that started within the last minute. Queues without any are absent."""
        with self._lock:
            now = int(self._clock())
            totals = {queue: window.total(now) for queue, window in self._windows.items()}
        return {queue: total for queue, total in totals.items() if total}
