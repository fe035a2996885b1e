"""`TestApp`: an App for one test, on a database of its own. A worker runs only while the test calls `drain`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from inspect import iscoroutinefunction
from time import monotonic
from typing import Any, Generic, ParamSpec, TypeVar

from pydantic import BaseModel

from leasehold.app.app import App
from leasehold.app.handling import FinalErrors
from leasehold.app.program import modules_of, source_of
from leasehold.app.run import Run
from leasehold.app.task import Task
from leasehold.app.terms import STEP
from leasehold.celery.apps import made_apps
from leasehold.db.database import Connection, connected
from leasehold.domain.errors import DeclarationError
from leasehold.domain.params import params_of_json
from leasehold.runtime import failpoints
from leasehold.runtime.import_path import import_path
from leasehold.schedules.declared import reconcile
from leasehold.settings import Settings, as_variables, servers_of_database
from leasehold.testing.server import TestServer
from leasehold.transitions.time_travel import end_leases, let_pass
from leasehold.transitions.workflows.children import HAS_NEWS, IS_WAITING_WORKFLOW
from leasehold.workflows.driver import final_error

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
TENANT = "test"
_POLL_SECONDS = 0.02
#: The program of a worker process. It first imports the modules in its arguments, because they declare the app's tasks.
_WORKER = (
    "import importlib, runpy, sys; [importlib.import_module(name) for name in sys.argv[1:]];"
    " sys.argv[1:] = []; runpy.run_module('leasehold.worker', run_name='__main__', alter_sys=True)"
)

# Up to five examples of work that is due or under way: due tasks, running tasks, tasks of runs that wait at concurrency
# limits, and due schedules. Also workflows that await an ended run and do not know of its end yet, and ended runs whose
# webhook deliveries or follow-up runs are not written yet.
_FIND_BUSY = f"""
SELECT t.step, j.pipeline, t.status FROM task t JOIN job j ON j.id = t.job_id
WHERE j.finished_at IS NULL AND (t.status = 'running' OR (t.available_at <= clock_timestamp()
      AND (t.status IN ('pending', 'retry', 'waiting') OR (t.status = 'blocked' AND j.held))))
UNION ALL
SELECT 'a tick of the schedule', template, 'due' FROM schedule WHERE next_run_at <= clock_timestamp()
UNION ALL
SELECT 'the end of a run that it awaits', j.pipeline, 'due' FROM job j WHERE j.finished_at IS NULL
  AND EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id AND {HAS_NEWS})
  AND EXISTS (SELECT 1 FROM task t WHERE t.job_id = j.id AND {IS_WAITING_WORKFLOW})
UNION ALL
SELECT 'webhooks and follow-up runs', pipeline, 'due' FROM job WHERE notify AND finished_at IS NOT NULL
LIMIT 5
"""


class Submitted(Generic[Result]):
    """A run that was submitted. `arguments`: parameter -> argument, as the task's function gets them."""

    def __init__(self, run: Run[Result], arguments: dict[str, Any], tags: dict[str, str]) -> None:
        self.run = run
        self.arguments = arguments
        self.tags = tags

    def __repr__(self) -> str:
        return f"<submitted {self.run.task}: {self.arguments}>"


