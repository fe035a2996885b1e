"""The duty cycle of slow statements: the longer a statement took, the longer the pause before it runs again.

Some statements also read all rows that were deleted since the last vacuum, so their cost grows with the load. Such a
statement does not run at a fixed interval. Its pauses are so long that it runs for at most a fixed part of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic


def pause_after(seconds: float, *, share: float, at_least: float, at_most: float) -> float:
    """How many seconds to pause after work that took `seconds`, so that the work takes at most the part `share` (0 to
    1) of the time.

    The pause is `seconds / share`. Then `seconds` is the part `share` of the pause, and a little less than this part of
    the work and the pause together. But the pause is at least `at_least`, and never longer than `at_most`, even if the
    work then takes a larger part.
    """
    return min(max(at_least, seconds / share), at_most)


class Pauses:
    """Decides when repeated work is due: the first time immediately, and later when the pause after `done` is over. The
    pause is computed from the shorter of the last two durations, because a single slow execution may have waited for a
    lock or a processor. After the first execution there is only one duration, and the pause is `at_least`.
    """

    def __init__(
        self, *, share: float, at_least: float, at_most: float, clock: Callable[[], float] = monotonic
    ) -> None:
        self._share, self._at_least, self._at_most = share, at_least, at_most
        self._clock = clock
        self._due_at = float("-inf")
        self._last_seconds = 0.0

    @property
    def due(self) -> bool:
        return self._clock() >= self._due_at

    def done(self, began: float) -> float:
        """Record that the work has ended. `began`: its start on the same clock. Returns the pause in seconds."""
        now = self._clock()
        seconds = now - began
        shorter = min(seconds, self._last_seconds)
        self._last_seconds = seconds
        pause = pause_after(shorter, share=self._share, at_least=self._at_least, at_most=self._at_most)
        self._due_at = now + pause
        return pause

    def forget(self) -> None:
        """Make the work due immediately, although its pause is not over."""
        self._due_at = float("-inf")
