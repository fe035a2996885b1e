"""`CeleryTask`: a function of a Celery program. A Leasehold task with the parameters `args` and `kwargs` calls it."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from leasehold.app.calls import Options
from leasehold.app.current import Current, current
from leasehold.app.retry import MAX_TIMES
from leasehold.app.retry import Retry as RetryRule
from leasehold.app.task import Prepared
from leasehold.celery.apps import CeleryApp
from leasehold.celery.canvas import Signature
from leasehold.celery.exceptions import MaxRetriesExceededError, NotSupported, Retry
from leasehold.celery.lacking import OF_REQUEST, OF_TASK, Lacking
from leasehold.celery.options import IGNORED, CeleryOptions, not_supported
from leasehold.celery.result import EXPIRED, AsyncResult
from leasehold.domain.celery_ids import celery_id_of, run_id_in
from leasehold.domain.errors import (
    OVERTAKEN,
    Permanent,
    Retryable,
    StepError,
    StepTimeout,
    StoreUnavailable,
    deciding,
)
from leasehold.domain.sentences import counted
from leasehold.runtime.foreign_errors import text_of

if TYPE_CHECKING:
    from uuid import UUID

    from leasehold.app.task import Task

#: Celery's priorities are 0 to 9. Here a priority of at least _HIGH_FROM is `high`, a priority below _LOW_BELOW is
#: `low`, and any other is `normal`.
_HIGH_FROM, _LOW_BELOW = 7, 3
#: Options of apply_async that a signature may have in Celery. Here `CeleryTask.signature` refuses them.
_APPLY_OPTIONS = ("countdown", "eta", "expires", "priority", "task_id")


class Request(Lacking):
    """`self.request` of a task with `bind=True`. `attempt`: the attempt that calls the function. None: the program
    calls the function directly, and the request has no id. `id`: the id with which AsyncResult finds the call. It is
    the `task_id` that the program gave, or else the id of the run. Each call of a chain, group or chord has an id of
    its own, because all these calls are steps of one run. A retry keeps the id.
    """

    _IN_CELERY, _LACKS = "Context", OF_REQUEST  # Celery's class, and its attributes that are missing here

    def __init__(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        attempt: Current | None = None,
        task_id: str | None = None,
    ) -> None:
        self.id = task_id if task_id is not None or attempt is None else _id_of(attempt)
        # Only attempts that ended with an error count, because an attempt whose worker was lost must not use up
        # `max_retries`.
        self.retries: int = 0 if attempt is None else attempt.attempt.errors
        self.called_directly = attempt is None
        self.args = list(args)
        self.kwargs = dict(kwargs or {})
        self.delivery_info: dict[str, str] = {}
        self.is_eager = False


class CeleryTask(Lacking):
    """A function of a Celery program, declared as a task. A call of the object runs the function in this process.
    `name`: the task's name in Celery. `task`: the task in Leasehold.
    """

    _IN_CELERY, _LACKS = "Task", OF_TASK  # Celery's class, and its attributes that are missing here
    MaxRetriesExceededError = MaxRetriesExceededError

    def __init__(self, app: CeleryApp, function: Callable[..., Any], name: str, options: CeleryOptions) -> None:
        self.app = app
        self.name = name
        self.run = function
        #: The function that an attempt calls. The testing kit replaces it.
        self.function_of_attempts = function
        self.options = options
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__
        self.__wrapped__ = function
        self.request = Request()
        signature = inspect.signature(function)
        if options.bind:
            signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        self._signature = signature
        self.task: Task[..., Any] = app.declare(self)

    def __repr__(self) -> str:
        return f"<@task: {self.name} of {self.app.main}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.options.bind:
            return self.run(*args, **kwargs)
        return self.run(_BoundSelf(self, Request(args, kwargs)), *args, **kwargs)

    @property
    def queue(self) -> str:
        """The queue that the task's declaration names, or else the app's default queue."""
        return self.options.queue or self.app.default_queue

    # --- submitting

    def delay(self, *args: Any, **kwargs: Any) -> AsyncResult:
        """Submit a run. Raises TypeError for arguments that the function does not take."""
        return self.apply_async(args, kwargs)

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        countdown: float | None = None,
        eta: datetime | None = None,
        expires: float | datetime | None = None,
        queue: str | None = None,
        priority: int | None = None,
        task_id: str | None = None,
        **other_options: Any,
    ) -> AsyncResult:
        """Submit a run. `countdown`: the run starts after this many seconds. `eta`: the run starts at this time, in
        place of `countdown`. A run whose attempt begins after `expires` is REVOKED. `priority`: 0 to 9, 9 is the most
        urgent. `task_id`: a text of 1 to 64 characters. If the task has a run with the same `task_id` already, no
        second run starts, and the AsyncResult is that of the first run.

        Raises TypeError for arguments that the function does not take, NotSupported for an option that leasehold.celery
        lacks or for another queue than the task's, Invalid `invalid_id` for a `task_id` that is not allowed, and
        Conflict for the `task_id` of another task's run.
        """
        for name in other_options:
            if name not in IGNORED:
                raise not_supported(name)
        self._check_queue(queue)
        self.check(args or (), kwargs or {})
        now = datetime.now(UTC)
        expires_at = None if expires is None else _expiry_of(expires, now).isoformat()
        celery_id = None if task_id is None else celery_id_of(task_id)
        run_id = None if celery_id is None else run_id_in(celery_id)
        # If the `task_id` can be the id of the run itself (a recent UUIDv7), the payload needs no field for it.
        task_id = celery_id if run_id is None else None
        options = Options(
            delay=None if eta is not None else timedelta(seconds=max(countdown or 0, 0)) or None,
            priority=_priority_of(priority),
            id=run_id,
            celery_id=task_id,
            start_at=None if eta is None else _in_utc(eta),
        )
        self.app.settle()  # from now on the app refuses another `task_default_queue`
        run = Prepared(self.task, options).submit(
            args=list(args or ()), kwargs=dict(kwargs or {}), expires=expires_at, task_id=task_id
        )
        return AsyncResult(celery_id or run.id, self.app, run)

    def _check_queue(self, queue: str | None) -> None:
        """Raises NotSupported for a queue other than the task's."""
        if queue not in (None, self.queue):
            raise NotSupported(f"{self.name} is of the queue {self.queue}: declare it with queue={queue!r}")

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises TypeError for arguments that the function does not take."""
        self._signature.bind(*args, **kwargs)

    def s(self, *args: Any, **kwargs: Any) -> Signature:
        """The call of the task with these arguments, for chain, group and chord."""
        return Signature.of(self.app, self.name, args, kwargs)

    def si(self, *args: Any, **kwargs: Any) -> Signature:
        """The call as an immutable signature, which does not take the result of the previous call as an argument."""
        return Signature.of(self.app, self.name, args, kwargs, immutable=True)

    def signature(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        immutable: bool = False,
        **other_options: Any,
    ) -> Signature:
        """The call with these arguments. `immutable`: whether the call is immutable, as with `.si`. Raises NotSupported
        for an option of `apply_async`, because a signature has no options.
        """
        for name, value in {**(options or {}), **other_options}.items():
            if name == "queue":
                self._check_queue(value)
            elif name in _APPLY_OPTIONS:
                reason = f"give it where you submit the call, as in apply_async({name}=...)"
                raise NotSupported(f"leasehold.celery has no {name} of a signature: {reason}")
            elif name not in IGNORED:
                raise not_supported(name)
        return Signature.of(self.app, self.name, args or (), kwargs or {}, immutable=immutable)

    subtask = signature

    def AsyncResult(self, task_id: str) -> AsyncResult:  # noqa: N802 - Celery's name
        return AsyncResult(task_id, self.app)

    # --- in a worker

    def work(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], expires: str | None, task_id: str | None = None
    ) -> Any:
        """Run the function in an attempt, and return its result. `expires`: the instant after which the run must not
        begin, as text; None: no such instant. `task_id`: the id that the program gave to the call. Raises Retryable if
        the run may be tried again, and Permanent if an error of the function ends the run. Any other StepError passes
        unchanged, and so does an error of OVERTAKEN, after which another attempt may have the task.
        """
        if expires is not None and datetime.now(UTC) > datetime.fromisoformat(expires):
            raise Permanent(EXPIRED, f"the run came after its time, {expires}")
        request = Request(args, kwargs, current(), task_id)
        request.delivery_info["routing_key"] = self.queue
        bound_self = _BoundSelf(self, request)
        try:
            return self._call_function(bound_self, args, kwargs)
        except (Retry, *OVERTAKEN):
            raise  # a Retry comes from `self.retry`, which has checked the limit
        except StepError as error:
            # A Retryable ends the run in two cases: it is the `exc` that `self.retry` raised after the last retry, or
            # the function itself raised it after `max_retries` retries (`options.times`).
            if isinstance(error, Retryable) and (
                error is bound_self.last_error or request.retries >= self.options.times
            ):
                raise Permanent(error.code, error.message) from error
            raise
        except Exception as error:
            raise Permanent("handler_error", text_of(error)) from error

    def _call_function(self, bound_self: _BoundSelf, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the function. An error of a class in `autoretry_for` becomes a retry, unless it is an error of
        Leasehold.
        """
        try:
            function = self.function_of_attempts
            with _of_groups():
                return function(bound_self, *args, **kwargs) if self.options.bind else function(*args, **kwargs)
        except (StepError, *OVERTAKEN):
            raise
        except self.options.autoretry_for as error:
            bound_self.retry(exc=error, countdown=self._countdown(bound_self.request.retries))

    def is_last(self, error: Exception, retries: int) -> bool:
        """Whether no attempt may follow this error. `retries`: how many retries the run has had.

        The platform's rule (`retry_rule`) allows a bound task 1,000 retries, because `self.retry` may allow that many.
        But some errors do not come from `self.retry`, such as errors of the object store or of a middleware. For these
        errors, this function applies the task's `max_retries`. An error of OVERTAKEN is never the last, because another
        attempt may have the task.
        """
        if not self.options.bind or isinstance(error, (Retry, *OVERTAKEN)):
            return False
        return retries >= self.options.times

    def _countdown(self, retries: int) -> float:
        """Seconds until the next automatic retry. `retries`: how many retries the run has had."""
        if not self.options.backoff:
            return self.options.delay
        seconds = min(self.options.backoff * 2**retries, self.options.longest_backoff)
        return random.uniform(0, seconds) if self.options.jitter else seconds  # noqa: S311 - no secret

    @property
    def retry_rule(self) -> RetryRule:
        """The platform's rule of retries. A task without `bind=True` is tried again `max_retries` times. For a bound
        task (with `bind=True`) the rule allows MAX_TIMES retries, because `self.retry` may allow more than
        `max_retries`. For a bound task, `is_last` and `self.retry` apply the task's own limit. The error Retry sets the
        delay of each retry (`after`). As in Celery, a run that exceeds its time limit is not tried again.
        """
        times = MAX_TIMES if self.options.bind else self.options.times
        return RetryRule(times=times, delay=timedelta(seconds=self.options.delay), factor=1, never=(StepTimeout,))


