"""`App`: the tasks of a program, declared as functions. `leasehold dev MODULE:app` and `leasehold worker` run them."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from leasehold.app.connection import Connections
from leasehold.app.place import wrong
from leasehold.app.retry import Retry
from leasehold.app.task import Task, TaskTerms, TaskWith, TaskWithout
from leasehold.app.workflow import Workflow, WorkflowTerms, WorkflowWith, WorkflowWithout, workflow_of
from leasehold.domain.errors import DeclarationError
from leasehold.domain.kind import Kind
from leasehold.domain.pipeline import NAME, Pipeline
from leasehold.domain.registry import Pipelines
from leasehold.settings import Settings

if TYPE_CHECKING:
    from leasehold.workflows.context import Context

P = ParamSpec("P")
Q = ParamSpec("Q")
A = TypeVar("A")
T = TypeVar("T")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class TaskDecorator(Protocol):
    """What `@app.task(...)` with options is."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a coroutine function is a function, too: the first overload wins
        self, function: Callable[Concatenate[A, Q], Coroutine[Any, Any, T]], /
    ) -> TaskWith[A, Q, T, Coroutine[Any, Any, T]]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[A, Q], T], /) -> TaskWith[A, Q, T, T]: ...
    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, T]], /
    ) -> TaskWithout[P, T, Coroutine[Any, Any, T]]: ...
    @overload
    def __call__(self, function: Callable[P, T], /) -> TaskWithout[P, T, T]: ...


class WorkflowDecorator(Protocol):
    """What `@app.workflow(...)` with options is."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Context, A, Q], Coroutine[Any, Any, T]], /
    ) -> WorkflowWith[A, Q, T]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, T]], /
    ) -> WorkflowWithout[P, T]: ...


@dataclass(frozen=True, slots=True)
class Opened:
    """What an app opened in a worker: `attempt.opened` of its tasks. `state`: what the app's lifespan yielded."""

    settings: Settings
    state: Any


