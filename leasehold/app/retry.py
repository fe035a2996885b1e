"""`Retry` declares how often a task is tried again, after which delays, and after which exceptions it is not tried
again.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from leasehold.app.source_location import PlaceOfCaller
from leasehold.domain.backoff import LONGEST
from leasehold.domain.errors import DeclarationError
from leasehold.domain.option_types import check_time, check_whole

#: More retries help nobody. The columns `max_attempts` and `errors` of `task` are smallints, which have room for this
#: number.
MAX_TIMES = 1000
#: A larger factor would reach the longest delay after the first two or three tries.
MAX_FACTOR = 100


@dataclass(frozen=True, slots=True)
class Retry:
    """`times`: how often the task is tried again after failures. With 0, the first failure is final.

    The first delay is `delay`. Each further delay is `factor` times as long, and none is longer than `longest`. The
    worker shortens each delay at random, by up to half, so that tasks which failed together are not tried again
    together. `never`: exceptions after which no attempt follows. If `StepTimeout` is one of them, no attempt follows an
    attempt that has exceeded its time limit.
    """

    times: int = 4
    delay: timedelta = timedelta(seconds=2)
    factor: float = 4.0
    longest: timedelta = timedelta(hours=1)
    never: tuple[type[Exception], ...] = ()

    def __post_init__(self) -> None:
        with PlaceOfCaller():
            self._check()

    def _check(self) -> None:
        """Raises DeclarationError."""
        check_whole("Retry.times", self.times)
        check_time("Retry.delay", self.delay)
        check_time("Retry.longest", self.longest)
        if not 0 <= self.times <= MAX_TIMES:
            raise DeclarationError(f"Retry.times must be 0 to {MAX_TIMES}, not {self.times}")
        if self.delay < timedelta(0) or self.longest < timedelta(0):
            raise DeclarationError("Retry.delay and Retry.longest must not be negative")
        if self.delay > LONGEST or self.longest > LONGEST:
            raise DeclarationError(f"Retry.delay and Retry.longest must be at most {LONGEST.days} days")
        factor: object = self.factor  # type checkers know its type, but nothing checks what a program gives
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            raise DeclarationError(f"Retry.factor is a number, not {factor!r}")
        never: object = self.never  # as above
        if not isinstance(never, tuple) or not all(map(_is_exception, never)):
            raise DeclarationError(f"Retry.never is a tuple of exceptions such as (ValueError,), not {never!r}")
        if not 1 <= self.factor <= MAX_FACTOR:
            raise DeclarationError(f"Retry.factor must be 1 to {MAX_FACTOR}, not {self.factor}")

    @property
    def ladder(self) -> tuple[timedelta, ...]:
        """The delays before the retries, in order. The last delay also applies to all further retries."""
        delays: list[timedelta] = []
        delay = min(self.delay, self.longest)
        while len(delays) < max(self.times, 1):
            delays.append(delay)
            if delay in (self.longest, timedelta(0)):
                break
            delay = min(delay * self.factor, self.longest)
        return tuple(delays)


def _is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)
