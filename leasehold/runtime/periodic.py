"""Periodic: the loop of a duty, which is work that a process repeats for as long as it runs. For loops that are no
Periodic, `record_unforeseen` counts and logs an error.

A turn (one execution of the work) can fail in two ways. In both cases, the loop goes on.
- Outage: PostgreSQL, the store or the broker does not answer. The process logs one outage for all its duties
  (telemetry/outages.py). The pause until the next turn is never longer than usual, because an outage may end soon.
- Failure of the duty: any other error. It is counted, and is logged with its traceback once. The pauses grow with each
  failure, up to LONGEST_PAUSE. An error that looks like an outage also counts as such a failure, if it comes again and
  again while other parts of the process get answers. For example, a statement that always takes too long raises such an
  error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from traceback import extract_tb

import structlog

from leasehold.domain.errors import BrokerUnavailable, StoreError
from leasehold.runtime.gather import being_cancelled, check_not_cancelled
from leasehold.runtime.transient import TRY_AGAIN, may_try_again
from leasehold.telemetry.duties import ERRORS, STUCK
from leasehold.telemetry.outages import BROKER, DATABASE, STORE, Outage

log = structlog.get_logger(__name__)

#: Errors that look like an outage: PostgreSQL, the store or the broker does not answer.
AWAY: tuple[type[BaseException], ...] = (*TRY_AGAIN, StoreError, BrokerUnavailable)
#: An error that looks like an outage is suspicious if other parts of the process have got an answer since the duty's
#: previous error. The duty is at fault when it has had this many suspicious errors since its last success.
_MAX_ANSWERED = 5
#: The longest pause, in seconds, after failures that are not an outage.
LONGEST_PAUSE = 60.0
#: Seconds between two log lines about a failure that continues.
_REMINDER_SECONDS = 60.0


class Periodic:
    """The loop of one duty. `turn` does the work once and returns the seconds until the next turn; None: `every`."""

    def __init__(
        self,
        name: str,
        turn: Callable[[], Awaitable[float | None]],
        *,
        every: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.name = name
        self._turn = turn
        self._every = every
        self._clock = clock
        self._failures = 0
        self._failing_since = 0.0
        self._logged_at = 0.0
        self._logged_kinds: set[str] = set()
        #: The outage that the last turn met, and the value of `Outage.answers` (the answers that other parts of the
        #: process had got) at that time; None: the last turn met no outage.
        self._met: tuple[Outage, int] | None = None
        #: The number of suspicious errors (see `_MAX_ANSWERED`) since the last success.
        self._answered = 0
        ERRORS.labels(name)
        STUCK.labels(name)  # both metrics exist at 0 from the start, so that an alert sees the first increase

    async def run(self) -> None:
        """Run turns until the task is cancelled."""
        while True:
            pause = await self.once()
            check_not_cancelled()
            await asyncio.sleep(pause)

    async def once(self) -> float:
        """Run one turn, and return the seconds until the next. Raises only the cancellation of its own task."""
        try:
            pause = await self._turn()
        except AWAY as error:
            # asyncpg also raises an error of TRY_AGAIN for a value that it cannot encode. That is no outage.
            is_bad_value = isinstance(error, TRY_AGAIN) and not may_try_again(error)
            return self._after_failure(error) if is_bad_value else self._after_outage(error)
        except Exception as error:  # noqa: BLE001 - of any kind: no error may end a duty
            return self._after_failure(error)
        except asyncio.CancelledError as error:
            if being_cancelled():
                raise
            return self._after_outage(error)  # aio-pika raises CancelledError when the connection ends during a publish
        if self._logged_kinds:
            log.info("a duty works again", duty=self.name, after_seconds=round(self._clock() - self._failing_since, 1))
        self._failures = self._answered = 0
        self._met = None
        self._logged_kinds.clear()
        return self._every if pause is None else pause

    def _after_outage(self, error: BaseException) -> float:
        """Record an outage, which the process logs once for all duties. If the duty is at fault, record a failure of
        the duty instead. Returns the pause until the next turn.
        """
        outage = outage_of(error)
        if self._is_at_fault(outage):
            self._after_failure(error)
        else:
            self._failures += 1
            outage.record_error(error, self.name)
        self._met = outage, outage.answers
        return min(self._every, _growing_pause(self._failures))  # at most `every`, because an outage may end soon

    def _is_at_fault(self, outage: Outage) -> bool:
        """Whether the duty is at fault for an error that looks like `outage`."""
        if self._met is None or self._met[0] is not outage:
            return False
        if outage.lasts and self._met[1] == outage.answers:  # no part of the process got an answer since the last turn
            return False
        self._answered += 1
        return self._answered >= _MAX_ANSWERED

    def _after_failure(self, error: BaseException) -> float:
        """Count and log an error of the duty. Each kind of error is logged once with its traceback. Returns the pause
        until the next turn.
        """
        ERRORS.labels(self.name).inc()
        is_reminder_due = self._count_failure()
        kind = kind_of(error)
        if kind not in self._logged_kinds:
            self._logged_kinds.add(kind)
            log.error("a duty failed; it goes on", duty=self.name, error=type(error).__name__, exc_info=error)
        elif is_reminder_due:
            log.error("a duty still fails", duty=self.name, error=type(error).__name__, times=self._failures)
        return min(max(self._every, _growing_pause(self._failures)), LONGEST_PAUSE)

    def _count_failure(self) -> bool:
        """Count a failure. Returns whether a log line about it is due."""
        now = self._clock()
        self._failures += 1
        if not self._logged_kinds:  # the first failure after a success
            self._failing_since = now
        elif now - self._logged_at < _REMINDER_SECONDS:
            return False
        self._logged_at = now
        return True


_kinds_logged_by_process: set[str] = set()
#: The most kinds of errors whose tracebacks a process logs.
_MAX_LOGGED = 1000


def first_of_kind(duty: str, error: BaseException) -> BaseException | None:
    """Returns the error if it is the first of its kind in this duty, so that the caller logs its traceback. Returns
    None for a later error of the kind, and after `_MAX_LOGGED` kinds of errors in this process.
    """
    kind = f"{duty} {kind_of(error)}"
    if kind in _kinds_logged_by_process or len(_kinds_logged_by_process) >= _MAX_LOGGED:
        return None
    _kinds_logged_by_process.add(kind)
    return error


def record_unforeseen(duty: str, error: BaseException) -> None:
    """Count and log an error of a loop that is not a Periodic, but also goes on after the error."""
    ERRORS.labels(duty).inc()
    traceback = first_of_kind(duty, error)
    log.error("a duty failed; it goes on", duty=duty, error=type(error).__name__, exc_info=traceback)


def _growing_pause(failures: int) -> float:
    # 1, 2, 4, ... seconds, at most 1024.
    return float(2 ** min(failures - 1, 10))


def outage_of(error: BaseException) -> Outage:
    """The outage that `error` belongs to: of the store, the broker or the database."""
    if isinstance(error, StoreError):
        return STORE
    return BROKER if isinstance(error, BrokerUnavailable | asyncio.CancelledError) else DATABASE


def kind_of(error: BaseException) -> str:
    """A text that is equal for errors of one type from one line of code."""
    frames = extract_tb(error.__traceback__)
    return f"{type(error).__qualname__} {frames[-1].filename}:{frames[-1].lineno}" if frames else repr(type(error))
