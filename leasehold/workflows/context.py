"""`Context`: the methods that a workflow calls. Each call is durable: it has a row in the run's journal. When the code
runs again from its top (a replay), each call takes its result from the journal.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar, overload
from uuid import UUID

import orjson
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from leasehold.domain.backoff import capped
from leasehold.domain.errors import Permanent, ResultUnreadable
from leasehold.domain.json_pointer import first_mismatch_of
from leasehold.domain.storable import encode_storable
from leasehold.domain.workflow_names import NAME_RULE, is_name
from leasehold.workflows.pending import (
    Gather,
    LocalCall,
    Pending,
    ResultCall,
    RunCall,
    Runnable,
    SignalCall,
    SleepCall,
    StartCall,
)

if TYPE_CHECKING:  # not at run time: a program that only declares workflows needs no driver
    from leasehold.workflows.driver import Driver

P = ParamSpec("P")  # the parameters of a task or function
R = TypeVar("R")  # the result of a task
R_co = TypeVar("R_co", covariant=True)  # the same, for the Protocol
T = TypeVar("T")  # the result of any other call


class TaskOf(Protocol[P, R_co]):
    """A task of an app: `leasehold.app.task.Task`."""

    @property
    def runnable(self) -> Runnable: ...

    def local(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the task's function in this process. Type checkers read the types of the task from this signature."""
        ...


class Child(Generic[R]):
    """A run that the workflow has started."""

    def __init__(self, run_id: UUID, runnable: Runnable) -> None:
        self.id = run_id
        self._runnable = runnable

    def result(self) -> Pending[R]:
        """Wait for the end of the run. Awaiting this gives the run's result, or raises TaskFailed."""
        return ResultCall(self._runnable, self.id)