class _BoundSelf:
    """`self` of a bound task in one attempt. Attempts run in many threads, and each has its own request."""

    def __init__(self, task: CeleryTask, request: Request) -> None:
        self._task = task
        self.request = request
        self.last_error: BaseException | None = None  # what `retry` raised after the last retry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    @property
    def max_retries(self) -> int | None:
        return self._task.options.max_retries

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: BaseException | None = None,
        *,
        countdown: float | None = None,
        eta: datetime | None = None,
        max_retries: int | None = None,
        throw: bool = True,
        **other_options: Any,
    ) -> NoReturn:
        """Raises Retry, so that the run is tried again. After the last retry, raises `exc` instead or, without `exc`,
        MaxRetriesExceededError. If the program has called the function directly, there is no run that can be tried
        again. Then this method raises `exc` or, without `exc`, Retry. `max_retries` replaces the `max_retries` of the
        task, up to 1,000.

        Raises NotSupported for new arguments of the run, for `throw=False`, and for any other option.
        """
        if args is not None or kwargs is not None or not throw or other_options:
            raise NotSupported("leasehold.celery retries a run with its own arguments: submit a new run for others")
        if self.request.called_directly and exc is not None:
            raise exc
        if max_retries is not None and max_retries > MAX_TIMES:
            raise NotSupported(f"leasehold.celery tries a run again at most {MAX_TIMES} times, not {max_retries}")
        limit = self._task.options.times if max_retries is None else max_retries
        if self.request.retries >= limit and not self.request.called_directly:
            sentence = f"{self._task.name} was tried again {counted(self.request.retries, 'time', 'times')}"
            self.last_error = exc or MaxRetriesExceededError(sentence, self.request.args, self.request.kwargs)
            raise self.last_error
        if eta is not None:
            countdown = (_in_utc(eta) - datetime.now(UTC)).total_seconds()
        reason = text_of(exc) if exc is not None else "retry"
        raise Retry(reason, self._task.options.delay if countdown is None else max(countdown, 0)) from exc


