"""Turns the exception of an attempt into a failure: a code, a cause, and the pause before the next attempt."""

from __future__ import annotations

from datetime import timedelta
from traceback import StackSummary, TracebackException

import structlog

from leasehold.domain.backoff import delay_after
from leasehold.domain.errors import (
    ChildCrashed,
    ObjectCorrupt,
    ObjectMissing,
    ObjectTooLarge,
    Permanent,
    Retryable,
    StepError,
    StepTimeout,
    StoreAbsent,
    StoreError,
    Unforeseen,
    is_disk_full,
)
from leasehold.domain.pipeline import Step
from leasehold.domain.storable import storable_text
from leasehold.runtime.foreign_errors import text_of
from leasehold.telemetry.redaction import redact
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Failure

log = structlog.get_logger(__name__)

#: The pause after an unforeseen exception. The second one in a row is permanent (see Runner).
_AFTER_UNFORESEEN = (timedelta(seconds=4),)
_MAX_MESSAGE = 2000  # characters
#: The folder of the worker's own code. Its frames stand above the handler's in a traceback, and explain nothing.
_OWN_FRAMES = __file__.removesuffix("attempts/failures.py")


def as_step_error(error: BaseException) -> StepError:
    """The step error that stands for `error`, which may be of the handler, the child or the store."""
    match error:
        case StepError():
            return error
        case StoreError():
            return _from_store_error(error)
        case OSError() if is_disk_full(error):
            return Retryable("the disk of the worker is full", code="disk_full")
        case _:
            log.error("handler failed", exc_info=error)
            return Retryable(text_of(error), code="handler_error")


def _from_store_error(error: StoreError) -> StepError:
    match error:
        case ObjectMissing():
            return Permanent("input_missing", f"not in the store: {error}")
        case ObjectTooLarge():
            return Permanent("input_too_large", str(error))
        case ObjectCorrupt():
            return Retryable(str(error), code="input_corrupt")
        case StoreAbsent():
            return Permanent("store_not_configured", str(error))
        case _:
            return Retryable(str(error), code="store_unavailable")


def traceback_of(error: BaseException) -> str:
    """The traceback of an attempt's error, from the handler's first frame on. For an isolated step, the child has
    sent it.
    """
    if isinstance(error, StepError) and error.trace:
        return error.trace
    formatter = TracebackException.from_exception(error)
    parts: list[TracebackException] = [formatter]
    while (cause := parts[-1].__cause__ or parts[-1].__context__) is not None:
        parts.append(cause)
    begins = [_begin_of_handler(part) for part in parts]
    if any(begin is not None for begin in begins):
        for part, begin in zip(parts, begins, strict=True):
            part.stack = StackSummary.from_list([] if begin is None else list(part.stack)[begin:])
    return "".join(formatter.format())


def _begin_of_handler(part: TracebackException) -> int | None:
    """The index of the first frame that is not the worker's; None: all frames are the worker's."""
    return next((n for n, frame in enumerate(part.stack) if not frame.filename.startswith(_OWN_FRAMES)), None)


def failure_of(claimed: Claimed, step: Step, error: StepError) -> Failure:
    """The settlement of an attempt that ended with `error`."""
    cause = "timeout" if isinstance(error, StepTimeout) else "crash" if isinstance(error, ChildCrashed) else "error"
    failures_before = claimed.crashes if cause == "crash" else claimed.errors
    delay = delay_after(failures_before + 1, step.retry_ladder)
    if isinstance(error, Unforeseen):
        delay = delay_after(1, _AFTER_UNFORESEEN)
    elif isinstance(error, Retryable) and error.after is not None:
        delay = error.after
    is_final = isinstance(error, Permanent) or (cause == "timeout" and step.timeout_is_final)
    retryable = error.retryable and not is_final
    return Failure(
        claimed.lease, cause, _storable(error.code), _storable(error.message), retryable, delay.total_seconds()
    )


def _storable(text: str) -> str:
    """The text without secrets, and in a form that PostgreSQL can store."""
    # Redact before the cut, because half of a secret is not recognised. The first cut bounds the time of the search.
    return storable_text(redact(text[: 4 * _MAX_MESSAGE])[:_MAX_MESSAGE])