class TestApp:
    """The value of the fixture `leasehold_app`. Nothing runs before `drain`."""

    __test__ = False  # otherwise pytest would collect the class as a test

    def __init__(self, app: App, server: TestServer) -> None:
        self.app = app
        self._server = server
        self._url = server.database()
        servers: dict[str, Any] = servers_of_database(self._url)
        self.settings = Settings(
            _env_file=None,
            **servers,
            broker="postgres",
            object_store="none",
            result_inline_bytes=1024 * 1024,
            tenant=TENANT,
            poll_seconds=0.05,
            drain_seconds=1.0,
            isolation="best_effort",
        )
        # Name of a task -> the errors that its next attempts raise (`fail_next`).
        self._errors: dict[str, list[BaseException]] = defaultdict(list)
        self._undo: dict[str, Callable[[], None]] = {}  # name of a task -> undoes what `fail_next` has changed
        self._death_point: str | None = None  # the failpoint of `die_at`, until the next `drain`
        self._before = app.connections.settings_in_use, app.connections.api_in_use  # `close` restores both
        app.use(self.settings)

    def close(self) -> None:
        """Restore the app's tasks, settings and API, and drop the database."""
        for undo in self._undo.values():
            undo()
        settings, api = self._before
        self.app.connections.use(settings)
        if api is not None:
            self.app.connections.use_api(api)
        self._server.drop(self._url)

    # --- running

    def drain(self, timeout: float = 30.0) -> None:
        """Run a worker until no task, no tick of a schedule and no webhook delivery is due or under way. Tasks that
        wait for a later time stay.

        Raises TimeoutError, which names the work that is left, or the point of `die_at` that no worker reached. Call
        `drain` outside of an event loop. Inside an event loop, call `adrain`.
        """
        self._server.portal.call(self._drain(timeout))

    async def adrain(self, timeout: float = 30.0) -> None:
        """The same as `drain`, for code in an event loop."""
        await self._server.portal.acall(self._drain(timeout))

    async def _drain(self, timeout: float) -> None:
        deadline = monotonic() + timeout
        if self._death_point is not None:
            point, self._death_point = self._death_point, None
            await self._run_until_killed(point, deadline)
            # End the leases of the dead worker, so that the next worker can claim its tasks immediately. Usually the
            # next worker sees the death by itself, because PostgreSQL has dropped the dead worker's presence lock. But
            # on a busy machine a worker may claim, and die, before it holds that lock.
            async with connected(self.settings, "testing") as connection:
                await end_leases(connection)
        with tempfile.TemporaryDirectory(prefix="leasehold-test-") as folder:
            settings = self.settings.model_copy(update={"work_dir": folder})
            # `serving` runs a worker until the block ends.
            async with self.app.serving(settings), connected(self.settings, "testing") as connection:
                for name, schedules in self.app.pipelines().schedules.items():
                    # Write the schedules that the app declares.
                    await reconcile(connection, TENANT, name, schedules)
                while busy_rows := await connection.fetch(_FIND_BUSY):
                    if monotonic() > deadline:
                        names = ", ".join(f"{row['pipeline']}: {row['step']} is {row['status']}" for row in busy_rows)
                        raise TimeoutError(f"after {timeout:g} s there is still work: {names}")
                    await asyncio.sleep(_POLL_SECONDS)

    async def _run_until_killed(self, point: str, deadline: float) -> None:
        """Run a worker process until it is killed at the failpoint `point`. `deadline`: a time of monotonic()."""
        with tempfile.TemporaryDirectory(prefix="leasehold-test-") as folder:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _WORKER, *modules_of(self.app.tasks.values()),
                env=self._environment(point, folder),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            try:
                async with asyncio.timeout(max(deadline - monotonic(), 0.1)):
                    output, _ = await process.communicate()
            except TimeoutError:
                raise TimeoutError(f"no worker reached the point {point}") from None
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            was_killed = process.returncode == -signal.SIGKILL
            if not was_killed:
                last_output = output.decode(errors="replace")[-2000:]
                raise RuntimeError(f"the worker ended before it reached the point {point}:\n{last_output}")

    def _environment(self, point: str, folder: str) -> dict[str, str]:
        # The environment variables of a worker process that is killed at `point`. `folder`: its working directory.
        setting_names = ("broker", "object_store", "result_inline_bytes", "tenant", "poll_seconds", "isolation",
                         "presence", "lease_seconds")  # fmt: skip
        settings = {f"LEASEHOLD_{name.upper()}": str(getattr(self.settings, name)) for name in setting_names}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
        return inherited | settings | as_variables(servers_of_database(self._url)) | {
            "LEASEHOLD_PIPELINES": source_of(self.app),
            "LEASEHOLD_FAILPOINTS": f"{point}:kill",
            "LEASEHOLD_WORK_DIR": folder,
            "PYTHONPATH": os.pathsep.join(import_path()),
        }  # fmt: skip

    # --- what the test arranges

    def travel(self, **time: float) -> None:
        """Let time pass for all that waits, for example `travel(hours=1)`. The arguments are those of `timedelta`.

        Nothing sleeps. Instead, the instants in the database move back, both past instants and due times. So a workflow
        that subtracts an earlier instant from `ctx.now()` sees how much time has passed. But because the earlier
        instants change, code that compares `ctx.now()` with a date or an hour of the day may take another branch after
        `travel`. A schedule fires at most once per `travel`, even if it was due several times in that span.
        """

        async def travel(connection: Connection) -> None:
            # The runs of Celery's tasks have one more instant, the parameter `expires`, which `let_pass` moves as well.
            of_celery = [task.name for task in self.app.tasks.values() if _celery_task_of(task) is not None]
            await let_pass(connection, timedelta(**time), of_celery)

        self._on_connection(travel)

    def fail_next(self, task: Task[..., Any], error: BaseException) -> None:
        """Let the next attempt of the task raise `error` instead of calling the function. Two calls make the next two
        attempts fail. The error has the same consequences as if the function had raised it. Raises DeclarationError for
        an isolated task, which runs in another process.
        """
        if task.terms.isolated:
            raise DeclarationError(f"{task.name} is isolated: it runs in a process that fail_next cannot reach")
        if task.name not in self._undo:
            self._undo[task.name] = _let_fail(task, self._errors[task.name])
        self._errors[task.name].append(error)

    def die_at(self, point: str) -> None:
        """Let the next `drain` begin with a worker process that is killed at `point`, and then run another worker.

        `after_claim`: the task is claimed, and its function has not run. `after_commit`: the result is committed.
        `commit.NAME`: the transaction NAME has committed (leasehold/db/commit_points.py). `point` may also be any other
        failpoint of leasehold/runtime/failpoints.py. Raises DeclarationError for an unknown failpoint. The worker
        process imports the app, so the app must be a module-level variable.
        """
        failpoints.check(point)
        self._death_point = point

    # --- what the test reads

    def submitted(self, task: Task[Parameters, Result]) -> list[Submitted[Result]]:
        """The runs of the task that were submitted, the oldest first, in any status."""

        async def read(connection: Connection) -> list[Any]:
            return await connection.fetch(
                "SELECT j.id, j.params, (SELECT jsonb_object_agg(name, value) FROM job_tag g WHERE g.job_id = j.id)"
                " AS tags FROM job j WHERE j.tenant_id = $1 AND j.pipeline = $2 ORDER BY j.id",
                TENANT,
                task.name,
            )

        return [
            Submitted(task.find(row["id"]), _arguments(task, row["params"]), row["tags"] or {})
            for row in self._on_connection(read)
        ]

    def _on_connection(self, work: Callable[[Connection], Any]) -> Any:
        # Call `work` with a connection, in the event loop of the test server, and return its result.
        async def run() -> Any:
            async with connected(self.settings, "testing") as connection:
                return await work(connection)

        return self._server.portal.call(run())


