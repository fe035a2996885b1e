"""`Celery`: an app with Celery's methods. A leasehold.App submits and serves its tasks."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Annotated, Any
from uuid import UUID

from pydantic import Field

from leasehold.app.app import App
from leasehold.app.current import Current
from leasehold.app.program import importable_name
from leasehold.app.run import Run
from leasehold.app.source_location import PlaceOfCaller, declaration_error
from leasehold.celery import result
from leasehold.celery.apps import CeleryApp, made_apps, newest_app
from leasehold.celery.canvas import check_tasks, run_plan
from leasehold.celery.exceptions import NotSupported
from leasehold.celery.lacking import OF_APP, Lacking
from leasehold.celery.options import check_setting, not_supported, options_of
from leasehold.celery.task import CeleryTask, code_of
from leasehold.domain.errors import Permanent
from leasehold.domain.registry import Pipelines
from leasehold.runtime.foreign_errors import text_of
from leasehold.workflows.context import Context

#: The name of the workflow that runs the canvas (Celery's word for chains, groups and chords).
_CANVAS = "celery-canvas"
#: The queue of tasks without a queue of their own, until `task_default_queue` names another queue.
_DEFAULT_QUEUE = "default"
#: The type of the field `task_id` of a run's payload. Only a run with a Celery id has this field, because a worker of
#: an earlier release does not know the field.
_TaskId = Annotated[str | None, Field(exclude_if=lambda task_id: task_id is None)]


class Conf:
    """`app.conf`. It refuses settings that leasehold.celery does not support. Leasehold's own settings are LEASEHOLD_*
    variables. `use_default_queue`: called with each new value of `task_default_queue`.
    """

    task_default_queue: str | None = _DEFAULT_QUEUE
    _use_default_queue: Callable[[Any], None]

    def __init__(self, use_default_queue: Callable[[Any], None]) -> None:
        object.__setattr__(self, "_use_default_queue", use_default_queue)

    def __setattr__(self, name: str, value: Any) -> None:
        check_setting(name, value)
        if name == "task_default_queue":
            self._use_default_queue(value)
        super().__setattr__(name, value)

    def update(self, *settings: dict[str, Any], **named_settings: Any) -> None:
        """Raises NotSupported for a setting that leasehold.celery does not support."""
        for name, value in {**(settings[0] if settings else {}), **named_settings}.items():
            setattr(self, name, value)


class _App(App):
    """An App that calls `settle` (see Celery.settle) before a worker or the API gets its tasks."""

    def __init__(self, name: str, settle: Callable[[], None]) -> None:
        super().__init__(name)
        self._settle = settle

    def pipelines(self) -> Pipelines:
        self._settle()
        return super().pipelines()


class Celery(Lacking):
    """An app with Celery's methods. `main`: its name. `broker` and `backend` are ignored, because
    LEASEHOLD_DATABASE_URL and LEASEHOLD_AMQP_URL name the servers. Raises NotSupported for any other argument of
    Celery's class.
    """

    # For `Lacking`, which raises an error for an attribute that only Celery's class has: the name of that class, and
    # these attributes.
    _IN_CELERY, _LACKS = "Celery", OF_APP

    def __init__(self, main: str | None = None, *, broker: str = "", backend: str = "", **unsupported: Any) -> None:
        del broker, backend
        for name in unsupported:
            raise not_supported(name)
        self.main = main or "celery"
        self._is_settled = False  # whether the tasks may already have runs or a worker
        self.app: App = _App(_allowed_name(self.main), self.settle)
        self.app.middleware(self._end_after_last_retry)  # outermost, so it gets errors of the program's middleware, too
        self.conf = Conf(self._use_default_queue)
        self.tasks: dict[str, CeleryTask] = {}
        self._tasks_of_app: dict[str, CeleryTask] = {}  # by their names in the leasehold.App
        self._canvas = self._declare_canvas()
        made_apps.append(self)
        for declare in _shared_declarations:
            declare(self)

    @property
    def default_queue(self) -> str:
        """The queue of tasks without a queue of their own, and of chains, groups and chords."""
        return self.conf.task_default_queue or _DEFAULT_QUEUE

    def _use_default_queue(self, queue: str | None) -> None:
        """Put the canvas, and all tasks without a queue of their own, into the queue. As in Celery, the order in which
        the program declares its tasks and sets `task_default_queue` does not matter. But if the app has submitted a run
        or is served, a change would leave runs behind in the old queue. Raises NotSupported for such a change, and
        DeclarationError for a queue that the tasks may not use.
        """
        queue = queue or _DEFAULT_QUEUE
        if queue == self.default_queue:
            return
        if self._is_settled:
            raise NotSupported(
                f"leasehold.celery changes no task_default_queue (to {queue!r}) of an app that has submitted a run or"
                " is served: set it where the app is made"
            )
        tasks = [task.task for task in self.tasks.values() if task.options.queue is None]
        with PlaceOfCaller():
            self.app.move([self._canvas, *tasks], queue)

    def settle(self) -> None:
        """From now on, refuse another `task_default_queue`. Call this before the app submits a run or is served."""
        self._is_settled = True

    def task(self, *function: Callable[..., Any], **options: Any) -> Any:
        """`@app.task` and `@app.task(...)`. Raises NotSupported and DeclarationError at import."""

        def declare(function: Callable[..., Any]) -> CeleryTask:
            task_options = dict(options)
            name = task_options.pop("name", None) or f"{self._module_of(function)}.{function.__name__}"
            return CeleryTask(self, function, name, options_of(task_options))

        return declare(function[0]) if function else declare

    def _module_of(self, function: Callable[..., Any]) -> str:
        """The module's name, as the name of the function's task has it. For a script, this name is the same in the
        process that runs the script and in a worker that imports the script. For a program that no other process can
        import, it is the name of the app, as in Celery.
        """
        return importable_name(function.__module__) or self.main

    def declare(self, task: CeleryTask) -> Any:
        """Declare the leasehold task that runs a CeleryTask, and return it. Raises DeclarationError."""

        def work(
            *,
            args: list[Any] | None = None,
            kwargs: dict[str, Any] | None = None,
            expires: str | None = None,
            task_id: _TaskId = None,
        ) -> Any:
            return task.work(args or [], kwargs or {}, expires, task_id)

        work.__module__, work.__doc__ = task.__module__, task.__doc__
        module = self._module_of(task.run)
        short_name = task.name.rpartition(".")[2] if task.name.startswith(f"{module}.") else task.name
        own_name = _allowed_name(short_name)
        # Refuse a second task with the same name in Leasehold. If this function made up another name for the second
        # task, the order of the imports would decide which task gets which name. But a program and its worker may
        # import in different orders.
        if (other_task := self._tasks_of_app.get(f"{self.app.name}.{own_name}")) is not None:
            raise declaration_error(
                task.run,
                f"{task.name} would have the name {own_name}, as {other_task.name} has: give one of them another with"
                " @app.task(name=...)",
            )
        leasehold_task = self.app.task(
            name=own_name,
            queue=task.queue,
            retry=task.retry_rule,
            timeout=task.options.time_limit,
            limit=task.options.limit,
        )(work)
        self.tasks[task.name] = task
        self._tasks_of_app[leasehold_task.name] = task
        return leasehold_task

    def find(self, celery_id: str) -> Run[Any] | None:
        """The handle of the run with this id, which may be a run of any of the app's tasks; None if there is no such
        run. Raises Unreachable. After `use_api`, raises Unavailable or Forbidden instead.

        The `find` of any task would return this handle. This method uses the `find` of the canvas (the workflow
        `_CANVAS`), because every app has the canvas.
        """
        run_id = self.app.connections.call(self._id_of_run(celery_id))
        return None if run_id is None else self._canvas.find(run_id)

    async def _id_of_run(self, celery_id: str) -> UUID | None:
        return await (await self.app.connections.link()).find(celery_id)

    def AsyncResult(self, task_id: str) -> result.AsyncResult:  # noqa: N802 - Celery's name
        return result.AsyncResult(task_id, self)

    def send_task(self, name: str, args: Any = None, kwargs: Any = None, **options: Any) -> result.AsyncResult:
        """Submit a run of the task `name`. The program must declare the task, with its queue and retries."""
        if name not in self.tasks:
            raise NotSupported(f"leasehold.celery knows no task {name}: import its module, or submit over HTTP")
        return self.tasks[name].apply_async(args, kwargs, **options)

    def autodiscover_tasks(self, packages: Iterable[str] | None = None, related_name: str = "tasks") -> None:
        """Import the module `tasks` of each package that has such a module. Raises NotSupported without packages."""
        if packages is None:
            raise NotSupported("leasehold.celery finds tasks in packages that are named: autodiscover_tasks([...])")
        for package in packages:
            if find_spec(f"{package}.{related_name}") is not None:
                import_module(f"{package}.{related_name}")

    def config_from_object(self, source: Any, namespace: str = "") -> None:
        """Read the settings of a module or an object. Raises NotSupported for a setting that leasehold.celery does not
        support.
        """
        settings = import_module(source) if isinstance(source, str) else source
        if namespace:
            raise NotSupported("leasehold.celery reads no settings with a namespace: use LEASEHOLD_* variables")
        for name in dir(settings):
            value = getattr(settings, name)
            # Leave out the modules, functions and classes that a module of settings imports.
            if not name.startswith("_") and not isinstance(value, ModuleType) and not callable(value):
                setattr(self.conf, name, value)

    def pipelines(self) -> Pipelines:
        """The pipelines that `leasehold worker MODULE:app` serves."""
        return self.app.pipelines()

    def submit_canvas(self, plan: dict[str, Any], args: list[Any]) -> result.AsyncResult:
        """Submit a chain, group or chord. Raises NotSupported for more than one argument."""
        if len(args) > 1:
            raise NotSupported("leasehold.celery gives a chain, group or chord one argument")
        self.settle()
        run = self._canvas.submit(plan=plan, args=args)
        return result.AsyncResult(run.id, self, run)

    async def _end_after_last_retry(self, attempt: Current) -> AsyncIterator[None]:
        """The middleware around each attempt. The platform's rule of retries (CeleryTask.retry_rule) allows a task with
        `bind=True` 1,000 retries. So this middleware ends the run of such a task after the task's `max_retries`. For a
        task without `bind=True` the platform's rule is enough, so `is_last` returns False.
        """
        try:
            yield
        except Exception as error:
            task = self._tasks_of_app.get(attempt.task)
            if task is None or not task.is_last(error, attempt.attempt.errors):
                raise
            raise Permanent(code_of(error), text_of(error)) from error

    def _declare_canvas(self) -> Any:
        async def run_canvas(ctx: Context, *, plan: dict[str, Any], args: list[Any]) -> Any:
            """A chain, group or chord of Celery's. It begins on a worker that has the tasks of all its calls."""
            check_tasks(self.tasks, plan)
            return await run_plan(ctx, self.tasks, plan, *args)

        return self.app.workflow(name=_CANVAS)(run_canvas)


