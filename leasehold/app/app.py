"""`App`: the object by which a program declares functions as tasks. `leasehold dev MODULE:app` and `leasehold worker
MODULE:app` run the tasks.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack, overload

from leasehold.app.arguments import takes_positional
from leasehold.app.batch_task import BatchTask
from leasehold.app.batches import Batches
from leasehold.app.connection import Connections
from leasehold.app.decorators import BatchDecorator, TaskDecorator, WorkflowDecorator
from leasehold.app.middleware import Middleware, around
from leasehold.app.processes import Processes
from leasehold.app.run_limits import Batch
from leasehold.app.source_location import declaration_error, declared_at, location_of_caller, module_of_caller
from leasehold.app.task import KeywordTask, PositionalTask, Task
from leasehold.app.terms import TaskOptions, TaskTerms
from leasehold.app.workflow import KeywordWorkflow, PositionalWorkflow, Workflow, WorkflowTerms, workflow_of
from leasehold.domain.errors import DeclarationError, Invalid, InvalidArguments
from leasehold.domain.kind import Kind
from leasehold.domain.option_types import check_text, check_time
from leasehold.domain.pipeline import NAME, Pipeline
from leasehold.domain.registry import CatchUp, DeclaredSchedule, Overlap, Pipelines

if TYPE_CHECKING:
    from leasehold.settings import Settings
    from leasehold.worker.worker import Worker
    from leasehold.workflows.context import Context

P = ParamSpec("P")  # the parameters of a user's function
Q = ParamSpec("Q")  # its parameters after the first argument
A = TypeVar("A")  # the type of its first argument
T = TypeVar("T")  # the type of its result


@dataclass(frozen=True, slots=True)
class Opened:
    """What an app opens once in each worker. All attempts of the app's tasks use the same object, `attempt.opened`.
    `state`: the value that the app's lifespan yielded. `processes`: the child processes of `process=True` tasks.
    `batches`: the batches of `batch=` tasks, which collect the items of several attempts.
    """

    settings: Settings
    state: Any
    processes: Processes
    batches: Batches


class App:
    """The tasks of one program under one name. Each task is a pipeline (a kind of work that a worker serves), named
    `APP.TASK`.
    """

    def __init__(self, name: str) -> None:
        """`name`: small letters, digits, `_` and `-`. Raises DeclarationError."""
        given: object = name  # the annotation says str, but a program may give any value
        if not isinstance(given, str) or not NAME.fullmatch(name):
            location = location_of_caller(inspect.currentframe())
            raise DeclarationError(
                f"{location}: the app's name {name!r} must begin with a small letter, and have small letters, digits, "
                "`_` and `-` only, at most 63"
            )
        self.name = name
        self.module = module_of_caller(inspect.currentframe())
        self.connections = Connections(name)
        self.tasks: dict[str, Task[..., Any]] = {}
        self._added_kinds: list[Pipeline | Kind] = []
        self._schedules: list[DeclaredSchedule] = []
        self._middleware: list[Middleware] = []
        self._lifespan: Callable[[], AbstractAsyncContextManager[Any]] | None = None

    def __repr__(self) -> str:
        return f"<app {self.name}: {', '.join(self.tasks) or 'no tasks'}>"

    # A function whose parameters all have defaults matches `Callable[[], T]`, too. Its task takes arguments, so the
    # type is `KeywordTask[..., T]` and not `KeywordTask[[], T]`.
    @overload
    def task(
        self, function: Callable[[], Coroutine[Any, Any, T]], /
    ) -> KeywordTask[..., T, Coroutine[Any, Any, T]]: ...
    @overload
    def task(self, function: Callable[[], T], /) -> KeywordTask[..., T, T]: ...
    @overload
    def task(  # type: ignore[overload-overlap]  # a coroutine function is a function, too: the first overload wins
        self, function: Callable[Concatenate[A, Q], Coroutine[Any, Any, T]], /
    ) -> PositionalTask[A, Q, T, Coroutine[Any, Any, T]]: ...
    @overload
    def task(self, function: Callable[Concatenate[A, Q], T], /) -> PositionalTask[A, Q, T, T]: ...
    @overload
    def task(  # type: ignore[overload-cannot-match]  # mypy errs: a function with keyword-only parameters does match here, and not above
        self, function: Callable[P, Coroutine[Any, Any, T]], /
    ) -> KeywordTask[P, T, Coroutine[Any, Any, T]]: ...
    @overload
    def task(self, function: Callable[P, T], /) -> KeywordTask[P, T, T]: ...  # type: ignore[overload-cannot-match]  # as above
    @overload
    def task(self, *, batch: Batch, **options: Unpack[TaskOptions]) -> BatchDecorator: ...
    @overload
    def task(self, **options: Unpack[TaskOptions]) -> TaskDecorator: ...
    def task(self, *function: Any, **options: Any) -> Any:
        """Declare the function below as a task. Raises DeclarationError with file and line.

        `name`: the task's name; by default the function's name. `queue`: only workers that serve this queue
        (LEASEHOLD_WORKER_QUEUES) run the task. By default, an isolated task is in the queue `isolated`, and any other
        task in `default`. `retry`: how often a failed attempt is tried again. `timeout`: the longest that one attempt
        may take. `process`: whether the function, a plain `def`, runs in a separate process. At the time limit the
        worker kills the process and all processes that it started. `isolated`: whether the function, a plain `def`,
        runs in the sandbox, without network. Choose it if the task reads files that strangers send. `limit`: how many
        runs of the task may run at once, and how many may start each minute. `unique`: which submissions give the same
        run. `debounce`: submissions with the same key (made by `unique`, or given as `key=`) become one run, with the
        arguments of the last submission. The run starts when no such submission has come for the time `debounce`.
        `batch`: the function takes a list of items and returns a list of results; each item is a run. `on_failure`: a
        task that runs when a run has failed for good or has expired; this task takes a leasehold.Failed.
        `cancel_grace`: how long an attempt of a cancelled run may take to stop, in whole seconds, at most an hour; then
        the worker stops the attempt.
        """
        terms = TaskTerms(**options)
        if function:
            return self._declare(function[0], terms, caller_locals(inspect.currentframe()))

        def declare(function: Callable[..., Any], /) -> Task[..., Any]:
            return self._declare(function, terms, caller_locals(inspect.currentframe()))

        return declare

    # The type is `KeywordWorkflow[..., T]` for the same reason as in `task`.
    @overload
    def workflow(self, function: Callable[[Context], Coroutine[Any, Any, T]], /) -> KeywordWorkflow[..., T]: ...
    @overload
    def workflow(
        self, function: Callable[Concatenate[Context, A, Q], Coroutine[Any, Any, T]], /
    ) -> PositionalWorkflow[A, Q, T]: ...
    @overload
    def workflow(  # type: ignore[overload-cannot-match]  # as above
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, T]], /
    ) -> KeywordWorkflow[P, T]: ...
    @overload
    def workflow(
        self,
        *,
        name: str | None = None,
        queue: str = "default",
        version: int = 1,
        timeout: timedelta = ...,
        cancel_grace: timedelta = ...,
    ) -> WorkflowDecorator: ...
    def workflow(self, *function: Any, **options: Any) -> Any:
        """Declare the `async def` below, whose first parameter is a Context, as a workflow. Raises DeclarationError.

        `name`: the workflow's name; by default the function's name. `queue`: only workers that serve this queue run the
        workflow. `version`: the value of `ctx.version` in new runs. `timeout`: the longest time between two waits of
        the function. `cancel_grace`: how long a cancelled run may take to undo its work, in whole seconds, at most an
        hour; then the platform ends the run.
        """
        terms = WorkflowTerms(**options)
        if function:
            return self._declare_workflow(function[0], terms, caller_locals(inspect.currentframe()))

        def declare(function: Callable[..., Any], /) -> Workflow:
            return self._declare_workflow(function, terms, caller_locals(inspect.currentframe()))

        return declare

    def _declare_workflow(
        self, function: Callable[..., Any], terms: WorkflowTerms, local_names: Mapping[str, Any]
    ) -> Workflow:
        workflow = workflow_of(self.name, function, terms, local_names, self.connections)
        self.register(workflow)
        return workflow

    def _declare(
        self, function: Callable[..., Any], terms: TaskTerms, local_names: Mapping[str, Any]
    ) -> Task[..., Any]:
        task_class: Any = PositionalTask if takes_positional(function) else KeywordTask
        if terms.batch is not None:
            task_class = BatchTask
        task: Task[..., Any] = task_class(self.name, function, terms, local_names, self.connections)
        self.register(task)
        return task

    def cron(
        self,
        expression: str,
        *,
        zone: str = "UTC",
        overlap: Overlap = "skip",
        catch_up: CatchUp = "skip",
        catch_up_within: timedelta = timedelta(days=1),
        **options: Unpack[TaskOptions],
    ) -> TaskDecorator:
        """Declare the function below as a task that runs at the times of a cron expression. Raises DeclarationError.

        `expression`: five fields, or @hourly, @daily, @weekly, @monthly, @yearly. `zone`: an IANA time zone. `overlap`:
        what happens when a run is due while the previous run is unfinished. `catch_up`: which missed runs still start,
        if they were due within the last `catch_up_within`. `options`: the options of `task`. All parameters of the
        function need defaults. When a worker starts, it writes the schedule, and pauses schedules that the code no
        longer has.
        """
        terms = TaskTerms(**options)

        def declare(function: Callable[..., Any], /) -> Task[..., Any]:
            from leasehold.domain import cron  # noqa: PLC0415 - it loads the time zones

            task = self._declare(function, terms, caller_locals(inspect.currentframe()))
            with declared_at(function):
                check_text("expression", expression, "@daily")
                check_text("zone", zone, "UTC")
                check_time("catch_up_within", catch_up_within)
            try:
                cron.check(expression, zone)
                payload = task.arguments.encoded((), {})
            except InvalidArguments as error:
                raise declaration_error(function, f"a schedule calls it without arguments: {error.message}") from error
            except Invalid as error:
                raise declaration_error(function, error.message) from error
            within_seconds = int(catch_up_within.total_seconds())
            with declared_at(function):
                schedule = DeclaredSchedule(task.name, expression, zone, payload, overlap, catch_up, within_seconds)
            self._schedules.append(schedule)
            return task

        untyped: Any = declare  # Any, because mypy cannot compare a function with the overloads of TaskDecorator
        decorator: TaskDecorator = untyped
        return decorator

    def lifespan(self, function: Callable[[], AsyncIterator[T]], /) -> Callable[[], AsyncIterator[T]]:
        """Declare the async generator below as the app's lifespan. A worker runs the generator to its `yield` before it
        serves the app, and to the end when the worker stops. Tasks read the yielded value as `current().state`.

        Raises DeclarationError for a second lifespan, and for a function that is not an async generator.
        """
        if self._lifespan is not None:
            raise declaration_error(function, f"the app {self.name} has a lifespan already")
        if not inspect.isasyncgenfunction(inspect.unwrap(function)):
            raise declaration_error(function, "a lifespan is an async def with one yield")
        self._lifespan = asynccontextmanager(function)
        return function

    def middleware(self, function: Middleware, /) -> Middleware:
        """Run the async generator below around each attempt of the app's tasks, except isolated tasks. The generator
        takes the attempt, as `current()` returns it. The code before the `yield` runs before the task's function. The
        code after the `yield` runs when the function has ended; if the function raised, the `yield` raises the same
        error.

        The middleware that is declared first is the outermost. Raises DeclarationError for a function that is not
        an async generator.
        """
        if not inspect.isasyncgenfunction(inspect.unwrap(function)):
            raise declaration_error(function, "a middleware is an async def with one yield")
        self._middleware.append(function)
        for task in self.tasks.values():
            self._wrap(task)
        return function

    def _wrap(self, task: Task[..., Any]) -> None:
        """Put the app's middleware, if there is any, around the attempts of the task."""
        if self._middleware:
            task.pipeline.around = around(task.name, self._middleware)

    @asynccontextmanager
    async def opened(self, settings: Settings) -> AsyncIterator[Opened]:
        """Open what all tasks of the app use together in a worker. Each worker opens it once."""
        async with AsyncExitStack() as stack:
            state = None if self._lifespan is None else await stack.enter_async_context(self._lifespan())
            processes = Processes(settings)
            stack.push_async_callback(processes.close)
            yield Opened(settings, state, processes, Batches())

    def register(self, task: Task[..., Any]) -> None:
        """Add a task. Raises DeclarationError if its name is taken, or if it may not use its queue."""
        other_task = self.tasks.get(task.name)
        if other_task is not None:
            raise DeclarationError(f"{task.location}: {task.name} is declared already, at {other_task.location}")
        (step,) = task.pipeline.steps
        self._refuse_mixed_queue(task, step.queue)
        task.pipeline.opens(self.opened)
        self._wrap(task)
        self.tasks[task.name] = task

    def move(self, tasks: Iterable[Task[..., Any]], queue: str) -> None:
        """Put tasks of the app into another queue. Use this only for tasks that have no run yet and that no worker
        serves. Raises DeclarationError, and moves no task, if one of them may not use the queue.
        """
        tasks = list(tasks)
        for task in tasks:
            self._refuse_mixed_queue(task, queue)
        for task in tasks:
            task.pipeline.move_to(queue)  # if the queue's name is not valid, the first call raises, so no task moves

    def _refuse_mixed_queue(self, task: Task[..., Any], queue: str) -> None:
        """Raises DeclarationError if the queue, with this task in it, would have both isolated and other tasks."""
        (step,) = task.pipeline.steps
        for other_task in self.tasks.values():
            (other_step,) = other_task.pipeline.steps
            if other_step.queue == queue and other_step.isolated is not step.isolated:
                raise DeclarationError(
                    f"{task.location}: {task.name} and {other_task.name} ({other_task.location}) are both in the queue "
                    f"{queue}, and only one is isolated: a queue has isolated tasks only, or none"
                )

    def add(self, *kinds: Pipeline | Kind) -> None:
        """Serve further pipelines with the app, for jobs with several steps or with files. A Kind is a group of
        pipelines that have their own endpoints, rows, retention and metrics.
        """
        self._added_kinds += kinds

    def use(self, settings: Settings) -> None:
        """Submit with these settings instead of those that come from the environment."""
        self.connections.use(settings)

    def use_api(self, url: str | None = None, key: str | None = None, *, timeout: float = 60.0) -> None:
        """Submit through the HTTP API, with an API key and without a database URL. `url`, `key`: by default
        LEASEHOLD_URL and LEASEHOLD_API_KEY. `timeout`: for how many seconds the app repeats a request while the API
        does not answer, or refuses the request for now. After that time the call raises Unavailable.

        The API must have been started with this app (`leasehold api MODULE:app`). `submit_in`, `id=`, `unique=`
        without a `key=`, and `debounce=` need the database.
        """
        from leasehold.app.http_link import ApiAccess  # noqa: PLC0415 - declaring a task loads no client

        self.connections.use_api(ApiAccess(url, key, timeout))

    @asynccontextmanager
    async def serving(self, settings: Settings | None = None) -> AsyncIterator[Worker]:
        """Run a worker for this app in this process during the block, for a small program or a test. At the end of the
        block the worker claims no further task, and waits up to `drain_seconds` for the attempts that run.

        The processes of `process=True` tasks and of isolated tasks import the program by its name. Raises
        DeclarationError, before anything starts, if these processes cannot import the program, or if the import would
        serve the app again.

        If a part of the worker fails, the block is cancelled, and `serving` raises the error. If an operator drains the
        worker (`leasehold workers drain`), or most of its threads are stuck, the worker claims no further task, and the
        block goes on.
        """
        from leasehold.app.logging import log_to_the_program  # noqa: PLC0415 - declaring a task loads no worker
        from leasehold.app.program import check_no_import_of_child  # noqa: PLC0415 - as above
        from leasehold.app.serving import watched, worker_of  # noqa: PLC0415 - as above

        check_no_import_of_child()
        log_to_the_program()
        async with worker_of(self, settings or self.connections.settings) as worker, watched(worker):
            yield worker

    def close(self) -> None:
        """Close the app's connections. The next submission opens them again."""
        self.connections.close()

    def pipelines(self) -> Pipelines:
        """All that a worker serves: the app's tasks, the pipelines given to `add`, and deliveries of webhooks."""
        from leasehold.pipelines import with_deliveries  # noqa: PLC0415 - declaring a task loads no pipelines

        registry = with_deliveries(*self._pipelines(), *self._added_kinds)
        registry.schedules[self.name] = tuple(self._schedules)
        return registry

    def _pipelines(self) -> Iterable[Pipeline]:
        return (task.pipeline for task in self.tasks.values())


def caller_locals(frame: FrameType | None) -> Mapping[str, Any]:
    """The local names of the frame's caller. The app evaluates the annotations of a task's function with these names,
    because an annotation may name a class that is local to the function where the task is declared.
    """
    caller = None if frame is None else frame.f_back
    return {} if caller is None else dict(caller.f_locals)