def _arguments(task: Task[..., Any], params: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a run, as the task's function gets them: parameter -> argument."""
    checked: BaseModel = params_of_json(task.arguments.model, params)
    positional, keyword_arguments = task.arguments.decoded(checked)
    return dict(zip(task.arguments.names, positional, strict=False)) | keyword_arguments


def _celery_task_of(task: Task[..., Any]) -> Any:
    """The CeleryTask that declares this task, or None if no Celery program declares it."""
    of_celery = (celery_task for celery_app in made_apps for celery_task in celery_app.tasks.values())
    return next((celery_task for celery_task in of_celery if celery_task.task is task), None)


def _let_fail(task: Task[..., Any], errors: list[BaseException]) -> Callable[[], None]:
    """From now on, each attempt of the task first takes the next error from the list `errors` and raises it. While the
    list is empty, attempts run as usual. Returns a function that undoes this.
    """
    celery_task = _celery_task_of(task)
    if celery_task is not None:
        # The code around the function of a CeleryTask decides which errors end the run, so only the function is
        # replaced.
        function = celery_task.function_of_attempts
        celery_task.function_of_attempts = _failing_in_thread(function, partial(_raise_next, errors))
        return partial(setattr, celery_task, "function_of_attempts", function)
    handler = task.pipeline.handlers[STEP]
    failing = _failing_in_loop if iscoroutinefunction(handler) else _failing_in_thread
    task.pipeline.handlers[STEP] = failing(handler, partial(_raise_next_of, task, errors))
    return partial(task.pipeline.handlers.__setitem__, STEP, handler)


def _failing_in_loop(handler: Callable[..., Any], raise_next: Callable[[], None]) -> Callable[..., Any]:
    """An async handler that first calls `raise_next`, and then `handler`."""

    async def failing(attempt: Any) -> Any:
        raise_next()
        return await handler(attempt)

    return failing


def _failing_in_thread(function: Callable[..., Any], raise_next: Callable[[], None]) -> Callable[..., Any]:
    """The same as `_failing_in_loop`, for a function that runs in a thread."""

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise_next()
        return function(*args, **kwargs)

    return failing


def _raise_next(errors: list[BaseException]) -> None:
    """Raise the next error, if there is one."""
    if errors:
        raise errors.pop(0)


def _raise_next_of(task: Task[..., Any], errors: list[BaseException]) -> None:
    """Do the same as `_raise_next`, but first convert the error as the task's own handler does. The error becomes
    Permanent if the task's `Retry(never=...)` names it. In a workflow, `final_error` converts it.
    """
    if not task.runnable.is_workflow:
        with FinalErrors(task.terms.retry.never):
            _raise_next(errors)
    elif errors:
        raise final_error(errors.pop(0))