class App:
    """The tasks of one program under one name. Their pipelines are named `APP.TASK`."""

    def __init__(self, name: str) -> None:
        """`name`: small letters, digits, `_` and `-`. Raises DeclarationError."""
        if not NAME.match(name):
            raise DeclarationError(f"the app's name {name!r} must match {NAME.pattern}")
        self.name = name
        self.connections = Connections(name)
        self.tasks: dict[str, Task[..., Any]] = {}
        self._others: list[Pipeline | Kind] = []
        self._lifespan: Callable[[], AbstractAsyncContextManager[Any]] | None = None

    def __repr__(self) -> str:
        return f"<app {self.name}: {', '.join(self.tasks) or 'no tasks'}>"

    @overload
    def task(  # type: ignore[overload-overlap]  # a coroutine function is a function, too: the first overload wins
        self, function: Callable[Concatenate[A, Q], Coroutine[Any, Any, T]], /
    ) -> TaskWith[A, Q, T, Coroutine[Any, Any, T]]: ...
    @overload
    def task(self, function: Callable[Concatenate[A, Q], T], /) -> TaskWith[A, Q, T, T]: ...
    @overload
    def task(self, function: Callable[P, Coroutine[Any, Any, T]], /) -> TaskWithout[P, T, Coroutine[Any, Any, T]]: ...
    @overload
    def task(self, function: Callable[P, T], /) -> TaskWithout[P, T, T]: ...
    @overload
    def task(
        self,
        *,
        name: str | None = None,
        queue: str = "default",
        retry: Retry = ...,
        timeout: timedelta = ...,
    ) -> TaskDecorator: ...
    def task(self, *function: Any, **options: Any) -> Any:
        """Declare the function below as a task. Raises DeclarationError with file and line.

        `name`: instead of the function's. `queue`: which workers run it (LEASEHOLD_WORKER_QUEUES). `retry`: how often
        a failed attempt is tried again. `timeout`: the longest that one attempt may take.
        """
        terms = TaskTerms(**options)
        if function:
            return self._declare(function[0], terms, names_of(inspect.currentframe()))

        def declare(function: Callable[..., Any], /) -> Task[..., Any]:
            return self._declare(function, terms, names_of(inspect.currentframe()))

        return declare

    @overload
    def workflow(
        self, function: Callable[Concatenate[Context, A, Q], Coroutine[Any, Any, T]], /
    ) -> WorkflowWith[A, Q, T]: ...
    @overload
    def workflow(
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, T]], /
    ) -> WorkflowWithout[P, T]: ...
    @overload
    def workflow(
        self, *, name: str | None = None, queue: str = "default", version: int = 1, timeout: timedelta = ...
    ) -> WorkflowDecorator: ...
    def workflow(self, *function: Any, **options: Any) -> Any:
        """Declare the `async def` below, whose first parameter is a Context, as a workflow. Raises DeclarationError.

        `name`: instead of the function's. `queue`: which workers run it. `version`: what `ctx.version` is in new runs.
        `timeout`: the longest that the function may run between two waits.
        """
        terms = WorkflowTerms(**options)
        if function:
            return self._declare_workflow(function[0], terms, names_of(inspect.currentframe()))

        def declare(function: Callable[..., Any], /) -> Workflow:
            return self._declare_workflow(function, terms, names_of(inspect.currentframe()))

        return declare

    def _declare_workflow(
        self, function: Callable[..., Any], terms: WorkflowTerms, names: Mapping[str, Any]
    ) -> Workflow:
        workflow = workflow_of(self.name, function, terms, names, self.connections)
        self.register(workflow)
        return workflow

    def _declare(self, function: Callable[..., Any], terms: TaskTerms, names: Mapping[str, Any]) -> Task[..., Any]:
        kind = TaskWith if _takes_one(function) else TaskWithout
        task: Task[..., Any] = kind(self.name, function, terms, names, self.connections)
        self.register(task)
        return task

    def lifespan(self, function: Callable[[], AsyncIterator[T]], /) -> Callable[[], AsyncIterator[T]]:
        """Declare the async generator below as the app's lifespan: it runs to its `yield` before a worker serves the
        app, and on from there when the worker has stopped. Tasks read what it yields as `current().state`.

        Raises DeclarationError for a second lifespan, or one that is no async generator.
        """
        if self._lifespan is not None:
            raise wrong(function, f"the app {self.name} has a lifespan already")
        if not inspect.isasyncgenfunction(inspect.unwrap(function)):
            raise wrong(function, "a lifespan is an async def with one yield")
        self._lifespan = asynccontextmanager(function)
        return function

    @asynccontextmanager
    async def opened(self, settings: Settings) -> AsyncIterator[Opened]:
        """What a worker opens once for all tasks of the app."""
        async with AsyncExitStack() as stack:
            state = None if self._lifespan is None else await stack.enter_async_context(self._lifespan())
            yield Opened(settings, state)

    def register(self, task: Task[..., Any]) -> None:
        """Add a task. Raises DeclarationError if the app has one of its name."""
        other = self.tasks.get(task.name)
        if other is not None:
            raise DeclarationError(f"{task.place}: {task.name} is declared already, at {other.place}")
        task.pipeline.opens(self.opened)
        self.tasks[task.name] = task

    def add(self, *others: Pipeline | Kind) -> None:
        """Serve these, too: pipelines with several steps, files or templates of their own."""
        self._others += others

    def use(self, settings: Settings) -> None:
        """Submit by these settings, in place of those of the environment."""
        self.connections.use(settings)

    def close(self) -> None:
        """Close the connections of this process. The next submission opens them again."""
        self.connections.close()

    def pipelines(self) -> Pipelines:
        """The app's tasks, what `add` was given, and the platform's deliveries of webhooks: what a worker serves."""
        from leasehold.pipelines import with_deliveries  # noqa: PLC0415 - declaring a task needs none of it

        return with_deliveries(*self._pipelines(), *self._others)

    def _pipelines(self) -> Iterable[Pipeline]:
        return (task.pipeline for task in self.tasks.values())


def names_of(frame: FrameType | None) -> Mapping[str, Any]:
    """The local names of the frame's caller, for annotations that name a class of a function's body."""
    caller = None if frame is None else frame.f_back
    return {} if caller is None else dict(caller.f_locals)


def _takes_one(function: Callable[..., Any]) -> bool:
    """Whether it can be called with one positional argument."""
    return any(parameter.kind in _POSITIONAL for parameter in inspect.signature(function).parameters.values())
