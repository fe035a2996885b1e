"""The errors that the platform raises on purpose, as one tree: to catch a class is to catch every class below it. Some
modules add errors of their own, most of them below LeaseholdError.

LeaseholdError
├── RequestError                a request cannot be done; the API's problem has its stable code (api/http/problems.py)
│   ├── Unauthenticated         401  no key, a bad key, a revoked key
│   ├── Forbidden               403  the key lacks the scope
│   ├── NotFound                404  does not exist, or belongs to another tenant
│   ├── Conflict                409  not possible in the present state
│   ├── Gone                    410  existed, and has expired or was deleted
│   ├── BodyTooSlow             408  the body did not arrive in time
│   ├── BodyTooLarge            413  the body has more bytes than the endpoint accepts
│   ├── WrongCell               421  the tenant, or its key, belongs to another cell (installation)
│   ├── Unsupported             415  a media type or kind that this installation does not accept
│   ├── Invalid                 422  well-formed, but not acceptable
│   │   └── InvalidArguments    422  the arguments of a task do not fit its parameters
│   ├── TooMany                 429  a limit is reached: try again later
│   ├── BadGateway              502  a service that the platform called for the caller failed
│   └── Unavailable             503  PostgreSQL or another part is down: try again
│       ├── Unanswered          503  no answer to a submission: its runs may or may not have been written
│       └── Unreachable         503  PostgreSQL did not answer a program that reads, cancels or signals a run
├── BadSetting                  a LEASEHOLD_* variable cannot be used: the process refuses to start
├── DeclarationError            a pipeline is declared wrongly: the process refuses to start
│   └── CodeBroken              a module of the user's raised an error while it was imported
├── SchemaLocked                a migration did not get a lock on a table in time: run it again
├── TaskFailed                  a run that was waited for has failed, expired or was cancelled
│   └── SignalInvalid           a workflow consumed a signal whose payload does not fit the model of its wait
├── NotWhileUndoing             a workflow whose run is being cancelled made a call that such a run cannot make
├── TransactionRefused          `submit_in` could not write in the caller's transaction: nothing was written
├── HandlerMissing              a workflow needs the code of a task that this process lacks: another worker may have it
├── ResultUnreadable            a stored result does not fit the type that the code declares for it
├── LeaseLost                   a write carried a lease that the task no longer has
├── StepError                   an attempt at a step failed
│   ├── Retryable               worth another attempt, after the step's next retry delay or after `after`
│   │   └── Unforeseen          an isolated handler raised an error of another kind: worth one more attempt, soon
│   ├── Permanent               cannot succeed: fails the job immediately
│   ├── StepTimeout             the attempt ran past its time limit
│   └── ChildCrashed            the child process died by a signal or its memory limit: a second crash fails the task
├── StoreError                  the object store failed
│   ├── StoreAbsent             the installation has no store: LEASEHOLD_OBJECT_STORE=none
│   ├── ObjectMissing           no object has this key
│   ├── ObjectExists            a create-only put found an object with other bytes
│   ├── ObjectCorrupt           size or sha256 differ from the committed row
│   ├── ObjectTooLarge          the object has more bytes than the reader allows
│   └── StoreUnavailable        timeouts, 5xx, refused connections: try again
└── BrokerUnavailable           not connected, or a publish was not confirmed

Cancelled(BaseException)        the job was cancelled; a handler's `except Exception` does not catch it
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import ceil
from typing import Any
from uuid import UUID

from leasehold.domain.sentences import full_stop, with_article


class LeaseholdError(Exception):
    """The root of the tree. (Cancelled is outside of the tree, because it is no Exception.)"""

    def __reduce__(self) -> tuple[Any, ...]:
        """Make `pickle` restore an error without a call of `__init__`. By default `pickle` passes `args` to `__init__`,
        and many errors here have other parameters. A process pool pickles the errors that it returns.
        """
        return _restore, (type(self), self.args, vars(self))


def _restore(kind: type[LeaseholdError], args: tuple[Any, ...], attributes: dict[str, Any]) -> LeaseholdError:
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error


class BadSetting(LeaseholdError):
    """A LEASEHOLD_* variable cannot be used. `name`: the variable. `sentence`: the reason; it holds no secret."""

    def __init__(self, name: str, sentence: str) -> None:
        super().__init__(f"{name}: {sentence}.")
        self.name = name


class RequestError(LeaseholdError):
    """A request that cannot be done.

    `code`: stable, for programs. `message`: for people. `retry_after`: seconds. `headers`: added to the HTTP answer.
    """

    def __init__(
        self, code: str, message: str, *, retry_after: float | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after = retry_after
        self.headers = headers or {}


class Unauthenticated(RequestError):
    pass


class Forbidden(RequestError):
    pass


class NotFound(RequestError):
    pass


class Conflict(RequestError):
    pass


class Gone(RequestError):
    pass


class WrongCell(RequestError):
    """The caller's tenant belongs to another cell, which is another installation. `address`: the URL of its API."""

    #: The header of the HTTP answer with the address.
    HEADER = "Leasehold-Cell-Address"

    def __init__(self, cell: str, address: str) -> None:
        super().__init__("wrong_cell", f"Send this to cell {cell}, at {address}.", headers={self.HEADER: address})
        self.cell = cell
        self.address = address


