"""`Task`: a function that was declared with `@app.task`. Calling it runs the function; a worker runs what is submitted.

Two classes below it differ for type checkers only: a function with a parameter, whose `submit` also takes options, and
one without.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from leasehold.app.arguments import Arguments
from leasehold.app.current import Current, enter, leave
from leasehold.app.handling import Handling
from leasehold.app.local import LocalAttempt
from leasehold.app.place import place_of, wrong
from leasehold.app.results import Results
from leasehold.app.retry import Retry
from leasehold.domain.errors import DeclarationError
from leasehold.domain.pipeline import NAME, Pipeline, RunTerms, Step

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
A = TypeVar("A")
C = TypeVar("C")

#: The one step of a task's pipeline.
STEP = "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTerms:
    """What `@app.task(...)` takes; `App.task` says what each means."""

    name: str | None = None
    queue: str = "default"
    retry: Retry = field(default_factory=Retry)
    timeout: timedelta = timedelta(minutes=5)


class Task(Generic[P, R]):
    """A declared function. `name`: `APP.TASK`, the name of its pipeline. `place`: file and line of the function."""

    def __init__(
        self, app: str, function: Callable[..., Any], terms: TaskTerms, names: Mapping[str, Any] | None = None
    ) -> None:
        """`names`: of the scope that declares it. Raises DeclarationError with file and line."""
        check_function(function)
        self.function = function
        self.place = place_of(function)
        self.terms = terms
        self.arguments = Arguments(function, names)
        self.results = Results(function, names)
        self.pipeline = pipeline_of(app, function, terms, self.arguments)
        self.name = self.pipeline.name
        self._is_async = inspect.iscoroutinefunction(inspect.unwrap(function))
        handling = Handling(self.name, function, self.arguments, self.results, terms.retry)
        self.pipeline.handlers[STEP] = handling.loop if self._is_async else handling.plain

    def __repr__(self) -> str:
        return f"<task {self.name} of {self.place}>"

    def local(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function here and now, without a server: its arguments and result go through JSON as in a worker.

        Raises what the function raises, InvalidArguments, and RuntimeError for an `async def` in a running event loop:
        use `alocal` there.
        """
        if self._is_async:
            return asyncio.run(self.alocal(*args, **kwargs))
        attempt, positional, named = self._local_call(args, kwargs)
        token = enter(Current(self.name, attempt))
        try:
            return self._local_result(self.function(*positional, **named))
        finally:
            leave(token)
            attempt.close()

    async def alocal(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """As `local`, for an `async def`; a plain function runs in this thread."""
        attempt, positional, named = self._local_call(args, kwargs)
        token = enter(Current(self.name, attempt))
        try:
            result = self.function(*positional, **named)
            return self._local_result(await result if self._is_async else result)
        finally:
            leave(token)
            attempt.close()

    def _local_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[LocalAttempt, tuple[Any, ...], dict[str, Any]]:
        params = self.arguments.model.model_validate(self.arguments.encoded(args, kwargs))
        return LocalAttempt("local"), *self.arguments.decoded(params)

    def _local_result(self, result: Any) -> R:
        decoded: R = self.results.decoded(self.results.encoded(result))
        return decoded


class TaskWith(Task[Concatenate[A, Q], R], Generic[A, Q, R, C]):
    """A task with at least one parameter. `C`: what calling it gives, the result or a coroutine of it."""

    def __call__(self, argument: A, /, *args: Q.args, **kwargs: Q.kwargs) -> C:
        result: C = self.function(argument, *args, **kwargs)
        return result


class TaskWithout(Task[P, R], Generic[P, R, C]):
    """A task without parameters, or with named ones only."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C:
        result: C = self.function(*args, **kwargs)
        return result


def check_function(function: Callable[..., Any]) -> None:
    """Raises DeclarationError for what no worker could call."""
    inner: Any = inspect.unwrap(function)
    if not inspect.isfunction(inner):
        raise DeclarationError(f"{function!r} is no function: a task is declared above a def")
    if inner.__name__ == "<lambda>":
        raise wrong(function, "a lambda has no name that a worker could find: write a def")
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise wrong(function, f"{inner.__name__} is a generator: a task returns its result once")


def pipeline_of(app: str, function: Callable[..., Any], terms: TaskTerms, arguments: Arguments) -> Pipeline:
    """The pipeline of one step that a task is."""
    name = terms.name or function.__name__
    if not NAME.match(name):
        raise wrong(function, f"the task's name {name!r} must match {NAME.pattern}: give another with name=")
    try:
        step = Step(
            STEP,
            queue=terms.queue,
            max_attempts=terms.retry.times + 1,
            timeout=terms.timeout,
            retry_ladder=terms.retry.ladder,
        )
        return Pipeline(
            f"{app}.{name}",
            steps=[step],
            module=function.__module__,
            params=arguments.model,
            terms=RunTerms(title=name, description=inspect.getdoc(function) or ""),
        )
    except DeclarationError as error:
        raise wrong(function, str(error)) from error
