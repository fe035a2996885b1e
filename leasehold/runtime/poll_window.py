"""How far back a poll (a query that looks for due rows) has to read in an index of due times.

A poll reads every row that is due at its start, so the next poll has to read only rows that became due later. They lie
in the poll window. Without a window, each poll would read the index from its beginning, with all row versions that
vacuum has not removed yet. An old snapshot can delay the vacuum for hours.

A window misses two kinds of rows: rows of a slow transaction, which become visible late, and old rows of a queue that
was paused. So from time to time a poll reads all due rows. This is a whole poll.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from leasehold.runtime.duty_cycle import Pauses

#: Seconds between two whole polls. A row that was due before the window normally waits at most this long.
WHOLE_EVERY_SECONDS = 5.0
#: If many rows were deleted or changed since the last vacuum, a whole poll takes long, and leaves PostgreSQL less
#: processor time for the submissions of jobs. So whole polls take at most this part of the time. There are two
#: exceptions: a whole poll is always due WHOLE_MAX_PAUSE_SECONDS after the last whole poll, and immediately after
#: `forget`.
WHOLE_SHARE = 1 / 200
WHOLE_MAX_PAUSE_SECONDS = 60.0
#: If a row becomes visible at most this many seconds after it was due, the next poll's window still contains it.
SLACK_SECONDS = 2.0


class PollWindow:
    """The window of one series of polls, for example the polls of a slot pool (a worker's room for attempts), or of the
    relay (the loop that publishes messages of the outbox).
    """

    def __init__(self, clock: Callable[[], float] = monotonic, whole_every: float = WHOLE_EVERY_SECONDS) -> None:
        self._clock = clock
        self._read_from: float | None = None  # the next poll need not read rows that were due before this time
        self._whole_polls = Pauses(
            share=WHOLE_SHARE, at_least=whole_every, at_most=WHOLE_MAX_PAUSE_SECONDS, clock=clock
        )

    def seconds_back(self) -> float | None:
        """How many seconds back the next poll reads; None: the next poll reads all due rows."""
        if self._read_from is None or self._whole_polls.due:
            return None
        return self._clock() - self._read_from

    def polled(self, started_at: float, *, whole: bool, oldest: float | None, min_overdue: float) -> None:
        """Record a poll that ran from `started_at` until now. `whole`: it read all due rows. `min_overdue`: the poll
        left out rows that had been due for fewer seconds than this, because their hints (messages that name them) may
        still come. `oldest`: the longest time, in seconds, for which a row that the poll read had been due; None: no
        row that the poll read still waits.
        """
        if whole:
            self._whole_polls.done(started_at)
        # Two kinds of rows still wait: rows that the poll left out, and rows that it read and did not take. So the next
        # poll reads back at least to the oldest of these rows.
        self._read_from = started_at - max(oldest or 0.0, min_overdue) - SLACK_SECONDS

    def forget(self) -> None:
        """Make the next poll read all due rows. Call this after `polled` if the poll stopped at its limit and `oldest`
        was None. The due rows that the poll did not read may then be older than the next window.
        """
        self._read_from = None