class BodyTooLarge(RequestError):
    pass


class BodyTooSlow(RequestError):
    pass


class Unsupported(RequestError):
    pass


class Invalid(RequestError):
    pass


class InvalidArguments(Invalid):
    """The arguments of a task do not fit its parameters. `path`: the JSON pointer to the argument that does not fit. If
    `path` is empty, the call as a whole does not fit.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__("invalid_arguments", f"{path}: {reason}" if path else reason)
        self.path = path


class TooMany(RequestError):
    """A limit is reached. `policy`: the limit's name. `at_most`: the number that the limit allows. If the limit is a
    rate, it allows this number within `window` seconds.

    The RateLimit header fields of the HTTP answer have these values.
    """

    def __init__(
        self, code: str, message: str, *, policy: str, at_most: int, retry_after: float, window: int | None = None
    ) -> None:
        window_field = "" if window is None else f";w={window}"
        fields = {
            "RateLimit-Policy": f'"{policy}";q={at_most}{window_field}',
            "RateLimit": f'"{policy}";r=0;t={max(1, ceil(retry_after))}',
        }
        super().__init__(code, message, retry_after=retry_after, headers=fields)


class BadGateway(RequestError):
    pass


class Unavailable(RequestError):
    pass


class Unanswered(Unavailable):
    """A submission got no answer. `ids`: the ids of the submitted runs. Each run may or may not have been written.
    Submit the runs again with these ids (`id=`). This is safe, because a run that exists is not written again.
    """

    def __init__(self, ids: Sequence[UUID], seconds: float) -> None:
        super().__init__(
            "submission_unanswered",
            f"No answer for {seconds:g} s: the runs may or may not exist. Submit them again with their ids.",
        )
        self.ids = list(ids)


class Unreachable(Unavailable):
    """PostgreSQL did not answer a program that reads, cancels or signals the run `run_id`. The run itself goes on.
    `run_id`: the run's id, or a `task_id` of Celery as a text.
    """

    def __init__(self, run_id: UUID | str, reason: str) -> None:
        super().__init__("database_unreachable", full_stop(f"No answer of PostgreSQL about run {run_id}: {reason}"))
        self.run_id = run_id


class DeclarationError(LeaseholdError):
    """A pipeline, step or handler is declared wrongly."""


class CodeBroken(DeclarationError):
    """A module of the user raised an error while it was imported. `trace`: the traceback, without the platform's own
    frames.
    """

    #: A program that meets this error exits with this status.
    exit_status = 4

    def __init__(self, sentence: str, trace: str) -> None:
        super().__init__(sentence)
        self.trace = trace


class SchemaLocked(LeaseholdError):
    """A migration did not get a lock in time. The revisions that it has applied stay, and the next migration continues
    after them.
    """

    def __init__(self, seconds: float, blockers: Sequence[str]) -> None:
        # `blockers`: a sentence about each session that holds the lock.
        holders = f" In its way: {'; '.join(blockers)}." if blockers else ""
        super().__init__(
            f"The migration did not get a lock on a table within {seconds:g} s (LEASEHOLD_MIGRATE_SECONDS).{holders}"
            " What was done is kept: run it again."
        )


class TaskFailed(LeaseholdError):
    """A run did not succeed. `code` is stable: the error code of the step that failed for good, or `cancelled` or
    `expired`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class SignalInvalid(TaskFailed):
    """The payload of a signal does not fit the model of the wait that consumed it. When the signal came, it was not
    refused, for one of two reasons. The wait had not begun, so its model was unknown. Or the payload fits the JSON
    Schema of the model, and only a validator of the model refuses it.

    `path`: the JSON pointer to the value that does not fit. If `path` is empty, the payload as a whole does not fit.
    """

    def __init__(self, signal: str, path: str, reason: str) -> None:
        super().__init__(
            "signal_invalid",
            f"the payload of the signal {signal} does not fit at {path or 'its root'}: {full_stop(reason)} This signal"
            " is consumed. The workflow may catch SignalInvalid and wait again. If this error ended the run, a retry of"
            " the run waits again. Then a caller with the scope runs:write can send the signal again",
        )
        self.signal = signal
        self.path = path
        self.reason = reason


