"""Measures and logs when a handler blocks the event loop, because then all other attempts of the worker wait."""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from time import monotonic, perf_counter
from typing import Any, Generic, NoReturn, TypeVar

import structlog

from leasehold.worker import metrics

_Result = TypeVar("_Result")
log = structlog.get_logger(__name__)

#: Seconds between two warnings about one step.
_REMINDER_SECONDS = 60.0
_warned_at: dict[tuple[str, str], float] = {}  # pipeline and step -> monotonic time of the last warning


class Watched(Awaitable[_Result], Generic[_Result]):
    """`await Watched(work, ...)` returns and raises the same as `await work`. If `work` runs for longer than
    `limit_seconds` without waiting, Watched measures this time and logs a warning, at most once a minute for each step.
    """

    def __init__(self, work: Awaitable[_Result], pipeline: str, step: str, limit_seconds: float) -> None:
        self._work = work
        self._labels = (pipeline, step)
        self._limit_seconds = limit_seconds

    def __await__(self) -> Generator[Any, Any, _Result]:
        """Do the same as `yield from`, in single steps, so that each step can be measured. A step runs `work` until it
        waits for a future. Then this method yields the future to the event loop, and gives the result to `work`.
        """
        inner = self._work.__await__()
        # The iterator of an awaitable need not be a generator. So it may lack `send` and `throw`.
        send, throw = getattr(inner, "send", lambda _value: next(inner)), getattr(inner, "throw", _raise)
        value: Any = None
        error: BaseException | None = None
        while True:
            began = perf_counter()
            try:
                future = send(value) if error is None else throw(error)
            except StopIteration as end:
                result: _Result = end.value
                return result
            finally:
                if (seconds := perf_counter() - began) > self._limit_seconds:
                    _record_block(*self._labels, seconds)
            value, error = None, None
            try:
                value = yield future
            except BaseException as raised:  # noqa: BLE001 - the handler gets the error, which is mostly a cancellation
                error = raised


def _raise(error: BaseException) -> NoReturn:
    raise error


def _record_block(pipeline: str, step: str, seconds: float) -> None:
    metrics.BLOCKED.labels(pipeline, step).observe(seconds)
    now = monotonic()
    if now - _warned_at.get((pipeline, step), -_REMINDER_SECONDS) >= _REMINDER_SECONDS:
        _warned_at[pipeline, step] = now
        log.warning(
            "a handler blocked the event loop, and all other attempts waited: make it a plain function, and it runs in "
            "a thread",
            pipeline=pipeline,
            step=step,
            seconds=round(seconds, 3),
        )
