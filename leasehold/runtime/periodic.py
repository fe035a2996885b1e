"""`Periodic`: the one loop of everything that a process does again and again, whatever a turn of it meets.

A turn may fail in two ways. Something that it needs is away (the database, the store, the broker): it is tried again,
and is part of an outage that the whole process tells of once (see outages). Or it raises what nobody foresaw: that is
logged with its traceback once, counted, and tried again after growing pauses. Neither ends the loop, or the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from traceback import extract_tb

import structlog

from leasehold.domain.errors import BrokerUnavailable, StoreError
from leasehold.runtime.transient import TRY_AGAIN, may_try_again
from leasehold.telemetry.duties import ERRORS, STUCK
from leasehold.telemetry.outages import BROKER, DATABASE, STORE, Outage

log = structlog.get_logger(__name__)

#: What says that something is away, and nothing about the work.
AWAY: tuple[type[BaseException], ...] = (*TRY_AGAIN, StoreError, BrokerUnavailable)
#: The longest pause, in seconds, after turns that failed as nobody foresaw.
LONGEST_PAUSE = 60.0
#: Seconds between two lines about a failure that goes on.
_REMINDER = 60.0


class Periodic:
    """`turn` does the work once. It returns the seconds until the next turn, or None for `every`."""

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
        self._said_at = 0.0
        self._known: set[str] = set()
        ERRORS.labels(name)
        STUCK.labels(name)  # at 0 from the start, so that an alert sees the first

    async def run(self) -> None:
        """For ever; ends only when its task is cancelled."""
        while True:
            pause = await self.once()
            await asyncio.sleep(pause)

    async def once(self) -> float:
        """One turn, and the seconds until the next. Raises nothing but the cancellation of its own task."""
        try:
            pause = await self._turn()
        except AWAY as error:
            bad_value = isinstance(error, TRY_AGAIN) and not may_try_again(error)
            return self._failed(error) if bad_value else self._waits(error)
        except Exception as error:  # noqa: BLE001 - whatever it is: the other duties go on, and so does this one
            return self._failed(error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return self._waits(error)  # a library's own: aio-pika answers so when a connection ends under a publish
        if self._known:
            log.info("a duty works again", duty=self.name, after_seconds=round(self._clock() - self._failing_since, 1))
        self._failures = 0
        self._known.clear()
        return self._every if pause is None else pause

    def _waits(self, error: BaseException) -> float:
        """Said once an outage, whoever else notices it."""
        self._failures += 1
        outage_of(error).met(error, self.name)
        return min(self._every, _doubled(self._failures))

    def _failed(self, error: BaseException) -> float:
        ERRORS.labels(self.name).inc()
        speaks = self._speaks()
        kind = kind_of(error)
        if kind not in self._known:
            self._known.add(kind)
            log.error("a duty failed; it goes on", duty=self.name, error=type(error).__name__, exc_info=error)
        elif speaks:
            log.error("a duty still fails", duty=self.name, error=type(error).__name__, times=self._failures)
        return min(max(self._every, _doubled(self._failures)), LONGEST_PAUSE)

    def _speaks(self) -> bool:
        """Count a failure; whether it is time for a line about it."""
        now = self._clock()
        self._failures += 1
        if not self._known:
            self._failing_since = now
        elif now - self._said_at < _REMINDER:
            return False
        self._said_at = now
        return True


_told: set[str] = set()
#: The most kinds of errors whose tracebacks a process logs.
_MOST_TOLD = 1000


def first_of_kind(duty: str, error: BaseException) -> BaseException | None:
    """The error, for its traceback, if this process has logged none of one of its kind in the duty."""
    kind = f"{duty} {kind_of(error)}"
    if kind in _told or len(_told) >= _MOST_TOLD:
        return None
    _told.add(kind)
    return error


def unforeseen(duty: str, error: BaseException) -> None:
    """Of a loop that is no Periodic and must not end either: count the error, and log it."""
    ERRORS.labels(duty).inc()
    traceback = first_of_kind(duty, error)
    log.error("a duty failed; it goes on", duty=duty, error=type(error).__name__, exc_info=traceback)


def _doubled(failures: int) -> float:
    return float(2 ** min(failures - 1, 10))


def outage_of(error: BaseException) -> Outage:
    """Of what `error` says that it is away."""
    if isinstance(error, StoreError):
        return STORE
    return BROKER if isinstance(error, BrokerUnavailable | asyncio.CancelledError) else DATABASE


def kind_of(error: BaseException) -> str:
    """Equal for errors of one type from one place."""
    frames = extract_tb(error.__traceback__)
    return f"{type(error).__qualname__} {frames[-1].filename}:{frames[-1].lineno}" if frames else repr(type(error))
