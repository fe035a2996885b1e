"""`Task`: a function that was declared with `@app.task`. A call of the task runs the function in this process. After
`submit`, a worker runs the function.

PositionalTask is for functions that take a positional argument, and KeywordTask for all other functions. The two
classes differ in the calls that type checkers accept, and in the arguments of `submit_many`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, overload
from uuid import UUID

from leasehold.app.arguments import Arguments, hints_of
from leasehold.app.calls import OPTIONS, Call, Options, SubmitOptions
from leasehold.app.connection import Connections
from leasehold.app.current import Current, enter, leave
from leasehold.app.failed import Failed
from leasehold.app.handling import Handling
from leasehold.app.local import LocalAttempt
from leasehold.app.results import Results
from leasehold.app.run import Run
from leasehold.app.source_location import declaration_error, declared_at, location_of
from leasehold.app.startable import StartableTask
from leasehold.app.terms import STEP, TaskTerms
from leasehold.domain.errors import DeclarationError, StepTimeout
from leasehold.domain.ids import id_of
from leasehold.domain.params import params_of_json
from leasehold.domain.pipeline import MAX_DELAY, NAME, Pipeline, PipelineLimit, RunTerms, Step

P = ParamSpec("P")  # the parameters of the function
Q = ParamSpec("Q")  # the function's parameters after the first argument
R = TypeVar("R")  # the type of the function's result
A = TypeVar("A")  # the type of the function's first argument
C = TypeVar("C")  # the value of a call of the function: its result, or a coroutine that returns the result

#: The queue of an isolated task whose options name no queue. A queue must not have both isolated tasks and other tasks,
#: because a worker runs either all tasks of a queue in the sandbox, or none of them.
ISOLATED_QUEUE = "isolated"


class Task(Generic[P, R]):
    """A declared function. `name`: `APP.TASK`, the name of its pipeline. `location`: file and line of the function."""

    #: How many parameters come before the arguments: 1 for a workflow, whose first parameter is its context.
    _leading_parameters = 0

    def __init__(
        self,
        app: str,
        function: Callable[..., Any],
        terms: TaskTerms,
        local_names: Mapping[str, Any] | None = None,
        connections: Connections | None = None,
    ) -> None:
        """`local_names`: the names of the scope in which the function is declared, because its annotations may use
        them. Raises DeclarationError with file and line.
        """
        check_function(function)
        with declared_at(function):
            terms.check_types()
        self._connections = connections if connections is not None else Connections(app)
        self.function = function
        self.location = location_of(function)
        self.terms = terms
        hints = self._hints(function, local_names)
        self.arguments = Arguments(function, hints, skip=self._leading_parameters)
        self.results = Results(function, hints)
        is_workflow = self._leading_parameters > 0
        self.pipeline = pipeline_of(app, function, terms, self.arguments, is_workflow=is_workflow)
        self.name = self.pipeline.name
        self._apply_options()
        #: The form of the task in which a workflow can start it.
        self.runnable = StartableTask(self.pipeline, self.arguments, self.results, is_workflow=is_workflow)
        self._is_async = inspect.iscoroutinefunction(inspect.unwrap(function))
        self._option_names = OPTIONS - set(self.arguments.names)  # a parameter hides an option of its name
        #: The handlers, one of which becomes the handler of the pipeline.
        self.handling = Handling(self.name, function, self.arguments, self.results, terms)
        self.pipeline.handlers[STEP] = self._handler()

    @staticmethod
    def _hints(function: Callable[..., Any], local_names: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """The types of the arguments and of the result. Subclasses override this method."""
        return hints_of(function, local_names)

    def _apply_options(self) -> None:
        """Check the options `debounce`, `unique` and `on_failure`. Set the pipeline's `limits`, and its `on_failure`
        (the pipeline of the task that runs after a failure). Raises DeclarationError.
        """
        if self.terms.limit is not None:
            limit = self.terms.limit
            self.pipeline.limits = (PipelineLimit(limit.at_most, limit.per_minute, limit.by),)
        if self.terms.debounce is not None and not timedelta(0) < self.terms.debounce <= MAX_DELAY:
            raise declaration_error(self.function, f"debounce is more than 0 and at most {MAX_DELAY.days} days")
        if self.terms.unique is not None:
            fields = {field.alias or name for name, field in self.arguments.model.model_fields.items()}
            if unknown := [name for name in self.terms.unique.by if name not in fields]:
                raise declaration_error(
                    self.function, f"Unique.by names {unknown}, and the arguments have {sorted(fields)}"
                )
        if self.terms.on_failure is not None:
            follower = self.terms.on_failure
            if follower.arguments.model is not Failed:
                raise declaration_error(
                    self.function, f"on_failure: {follower.name} must take one parameter, a leasehold.Failed"
                )
            self.pipeline.on_failure = follower.pipeline

    def _handler(self) -> Callable[..., Any]:
        """Choose the handler by the options: in a process of its own, in the sandbox, in the event loop, or in a
        thread. Raises DeclarationError for options that exclude each other.
        """
        if (self.terms.process or self.terms.isolated) and self._is_async:
            raise declaration_error(
                self.function, "an async def runs in the worker's loop: a process of its own needs a plain def"
            )
        if self.terms.process and self.terms.isolated:
            raise declaration_error(
                self.function, "process=True has network and disk, and isolated=True has neither: choose one"
            )
        if self.terms.process:
            if "<locals>" in self.function.__qualname__:
                raise declaration_error(
                    self.function, "a process imports the function by its name: declare it at module level"
                )
            # `room` reserves a process. If no process is free, the attempt is snoozed: it ends, and another attempt
            # runs later.
            self.pipeline.room = self.handling.room
            return self.handling.process
        if self.terms.isolated:
            return self.handling.isolated
        return self.handling.in_event_loop if self._is_async else self.handling.in_thread

    def __repr__(self) -> str:
        return f"<task {self.name} of {self.location}>"

    def options(self, **options: Unpack[SubmitOptions]) -> Prepared[P, R]:
        """The task with options, for example `task.options(key="k").submit(1, b=2)`. In this form a type checker sees
        the function's parameters. This form is needed if a parameter has the name of an option.
        """
        return Prepared(self, Options(**options))

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """A call with checked arguments, for `submit_many`. Raises InvalidArguments."""
        return Call(self, self.arguments.encoded(args, kwargs))

    def find(self, run_id: UUID | str) -> Run[R]:
        """The handle of this task's run with this id. The run is looked up when the handle is first used. Raises
        Invalid `invalid_id` if `run_id` is neither a UUID nor the text of a UUID.
        """
        return Run(id_of(run_id), self.name, self.results, self._connections)

    def _call_with_options(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call[R]:
        """The call of `submit`. A keyword argument with the name of an option counts as the option, unless a parameter
        has this name.
        """
        options = {name: value for name, value in kwargs.items() if name in self._option_names}
        named = {name: value for name, value in kwargs.items() if name not in self._option_names}
        return Call(self, self.arguments.encoded(args, named), Options(**options))

    def _submit(self, calls: Sequence[Call[R]]) -> list[Run[R]]:
        return _handles_of(calls, self._connections.call(self._write(calls)))

    async def _asubmit(self, calls: Sequence[Call[R]]) -> list[Run[R]]:
        return _handles_of(calls, await self._connections.acall(self._write(calls)))

    async def _write(self, calls: Sequence[Call[R]]) -> list[UUID]:
        """Commit the runs. Returns their ids."""
        return await (await self._connections.link()).submit(calls) if calls else []

    def _submit_in(self, connection: Any, calls: Sequence[Call[R]]) -> list[Run[R]]:
        from leasehold.app.inside import write_in  # noqa: PLC0415 - declaring a task loads no driver

        return _handles_of(calls, write_in(connection, calls, self._connections))

    async def _asubmit_in(self, connection: Any, calls: Sequence[Call[R]]) -> list[Run[R]]:
        from leasehold.app.inside import awrite_in  # noqa: PLC0415 - as above

        return _handles_of(calls, await awrite_in(connection, calls, self._connections))

    def local(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function here and now, without a server. Its arguments and its result are converted to JSON and back,
        as in a worker.

        Raises the errors of the function, and InvalidArguments. Raises RuntimeError for an `async def` if an event loop
        runs already: use `alocal` there.
        """
        if self._is_async:
            return asyncio.run(self.alocal(*args, **kwargs))
        with self._local_attempt(args, kwargs) as (positional, named):
            return self._local_result(self._call_locally(positional, named))

    async def alocal(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The same as `local`, for an `async def`. A plain function runs in this thread."""
        with self._local_attempt(args, kwargs) as (positional, named):
            result = self._call_locally(positional, named)
            return self._local_result(await result if self._is_async else result)

    def _call_locally(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Call the function. Returns its result, or for an `async def` a coroutine that returns the result."""
        return self.function(*positional, **named)

    @contextmanager
    def _local_attempt(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Within the block, the function has a local attempt, as it has an attempt in a worker. Yields the positional
        and the named arguments of the call, converted to JSON and back.
        """
        params = params_of_json(self.arguments.model, self.arguments.encoded(args, kwargs))
        attempt = LocalAttempt("local", self.terms)
        token = enter(Current(self.name, attempt.given(self.name, params)))
        try:
            yield self.arguments.decoded(params)
        finally:
            leave(token)
            attempt.close()

    def _local_result(self, result: Any) -> R:
        decoded: R = self.results.decoded(self.results.encoded(result))
        return decoded


class Prepared(Generic[P, R]):
    """A task with options, as `task.options(...)` returns it."""

    def __init__(self, task: Task[P, R], options: Options) -> None:
        self._task = task
        self._options = options

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        """The call with these options, for `submit_many`. Raises InvalidArguments."""
        return Call(self._task, self._task.arguments.encoded(args, kwargs), self._options)

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Submit a run. Raises the errors of PositionalTask.submit."""
        return self._task._submit([self.call(*args, **kwargs)])[0]  # noqa: SLF001 - of the same module

    async def asubmit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """The same as `submit`, in an event loop."""
        return (await self._task._asubmit([self.call(*args, **kwargs)]))[0]  # noqa: SLF001 - of the same module

    def submit_in(self, connection: Any, /, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """The same as PositionalTask.submit_in."""
        return self._task._submit_in(connection, [self.call(*args, **kwargs)])[0]  # noqa: SLF001 - as above

    async def asubmit_in(self, connection: Any, /, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """The same as PositionalTask.asubmit_in."""
        return (await self._task._asubmit_in(connection, [self.call(*args, **kwargs)]))[0]  # noqa: SLF001 - as above


class PositionalTask(Task[Concatenate[A, Q], R], Generic[A, Q, R, C]):
    """A task whose function takes at least one positional argument."""

    def __call__(self, argument: A, /, *args: Q.args, **kwargs: Q.kwargs) -> C:
        result: C = self.function(argument, *args, **kwargs)
        return result

    @overload
    def submit(self, argument: A, /, *args: Q.args, **kwargs: Q.kwargs) -> Run[R]: ...
    @overload
    def submit(self, argument: A, /, **options: Unpack[SubmitOptions]) -> Run[R]: ...
    def submit(self, *args: Any, **kwargs: Any) -> Run[R]:  # type: ignore[misc]  # `submit` checks the arguments itself
        """Submit a run. A worker will run the function. Returns when the run is committed.

        Raises InvalidArguments if the arguments do not fit, Invalid for a wrong option, and Conflict for an `id` that
        another run has. Raises Unanswered if no answer came. In this case the run may or may not exist.
        """
        return self._submit([self._call_with_options(args, kwargs)])[0]

    @overload
    async def asubmit(self, argument: A, /, *args: Q.args, **kwargs: Q.kwargs) -> Run[R]: ...
    @overload
    async def asubmit(self, argument: A, /, **options: Unpack[SubmitOptions]) -> Run[R]: ...
    async def asubmit(self, *args: Any, **kwargs: Any) -> Run[R]:  # type: ignore[misc]  # as `submit`
        """The same as `submit`, in an event loop."""
        return (await self._asubmit([self._call_with_options(args, kwargs)]))[0]

    @overload
    def submit_in(self, connection: Any, argument: A, /, *args: Q.args, **kwargs: Q.kwargs) -> Run[R]: ...
    @overload
    def submit_in(self, connection: Any, argument: A, /, **options: Unpack[SubmitOptions]) -> Run[R]: ...
    def submit_in(self, connection: Any, /, *args: Any, **kwargs: Any) -> Run[R]:
        """Submit in the caller's own transaction. The run exists when the transaction has committed.

        `connection`: a Session or Connection of SQLAlchemy, a psycopg 3 Connection, or a connection of Django. Raises
        the errors of `submit`. In autocommit, or in a transaction that has failed, raises TransactionRefused and writes
        nothing.
        """
        return self._submit_in(connection, [self._call_with_options(args, kwargs)])[0]

    @overload
    async def asubmit_in(self, connection: Any, argument: A, /, *args: Q.args, **kwargs: Q.kwargs) -> Run[R]: ...
    @overload
    async def asubmit_in(self, connection: Any, argument: A, /, **options: Unpack[SubmitOptions]) -> Run[R]: ...
    async def asubmit_in(self, connection: Any, /, *args: Any, **kwargs: Any) -> Run[R]:
        """The same as `submit_in`, for an AsyncSession or AsyncConnection of SQLAlchemy, an asyncpg connection, or a
        psycopg 3 AsyncConnection.
        """
        return (await self._asubmit_in(connection, [self._call_with_options(args, kwargs)]))[0]

    def submit_many(self, arguments: Iterable[A | Call[R]]) -> list[Run[R]]:
        """Submit a run for each argument or `task.call(...)`, either all runs or none. Returns the runs in the same
        order.
        """
        return self._submit([self._call_of(argument) for argument in arguments])

    async def asubmit_many(self, arguments: Iterable[A | Call[R]]) -> list[Run[R]]:
        """The same as `submit_many`, in an event loop."""
        return await self._asubmit([self._call_of(argument) for argument in arguments])

    def _call_of(self, argument: A | Call[R]) -> Call[R]:
        return argument if isinstance(argument, Call) else self._call_with_options((argument,), {})


class KeywordTask(Task[P, R], Generic[P, R, C]):
    """A task without parameters, or with keyword-only parameters. If each parameter has a default, a type checker also
    accepts the options of a submission in `submit(...)`. Otherwise it accepts these options only in `options(...)`,
    because in `submit(key=...)` it could not check that the parameters without a default are given.
    """

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C:
        result: C = self.function(*args, **kwargs)
        return result

    @overload
    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]: ...
    @overload
    def submit(self: KeywordTask[[], R, C], **options: Unpack[SubmitOptions]) -> Run[R]: ...
    def submit(self, *args: Any, **kwargs: Any) -> Run[R]:
        """The same as PositionalTask.submit."""
        return self._submit([self._call_with_options(args, kwargs)])[0]

    @overload
    async def asubmit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]: ...
    @overload
    async def asubmit(self: KeywordTask[[], R, C], **options: Unpack[SubmitOptions]) -> Run[R]: ...
    async def asubmit(self, *args: Any, **kwargs: Any) -> Run[R]:
        """The same as `submit`, in an event loop."""
        return (await self._asubmit([self._call_with_options(args, kwargs)]))[0]

    @overload
    def submit_in(self, connection: Any, /, *args: P.args, **kwargs: P.kwargs) -> Run[R]: ...
    @overload
    def submit_in(self: KeywordTask[[], R, C], connection: Any, /, **options: Unpack[SubmitOptions]) -> Run[R]: ...
    def submit_in(self, connection: Any, /, *args: Any, **kwargs: Any) -> Run[R]:
        """The same as PositionalTask.submit_in."""
        return self._submit_in(connection, [self._call_with_options(args, kwargs)])[0]

    @overload
    async def asubmit_in(self, connection: Any, /, *args: P.args, **kwargs: P.kwargs) -> Run[R]: ...
    @overload
    async def asubmit_in(
        self: KeywordTask[[], R, C], connection: Any, /, **options: Unpack[SubmitOptions]
    ) -> Run[R]: ...
    async def asubmit_in(self, connection: Any, /, *args: Any, **kwargs: Any) -> Run[R]:
        """The same as PositionalTask.asubmit_in."""
        return (await self._asubmit_in(connection, [self._call_with_options(args, kwargs)]))[0]

    def submit_many(self, calls: Iterable[Call[R]]) -> list[Run[R]]:
        """Submit a run for each `task.call(...)`, either all runs or none. Returns the runs in the same order."""
        return self._submit(list(calls))

    async def asubmit_many(self, calls: Iterable[Call[R]]) -> list[Run[R]]:
        """The same as `submit_many`, in an event loop."""
        return await self._asubmit(list(calls))


def _handles_of(calls: Sequence[Call[R]], ids: Sequence[UUID]) -> list[Run[R]]:
    """The handles of the runs. Each handle is made by the task of its call, because `submit_many` of one task may also
    get calls of other tasks.
    """
    return [call.task.find(run_id) for call, run_id in zip(calls, ids, strict=True)]


def check_function(function: Callable[..., Any]) -> None:
    """Raises DeclarationError for a function that a worker could not call."""
    inner: Any = inspect.unwrap(function)
    if not inspect.isfunction(inner):
        raise DeclarationError(f"{function!r} is not a function: a task is declared above a def")
    if inner.__name__ == "<lambda>":
        raise declaration_error(function, "a lambda has no name that a worker could find: write a def")
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise declaration_error(function, f"{inner.__name__} is a generator: a task returns its result once")


def pipeline_of(
    app: str, function: Callable[..., Any], terms: TaskTerms, arguments: Arguments, *, is_workflow: bool
) -> Pipeline:
    """The task as a pipeline of one step."""
    name = terms.name or function.__name__
    if not NAME.fullmatch(name):
        raise declaration_error(
            function, f"the task's name {name!r} must match {NAME.pattern}: give another with name="
        )
    with declared_at(function):
        step = Step(
            STEP,
            queue=terms.queue or (ISOLATED_QUEUE if terms.isolated else "default"),
            isolated=terms.isolated,
            workflow=is_workflow,
            max_attempts=terms.retry.times + 1,
            timeout=terms.timeout,
            retry_ladder=terms.retry.ladder,
            timeout_is_final=any(issubclass(StepTimeout, error) for error in terms.retry.never),
        )
        return Pipeline(
            f"{app}.{name}",
            steps=[step],
            module=function.__module__,
            params=arguments.model,
            terms=RunTerms(title=name, description=inspect.getdoc(function) or "", grace=terms.cancel_grace),
        )
