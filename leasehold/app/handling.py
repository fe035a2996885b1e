"""The handlers of an app's tasks. The worker calls a handler, which decodes the arguments, calls the task's function
and encodes its result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from leasehold.app import results as encoding
from leasehold.app.arguments import Arguments
from leasehold.app.batches import Batches, result_alone
from leasehold.app.current import Current, enter, leave
from leasehold.app.process_frames import CallOfProcess
from leasehold.app.program import importable_name
from leasehold.app.results import Results
from leasehold.app.terms import TaskTerms
from leasehold.domain.errors import OVERTAKEN, Cancelled, Permanent, StepError, deciding, errors_of
from leasehold.domain.params import params_of_json
from leasehold.domain.result_limits import ResultLimits
from leasehold.domain.verdicts import Done, File
from leasehold.domain.work import Work
from leasehold.runtime.foreign_errors import text_of

if TYPE_CHECKING:
    from leasehold.app.processes import Processes


class Handling:
    """All handlers that one function may have. The function's task uses one of them:
    - `in_thread` calls a plain function in a thread of the worker.
    - `in_event_loop` awaits an `async def`.
    - `process` sends the call to a child process.
    - `isolated` calls the function in the sandbox's child process, where the handler itself runs.
    - `batched` calls the function once for several attempts.

    Each handler returns a Done. A small result of the function is in the Done itself. A large result is an output, and
    the Done names the output. `own=True` in a call of `attempt.write`: no other step of the job replaces this output.
    `attempt.opened`: what the worker has opened for the app (`Opened` of app.py).
    """

    def __init__(
        self, name: str, function: Callable[..., Any], arguments: Arguments, results: Results, terms: TaskTerms
    ) -> None:
        self._name = name
        self._function = function
        self._arguments = arguments
        self._results = results
        self._final_errors = FinalErrors(terms.retry.never)
        self._batch = terms.batch

    def in_thread(self, attempt: Any) -> Done:
        """Handle a leasehold.PlainAttempt: call a plain function in this thread."""
        encoded = self._call_function(attempt.params, attempt)
        if ResultLimits.of_settings(attempt.opened.settings).is_small(encoded):
            return Done(value=encoding.inline_value(encoded))
        attempt.write(encoding.OUTPUT, encoded, encoding.CONTENT_TYPE, own=True)
        return Done(value=encoding.stored_value())

    async def in_event_loop(self, attempt: Any) -> Done:
        """Handle a leasehold.Attempt: call an async function in the worker's event loop."""
        positional, named = self._arguments.decoded(attempt.params)
        token = enter(Current(self._name, attempt))
        try:
            with self._final_errors:
                result = await self._function(*positional, **named)
        finally:
            leave(token)
        return await done_with_result(attempt, self._results.encoded(result))

    async def batched(self, attempt: Any) -> Done:
        """Handle a leasehold.Attempt whose function takes a list of items. Each attempt brings one item, which is the
        only argument of its run. In the second and each later attempt of a run, the item gets a call of its own. So an
        item that always fails makes other items fail only in its first attempt.
        """
        assert self._batch is not None
        positional, named = self._arguments.decoded(attempt.params)
        (item,) = (*positional, *named.values())

        async def call_all(items: list[Any]) -> Any:
            return await attempt.call(partial(self._function, items))

        with self._final_errors:
            if attempt.number > 1:
                result = await result_alone(item, call_all)
            else:
                batches: Batches = attempt.opened.batches
                result = await batches.result_of(self._name, attempt.tenant_id, self._batch, item, call_all)
        return await done_with_result(attempt, self._results.encoded(result))

    @staticmethod
    def room(attempt: Any) -> AbstractAsyncContextManager[bool]:
        """Reserve a process for an attempt of a `process` task. Yields False if no process became free in time."""
        processes: Processes = attempt.opened.processes
        return processes.room()

    async def process(self, attempt: Any) -> Done:
        """Handle a leasehold.Attempt whose function runs in a process of its own (processes.py)."""
        call = CallOfProcess(
            module=importable_name(self._function.__module__) or self._function.__module__,
            task=self._name,
            params=attempt.params.model_dump(mode="json", by_alias=True),
            job_id=str(attempt.job_id),
            task_id=str(attempt.task_id),
            tenant=attempt.tenant_id,
            number=attempt.number,
            directory=str(attempt.directory),
            result_limits=ResultLimits.of_settings(attempt.opened.settings),
        )
        return await done_with_result(attempt, await attempt.opened.processes.run(call, attempt))

    def isolated(self, work: Work) -> Done:
        """Handle a leasehold.Work: call the function in this process, which is the sandbox's child."""
        encoded = self._call_function(work.params, work)
        limits = work.result_limits or ResultLimits.default()
        if limits.is_small(encoded):
            return Done(value=encoding.inline_value(encoded))
        path = work.directory / encoding.OUTPUT
        path.write_bytes(encoded)
        return Done(files={encoding.OUTPUT: File(path, encoding.CONTENT_TYPE)}, value=encoding.stored_value())

    def call_with_json(self, params: Mapping[str, Any], attempt: Any) -> bytes:
        """Call a plain function with the JSON of its arguments. Returns the JSON of its result."""
        return self._call_function(params_of_json(self._arguments.model, params), attempt)

    def _call_function(self, params: Any, attempt: Any) -> bytes:
        positional, named = self._arguments.decoded(params)
        token = enter(Current(self._name, attempt))
        try:
            with self._final_errors:
                result = self._function(*positional, **named)
        finally:
            leave(token)
        return self._results.encoded(result)


async def done_with_result(attempt: Any, encoded: bytes) -> Done:
    """Make the Done of a leasehold.Attempt whose function returned this JSON. A large result is first stored as an
    output.
    """
    if ResultLimits.of_settings(attempt.opened.settings).is_small(encoded):
        return Done(value=encoding.inline_value(encoded))
    await attempt.write(encoding.OUTPUT, encoded, encoding.CONTENT_TYPE, own=True)
    return Done(value=encoding.stored_value())


class FinalErrors:
    """A context manager that raises Permanent in place of some errors of its block. `never`: the exceptions after which
    a run is never retried (Retry.never). The context manager replaces these exceptions, and a group (of
    asyncio.TaskGroup) that contains one of them. Exception: if Cancelled or an error of OVERTAKEN decides how the
    attempt ends (`deciding`), nothing is replaced. An error of OVERTAKEN shows that another attempt may have the task.
    """

    __slots__ = ("_never",)

    def __init__(self, never: tuple[type[Exception], ...]) -> None:
        self._never = never

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None or isinstance(deciding(error), (*OVERTAKEN, Cancelled)):
            return
        for one in (error, *errors_of(error)):
            if isinstance(one, self._never):
                raise _permanent_error_of(one) from error


def _permanent_error_of(error: Exception) -> Permanent:
    if isinstance(error, StepError):  # keep the error's own code, which programs read
        return Permanent(error.code, error.message)
    return Permanent("handler_error", text_of(error))
