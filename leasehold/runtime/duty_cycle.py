"""How often something is done that reads all that has gone through since the last vacuum, and so may take long."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic


def pause_after(took: float, *, share: float, least: float, most: float) -> float:
    """Seconds to the next time, for it to be `share` of the time: at least `least`, but never more than `most`."""
    return min(max(least, took / share), most)


class Pauses:
    """A clock for such work: `due` at first, and again when the pause after `done` is over."""

    def __init__(self, *, share: float, least: float, most: float, clock: Callable[[], float] = monotonic) -> None:
        self._share, self._least, self._most = share, least, most
        self._clock = clock
        self._due_at = float("-inf")

    @property
    def due(self) -> bool:
        return self._clock() >= self._due_at

    def done(self, began: float) -> float:
        """The work that began at `began`, of the same clock, is over. Returns the pause, in seconds."""
        now = self._clock()
        pause = pause_after(now - began, share=self._share, least=self._least, most=self._most)
        self._due_at = now + pause
        return pause

    def forget(self) -> None:
        """It is due again."""
        self._due_at = float("-inf")
