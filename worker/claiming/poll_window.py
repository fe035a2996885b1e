"""How far back a look into the database has to read: the look before it took, or saw, all that was due by then.

Without it each look reads from the beginning of time, and so all that has gone through since the last vacuum, which
an old snapshot may hold up for hours. A task can become visible later than it became due (its transaction was slow),
or come back from far below (its queue was paused), so now and then a look reads everything.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from leasehold.runtime.duty_cycle import pause_after

#: A look reads everything when the last that did is so long ago: what was missed waits so long.
WHOLE_EVERY_SECONDS = 5.0
#: Where much has gone through since a vacuum that takes long, and whoever submits meanwhile waits for it: then it comes
#: so seldom that it takes no more than this share of the time, but so often at least.
WHOLE_SHARE = 1 / 200
WHOLE_AT_LEAST_EVERY_SECONDS = 60.0
#: How much later than it was due a task may become visible, for the very next look to see it.
SLACK_SECONDS = 2.0


class PollWindow:
    """Of the looks for one set of queues, or of the relay's."""

    def __init__(self, clock: Callable[[], float] = monotonic, whole_every: float = WHOLE_EVERY_SECONDS) -> None:
        self._clock = clock
        self._whole_every = whole_every
        self._seen_from: float | None = None  # nothing that was due before is left, as far as looks have seen
        self._whole_at = 0.0
        self._pause = whole_every

    def back(self) -> float | None:
        """Seconds that the next look has to go back; None: it shall see everything."""
        now = self._clock()
        if self._seen_from is None or now - self._whole_at >= self._pause:
            return None
        return now - self._seen_from

    def looked(self, asked_at: float, *, whole: bool, oldest: float | None, overdue: float) -> None:
        """A look, asked for at `asked_at` and answered now, found what was due for at most `oldest` seconds, or nothing
        (None); what was due for less than `overdue` was not for it to find.
        """
        if whole:
            self._whole_at = self._clock()
            took = self._whole_at - asked_at
            self._pause = pause_after(
                took, share=WHOLE_SHARE, least=self._whole_every, most=WHOLE_AT_LEAST_EVERY_SECONDS
            )
        self._seen_from = asked_at - max(oldest or 0.0, overdue) - SLACK_SECONDS

    def forget(self) -> None:
        """There was more than a look could take: the next shall see everything."""
        self._seen_from = None
