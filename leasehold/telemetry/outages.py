"""Logs outages: one line when an outage begins, one when it ends, and one a minute in between. The number of lines does
not depend on how many parts of the process notice the outage.

A process has one `Outage` for the database, one for the broker and one for the store. Code that meets an error calls
`record_error` and logs nothing itself. Code that gets an answer calls `record_answer`, which costs one comparison while
there is no outage.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

import structlog

log = structlog.get_logger(__name__)

#: Seconds between two log lines while an outage lasts.
REMINDER_SECONDS = 60.0
#: An answer ends the outage when the process has met no error for this many seconds. The parts of the process get
#: answers again one after another. Without this time, one outage would be logged as several.
SETTLED_SECONDS = 1.0


class Outage:
    """Whether one server (the database, the broker or the store) is away. Any thread may call the methods."""

    def __init__(self, server: str, *, clock: Callable[[], float] = monotonic) -> None:
        self._begin_message = f"the {server} is away; trying again until it is back"
        self._reminder = f"the {server} is still away"
        self._end_message = f"the {server} is back"
        self._clock = clock
        self._lock = threading.Lock()
        #: When the outage began, by `clock`; None: no outage lasts. The times below are those of the last error, of the
        #: last answer during an outage, and of the last log line.
        self._since: float | None = None
        self._error_at = 0.0
        self._answered_at = 0.0
        #: The event loop in which a timer of `_end_if_settled` runs.
        self._timer_loop: asyncio.AbstractEventLoop | None = None
        self._logged_at = 0.0
        self._errors = 0
        self._noticed_by: set[str] = set()
        #: How many answers came although the server counted as away.
        self.answers = 0

    @property
    def lasts(self) -> bool:
        """Whether the server is away now."""
        return self._since is not None

    def record_error(self, error: BaseException, noticed_by: str, **facts: object) -> None:
        """Record that the part `noticed_by` of the process met `error` and will try again. The first log line also has
        `facts`. Logs only the error's type, because its text may hold a row of the database.
        """
        with self._lock:
            now = self._clock()
            is_first = self._since is None
            self._since = now if self._since is None else self._since
            self._error_at = now
            self._errors += 1
            self._noticed_by.add(noticed_by)
            is_reminder = not is_first and now - self._logged_at >= REMINDER_SECONDS
            if is_first or is_reminder:
                self._logged_at = now
            seconds = round(now - self._since, 1)
        if is_first:
            log.warning(
                self._begin_message,
                noticed_by=noticed_by, error=type(error).__name__, **facts,
            )  # fmt: skip
        elif is_reminder:
            log.warning(
                self._reminder,
                away_seconds=seconds, errors=self._errors, noticed_by=sorted(self._noticed_by),
                error=type(error).__name__,
            )  # fmt: skip

    def record_answer(self) -> None:
        """Record an answer of the server. If the last error is at least SETTLED_SECONDS ago, the outage ends now.
        Otherwise a timer of the running event loop ends it (`_end_if_settled`).
        """
        if self._since is None:
            return
        self._answered_at = self._clock()
        self.answers += 1
        if self._answered_at - self._error_at >= SETTLED_SECONDS:
            self._end()
            return
        with suppress(RuntimeError):  # no event loop in this thread: a later answer ends the outage
            loop = asyncio.get_running_loop()
            if self._timer_loop is not loop:  # the timer of a loop that has ended never runs
                self._timer_loop = loop
                loop.call_later(SETTLED_SECONDS, self._end_if_settled)

    def _end_if_settled(self) -> None:
        """The timer of `record_answer`. If an error came after the last answer, it does nothing. Otherwise it ends the
        outage, or runs again SETTLED_SECONDS after the last error.
        """
        self._timer_loop = None
        if self._since is None or self._error_at > self._answered_at:
            return
        seconds_left = self._error_at + SETTLED_SECONDS - self._clock()
        if seconds_left <= 0:
            self._end()
        else:  # an error and an answer came while the timer ran
            self._timer_loop = asyncio.get_running_loop()
            self._timer_loop.call_later(seconds_left, self._end_if_settled)

    def _end(self) -> None:
        with self._lock:
            if self._since is None:
                return
            facts = {
                # Until the last error, because the server may have been back since then.
                "away_seconds": round(self._error_at - self._since, 1),
                "errors": self._errors,
                "noticed_by": sorted(self._noticed_by),
            }
            self._since = None
            self._errors = 0
            self._noticed_by.clear()
        log.info(self._end_message, **facts)


DATABASE = Outage("database")
BROKER = Outage("broker")
STORE = Outage("object store")