@contextmanager
def _of_groups() -> Iterator[None]:
    """If the block raises a group of errors (as asyncio.TaskGroup does), raise the error that decides instead."""
    try:
        yield
    except ExceptionGroup as group:
        error = deciding(group)
        if error is group:
            raise
        raise error from None


# The id of a call of a chain, group or chord (`is_part`) is the id of its task (a row), because all these calls have
# the same run.
def _id_of(attempt: Current) -> str:
    task_id: UUID = attempt.attempt.task_id
    return str(task_id if attempt.attempt.is_part else attempt.run_id)


def code_of(error: Exception) -> str:
    """The code with which a run fails if this error ends it."""
    if isinstance(error, StepError):
        return error.code
    return "store_unavailable" if isinstance(error, StoreUnavailable) else "handler_error"


def _expiry_of(expires: float | datetime, now: datetime) -> datetime:
    return _in_utc(expires) if isinstance(expires, datetime) else now + timedelta(seconds=expires)


def _in_utc(time: datetime) -> datetime:
    """The time with a zone. A time without a zone counts as UTC, as in Celery by default."""
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _priority_of(priority: int | None) -> Any:
    if priority is None:
        return "normal"
    return "high" if priority >= _HIGH_FROM else "low" if priority < _LOW_BELOW else "normal"
