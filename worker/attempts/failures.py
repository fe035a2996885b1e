"""Turns the exception of an attempt into a failure: a code, a cause, and the pause before the next attempt. The runner
calls this module when a handler, a child (the process of an isolated step) or the object store has raised an exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import dropwhile
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
from leasehold.telemetry.redaction import redact_start
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Failure

log = structlog.get_logger(__name__)

#: The pause after an unforeseen exception. Every exception of an isolated step's handler that is no StepError is
#: unforeseen. The second such exception in a row fails the task for good (see Runner).
_AFTER_UNFORESEEN = (timedelta(seconds=4),)
_MAX_MESSAGE = 2000  # characters
#: An error's code is cut to this many characters. An index on the jobs contains the code, and PostgreSQL refuses a long
#: index entry.
_MAX_CODE = 200
#: The folder of the worker's own code. In a traceback, the frames of the worker come before the frames of the handler,
#: and explain nothing.
_WORKER_FOLDER = __file__.removesuffix("attempts/failures.py")


def as_step_error(error: BaseException) -> StepError:
    """The step error for an exception of the handler, the child or the store."""
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
    """The traceback of an attempt's error and its causes, without the worker's frames above the handler's first frame.
    If no frame is outside of the worker's code, the traceback has all frames. For an isolated step, the child has
    already made the traceback (`error.trace`).
    """
    if isinstance(error, StepError) and error.trace:
        return error.trace
    formatter = TracebackException.from_exception(error)
    chain: list[TracebackException] = [formatter]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    handler_stacks = [_from_handler_on(part) for part in chain]
    if any(handler_stacks):
        for part, stack in zip(chain, handler_stacks, strict=True):
            part.stack = stack
    return "".join(formatter.format())  # the tracebacks of the error and of its causes


def _from_handler_on(part: TracebackException) -> StackSummary:
    """The stack from its first frame outside of the worker's code; empty if all frames are in the worker's code."""
    frames = dropwhile(lambda frame: frame.filename.startswith(_WORKER_FOLDER), part.stack)
    return StackSummary.from_list(list(frames))


def failure_of(claimed: Claimed, step: Step, error: StepError, ladder: Sequence[timedelta]) -> Failure:
    """The settlement of an attempt that ended with `error`. `ladder`: the delays before the task's further attempts."""
    cause = "timeout" if isinstance(error, StepTimeout) else "crash" if isinstance(error, ChildCrashed) else "error"
    # Crashes (ends of the child process) are counted separately from all other failures.
    failures_before = claimed.crashes if cause == "crash" else claimed.errors
    delay = delay_after(failures_before + 1, ladder)
    if isinstance(error, Unforeseen):
        delay = delay_after(1, _AFTER_UNFORESEEN)
    elif isinstance(error, Retryable) and error.after is not None:
        delay = error.after
    is_final = not error.retryable or (cause == "timeout" and step.timeout_is_final)
    return Failure(
        claimed.lease,
        cause,
        _storable(error.code, _MAX_CODE),
        _storable(error.message, _MAX_MESSAGE),
        not is_final,
        delay.total_seconds(),
    )


def _storable(text: str, limit: int) -> str:
    """The text without secrets, in a form that PostgreSQL can store, and cut to `limit` characters."""
    # Redact before the cut to `limit`, because the redaction does not recognise half of a secret.
    return storable_text(redact_start(text, 4 * _MAX_MESSAGE)[:limit])