#: For each `@shared_task` of the process, the function that declares the task in an app. A new app calls all of them.
_shared_declarations: list[Callable[[CeleryApp], CeleryTask]] = []


def current_app() -> Celery:
    """The app that was made last. Raises DeclarationError if there is none yet."""
    app = newest_app()
    assert isinstance(app, Celery)
    return app


class SharedTask:
    """What `@shared_task` returns: a task in each app of the process. A call goes to the task of `current_app()`."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self._function = function
        self._options = options
        self._tasks: dict[int, CeleryTask] = {}  # by the id() of their apps
        self.__name__ = function.__name__
        self.__wrapped__ = function
        # Read the options only to raise NotSupported now. If no app exists yet, nothing else checks the options.
        options_of({name: value for name, value in options.items() if name != "name"})
        _shared_declarations.append(self._declare)
        for app in made_apps:
            self._declare(app)

    def _declare(self, app: CeleryApp) -> CeleryTask:
        task: CeleryTask = app.task(**self._options)(self._function)
        self._tasks[id(app)] = task
        return task

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tasks[id(current_app())](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tasks[id(current_app())], name)


def shared_task(*function: Callable[..., Any], **options: Any) -> Any:
    """`@shared_task`: a task of every app of the program. Raises NotSupported at import."""
    if function:
        return SharedTask(function[0], options)
    return lambda function_below: SharedTask(function_below, options)


def _allowed_name(name: str) -> str:
    """The name from Celery, changed to a name that leasehold allows: small letters, digits, `_` and `-`. The first
    character must be a letter, so a name that begins otherwise gets the prefix `c-`.
    """
    allowed_name = re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-_")
    return allowed_name if allowed_name[:1].isalpha() else f"c-{allowed_name}"