class NotWhileUndoing(LeaseholdError):
    """A workflow awaited a call that it cannot make while its run is being cancelled. It cannot call a step, because no
    worker would claim the step. It cannot wait, because the wait could outlast the grace (the time that a cancelled run
    has to undo its work). `call`: the call's kind and name.
    """

    def __init__(self, call: str) -> None:
        super().__init__(
            f"{call}: the run is being cancelled, and starts no step and no wait any more. Undo its work by ctx.call,"
            " or by a run of its own, which is not cancelled, by ctx.detached.start"
        )
        self.call = call


class HandlerMissing(LeaseholdError):
    """A workflow of the platform cannot begin in this process, which lacks the code of a task that the workflow calls.
    `handlers`: the names, each `pipeline.step`, of the code of all tasks that the workflow calls. A worker needs all of
    this code. If `handlers` is empty, the name of the missing code is unknown.
    """

    def __init__(self, handlers: Sequence[str]) -> None:
        super().__init__(f"this process lacks the code of a task: {', '.join(handlers) or 'its name is unknown'}")
        self.handlers = handlers


class ResultUnreadable(LeaseholdError):
    """The stored result of a run does not fit the type that the code declares for it."""


class TransactionRefused(LeaseholdError):
    """`submit_in` got a connection in autocommit, or in a transaction that has failed. Nothing was written."""


class LeaseLost(LeaseholdError):
    """This process no longer holds the task's lease, because another claim, a cancel or the sweeper (which ends expired
    leases) ended the lease. The code that meets this error must write nothing more for the attempt.
    """


class StepError(LeaseholdError):
    """An attempt failed. `code` is stable. The job's owner reads `message`, so put no secret into it. `trace`: the
    traceback as text, if another process raised the error.
    """

    retryable: bool = True
    trace: str = ""

    def __init__(self, code: str, message: str) -> None:
        message = str(message)  # a handler may pass an exception, against the annotation
        super().__init__(message)
        self.code = str(code)
        self.message = message


class Retryable(StepError):
    """The attempt failed, and another attempt may succeed. `after`: the delay before the next attempt; None: the next
    delay of the step's `retry_ladder`. Raises TypeError when `after` is not a timedelta.
    """

    def __init__(self, message: str, *, code: str = "retryable", after: timedelta | None = None) -> None:
        super().__init__(code, message)
        if not isinstance(after, timedelta | None):
            raise TypeError(f"after is a timedelta, not {with_article(type(after).__name__)}")
        self.after = after


class Unforeseen(Retryable):
    """An isolated handler (one in a child process) raised an error that is not a StepError. One more attempt follows.
    If the code is at fault, this attempt raises the error again. If the machine was at fault, this attempt may succeed.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, code="handler_error")


class Permanent(StepError):
    """No attempt can succeed, so the job fails immediately."""

    retryable = False


class StepTimeout(StepError):
    """The step ran longer than its `timeout`. If it ran in a child process, the worker has killed this process."""


class ChildCrashed(StepError):
    """The child process died by a signal or reached its memory limit."""


class StoreError(LeaseholdError):
    """An operation of the object store failed."""


class StoreAbsent(StoreError):
    """This installation has no object store (LEASEHOLD_OBJECT_STORE=none)."""


class ObjectMissing(StoreError):
    pass


class ObjectExists(StoreError):
    pass


#: These errors mean that another attempt may hold the task by now. An attempt that meets one of them must settle
#: nothing. So code that catches the errors of a handler must raise these errors again.
OVERTAKEN = (LeaseLost, ObjectExists)


class ObjectCorrupt(StoreError):
    pass


class ObjectTooLarge(StoreError):
    pass


class StoreUnavailable(StoreError):
    pass


class BrokerUnavailable(LeaseholdError):
    """The broker is not connected, or it did not confirm a publish, so the message may or may not have arrived."""


class Cancelled(BaseException):
    """Raised inside a handler, at its next checkpoint, after a cancel of its job was requested."""


def deciding(error: BaseException) -> BaseException:
    """The error that decides how an attempt ends. For an error that is no group, this is the error itself. A group, as
    asyncio.TaskGroup raises it, may have several errors. Then the kinds are tried in this order: LeaseLost and
    ObjectExists (OVERTAKEN), Cancelled, Permanent, any other StepError. The first error of the first kind that the
    group has decides. If the group has no error of these kinds, its only error decides. If it has several, the group
    itself decides.
    """
    if not isinstance(error, BaseExceptionGroup):
        return error
    errors = errors_of(error)
    for kinds in (OVERTAKEN, Cancelled, Permanent, StepError):
        for one in errors:
            if isinstance(one, kinds):
                return one
    return errors[0] if len(errors) == 1 else error


def errors_of(error: BaseException) -> list[BaseException]:
    """The errors in a group, and in the groups inside the group. For an error that is no group: a list of this error
    alone.
    """
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [one for part in error.exceptions for one in errors_of(part)]


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed because the disk, or this user's quota of it, is full. The work itself may be sound."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