class Context:
    """The first parameter of a workflow. A workflow, and the coroutines that it gives to `gather`, may await only what
    the methods of the context return.
    """

    def __init__(self, driver: Driver, name: str | None = None, *, detach: bool = False) -> None:
        self._driver = driver
        self._name = name
        self._detach = detach

    @property
    def run_id(self) -> UUID:
        """The id of the run."""
        return self._driver.run_id

    @property
    def version(self) -> int:
        """The workflow's `version` when this run was submitted."""
        return self._driver.version

    def run(self, task: TaskOf[P, R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """Run the task as a step of this run, on the task's own queue, with the task's own retries. If the task has a
        limit, a separate run does the work, so that the limit holds. The separate run is cancelled with this run.

        The call raises InvalidArguments, or Permanent `workflow_as_step` if the task is a workflow. Awaiting the call
        gives the task's result, or raises TaskFailed.
        """
        if task.runnable.is_workflow:  # both workflows would write to the same rows of the journal
            raise Permanent(
                "workflow_as_step",
                f"{task.runnable.step_name} is a workflow, which is a run of its own: await ctx.start(...), then the"
                " result() of what it gives",
            )
        return RunCall(task.runnable, task.runnable.encode(args, kwargs), self._name)

    def named(self, name: str) -> Context:
        """A context whose `run` gives its step this name instead of the task's: `ctx.named("deposit").run(...)`."""
        return Context(self._driver, _checked_name(name), detach=self._detach)

    def start(self, task: TaskOf[P, R], *args: P.args, **kwargs: P.kwargs) -> Pending[Child[R]]:
        """Start a separate run of a workflow or a task. Awaiting the call gives the handle of the new run. The new run
        is cancelled when this run is cancelled, fails or expires. Exception: a run that `ctx.detached.start` has
        started goes on.

        Each call starts a run of its own. The options `unique` and `debounce` of the task do not apply. The limit on
        the size of a submitted payload does not apply either.
        """
        runnable = task.runnable
        return StartCall(
            runnable, runnable.encode(args, kwargs), lambda run_id: Child(run_id, runnable), detach=self._detach
        )

    @property
    def detached(self) -> Context:
        """A copy of this context. The runs that its `start` starts go on when this run ends."""
        return Context(self._driver, self._name, detach=True)

    def sleep(self, duration: timedelta | float) -> Pending[None]:
        """Wait for a duration, or for a number of seconds. Meanwhile the run uses no slot of a worker."""
        return SleepCall(_seconds(duration))

    @overload
    def wait_for(self, name: str, /, *, timeout: timedelta | float | None = None) -> Pending[Any]: ...
    @overload
    def wait_for(self, name: str, model: type[T], /, *, timeout: timedelta | float | None = None) -> Pending[T]: ...
    def wait_for(self, name: str, model: Any = Any, /, *, timeout: timedelta | float | None = None) -> Pending[Any]:
        """Wait for the signal `name`. A signal that came before the wait also ends the wait. Awaiting the call gives
        the signal's payload, checked against `model`. It raises TimeoutError when `timeout` has passed.

        It raises SignalInvalid if the payload does not fit `model`. In this case catch the error, and wait again. Such
        a payload usually came before the wait, because during the wait the API refuses a payload that does not fit.
        """
        adapter: TypeAdapter[Any] = TypeAdapter(model)
        schema = None if model is Any else adapter.json_schema()
        seconds = None if timeout is None else _seconds(timeout)
        return SignalCall(
            _checked_name(name), seconds, lambda payload: adapter.validate_json(orjson.dumps(payload)), schema
        )

    @overload
    def gather(self, *calls: Awaitable[T], return_exceptions: bool = False) -> Pending[list[T]]: ...
    @overload
    def gather(self, *calls: Awaitable[Any], return_exceptions: bool = False) -> Pending[list[Any]]: ...
    def gather(self, *calls: Any, return_exceptions: bool = False) -> Pending[list[Any]]:
        """Wait until all arguments have ended. The arguments are calls of this context, and your own coroutines that
        use this context. Awaiting the gather gives their results in order. If some have failed, it raises the error of
        the first failed argument in the order of the arguments. With `return_exceptions` the errors are among the
        results instead. Exception: if a cancel of the run ends one of the arguments, the gather raises Cancelled, even
        with `return_exceptions`.
        """
        return Gather(calls, return_exceptions=return_exceptions)

    @overload
    def call(self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> Pending[T]: ...
    @overload
    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Pending[T]: ...
    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Pending[Any]:
        """Call a function in this worker immediately, and record its result in the journal. Use this for a small
        effect, or for a value that may differ the next time. If the worker dies before the result is recorded, the
        function is called again. Raises TaskFailed if the function raises.
        """
        adapter: TypeAdapter[Any] = TypeAdapter(_return_type(function))
        return LocalCall(
            _checked_name(getattr(function, "__name__", type(function).__name__)),
            partial(function, *args, **kwargs),
            lambda result: _encoded(adapter, result),
            lambda encoded: _decoded(adapter, encoded),
        )

    def patched(self, name: str) -> bool:
        """Whether this run takes the new code at this point. A run that passed this point before the code changed gets
        False. All other runs get True.
        """
        return self._driver.patched(_checked_name(name))

    def now(self) -> datetime:
        """The time in UTC of the newest result in this branch: of a step, a run, a sleep, a wait for a signal, or
        `ctx.call`. Failures and timeouts also count as results. Before the first result it is the start of the run. A
        replay gives the same time. The start of another run does not change this time, and a cancel does not change it
        either.
        """
        # The journal's instants are texts of PostgreSQL. They may be in another time zone, because a pooler may drop
        # the session's setting, and earlier releases did not set it.
        return self._driver.active.now.astimezone(UTC)

    def uuid(self) -> UUID:
        """A random-looking UUID, the same at each replay."""
        return self._driver.active.uuid(self._driver.run_id)

    def random(self) -> random.Random:
        """A random number generator that gives the same numbers at each replay."""
        return self._driver.active.random(self._driver.run_id)


def _seconds(duration: timedelta | float) -> float:
    """The duration in seconds, at least 0 and at most the longest wait that is allowed."""
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else float(duration)
    return capped(max(0.0, seconds))  # `max` comes first, because it turns NaN into 0


def _checked_name(name: str) -> str:
    if not is_name(name):
        raise Permanent("bad_name", f"a name has {NAME_RULE}, not {name!r}")
    return name


def _return_type(function: Callable[..., Any]) -> Any:
    """The type that the function is declared to return; Any if it declares none, or if its annotations cannot be
    evaluated.
    """
    from typing import get_type_hints  # noqa: PLC0415 - used only here

    try:
        return get_type_hints(function).get("return", Any)
    except Exception:  # noqa: BLE001 - an annotation is an expression, and may raise anything
        return Any


def _encoded(adapter: TypeAdapter[Any], result: Any) -> bytes:
    try:
        return encode_storable(adapter.dump_python(result, mode="json", warnings="error", by_alias=True))
    except (PydanticSerializationError, TypeError, ValueError) as error:
        raise Permanent(
            "result_not_serialisable", f"ctx.call returned a value that cannot be converted to JSON: {error}"
        ) from error


def _decoded(adapter: TypeAdapter[Any], encoded: bytes) -> Any:
    try:
        return adapter.validate_json(encoded)
    except ValidationError as error:
        path, reason = first_mismatch_of(error)
        sentence = (
            f"ctx.call returned a value whose JSON its type does not take back, at {path or 'its root'}: {reason}"
        )
        raise ResultUnreadable(sentence) from error
