"""`Workflow`: a function that was declared with `@app.workflow`. Its code calls the methods of a `Context`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, TypeAlias, TypeVar

from leasehold.app.arguments import POSITIONAL, Arguments, hints_of, takes_positional
from leasehold.app.connection import Connections
from leasehold.app.handling import done_with_result
from leasehold.app.results import Results
from leasehold.app.source_location import declaration_error, declared_at
from leasehold.app.task import KeywordTask, PositionalTask, Task
from leasehold.app.terms import TaskTerms, check_name_and_times
from leasehold.domain.errors import DeclarationError, HandlerMissing
from leasehold.domain.missing_code import joined_handlers, pause_without_code
from leasehold.domain.option_types import is_whole
from leasehold.domain.verdicts import LeftToOthers

A = TypeVar("A")  # the type of the first argument after the context
P = ParamSpec("P")  # all parameters after the context
Q = ParamSpec("Q")  # the parameters after the context and the first argument
R = TypeVar("R")  # the type of the result
#: The highest version, because PostgreSQL stores the version as a smallint.
MAX_VERSION = 32_767
_FIRST_PARAMETER = "the first parameter of a workflow is its context: async def f(ctx: Context, ...)"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowTerms:
    """The options of `@app.workflow(...)`. `App.workflow` explains each option."""

    name: str | None = None
    queue: str = "default"
    version: int = 1
    timeout: timedelta = timedelta(minutes=5)
    cancel_grace: timedelta = timedelta(seconds=30)

    def check_types(self) -> None:
        """Raises DeclarationError for an option of a wrong type. The message says what to write."""
        check_name_and_times(self.name, self.queue, self.timeout, self.cancel_grace)
        if not is_whole(self.version) or not 1 <= self.version <= MAX_VERSION:
            raise DeclarationError(f"version is a whole number of 1 to {MAX_VERSION}, not {self.version!r}")


class WorkflowHandling:
    """Runs a workflow. `run_until_wait` is the handler of the workflow's only step, which the worker calls."""

    def __init__(self, function: Callable[..., Any], arguments: Arguments, results: Results) -> None:
        self._function = function
        self._arguments = arguments
        self._results = results

    async def run_until_wait(self, attempt: Any) -> Any:
        """Run the function until it ends or waits. If it has ended, returns a Done. If it waits, returns the
        suspension, which says what the run waits for. If a workflow of the platform itself calls a task whose code this
        worker lacks, returns LeftToOthers, so that a worker with the code goes on.
        """
        from leasehold.workflows.context import Context  # noqa: PLC0415 - declaring a workflow does not load it

        positional, named = self._arguments.decoded(attempt.params)

        def start(driver: Any) -> Coroutine[Any, Any, Any]:
            coroutine: Coroutine[Any, Any, Any] = self._function(Context(driver), *positional, **named)
            return coroutine

        try:
            outcome = await attempt.drive(start)  # `drive` makes the driver, which executes the calls of `ctx`
        except HandlerMissing as error:
            pause = timedelta(seconds=pause_without_code(attempt.job_id))
            return LeftToOthers(pause, handler=joined_handlers(error.handlers))
        if not outcome.ended:
            return outcome.suspension
        return await done_with_result(attempt, self._results.encoded(outcome.result))


class _WorkflowTask(Task[P, R]):
    """What a workflow does differently from a task. It is the base of PositionalWorkflow and KeywordWorkflow."""

    _leading_parameters = 1  # the context, which no caller passes

    @staticmethod
    def _hints(function: Callable[..., Any], local_names: Mapping[str, Any] | None) -> Mapping[str, Any]:
        hints = hints_of(function, local_names)
        first_name = next(iter(inspect.signature(function).parameters))
        if not _may_be_context(first_name, hints.get(first_name)):
            raise declaration_error(function, _FIRST_PARAMETER)
        return hints

    def _handler(self) -> Callable[..., Any]:
        return WorkflowHandling(self.function, self.arguments, self.results).run_until_wait

    def local(self, *args: P.args, **kwargs: P.kwargs) -> R:  # noqa: ARG002 - the signature of a task
        """Raises TypeError, because a workflow needs a server, which keeps its journal (the record of its calls)."""
        raise TypeError(f"{self.name} is a workflow: it needs a server, which keeps its journal")

    async def alocal(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Raises TypeError, as `local` does."""
        return self.local(*args, **kwargs)


class PositionalWorkflow(_WorkflowTask[Concatenate[A, Q], R], PositionalTask[A, Q, R, NoReturn], Generic[A, Q, R]):
    """A workflow that takes a positional argument besides its context. Only a worker can run it, so submit it."""

    def __call__(self, _argument: A, /, *_args: Q.args, **_kwargs: Q.kwargs) -> NoReturn:
        """Raises TypeError."""
        raise _error_of_call(self)


class KeywordWorkflow(_WorkflowTask[P, R], KeywordTask[P, R, NoReturn], Generic[P, R]):
    """A workflow without parameters besides its context, or with keyword-only parameters."""

    def __call__(self, *_args: P.args, **_kwargs: P.kwargs) -> NoReturn:
        """Raises TypeError."""
        raise _error_of_call(self)


Workflow: TypeAlias = "PositionalWorkflow[Any, ..., Any] | KeywordWorkflow[..., Any]"


def workflow_of(
    app: str,
    function: Callable[..., Any],
    terms: WorkflowTerms,
    local_names: Mapping[str, Any],
    connections: Connections,
) -> Workflow:
    """The workflow of a function. `local_names`: the local names where the function is declared, because its
    annotations may use them. `connections`: how the app reaches its installation. Raises DeclarationError with file and
    line.
    """
    _check_function(function)
    with declared_at(function):
        terms.check_types()
    # `skip`: the context, which no caller passes.
    workflow_class: Any = PositionalWorkflow if takes_positional(function, skip=1) else KeywordWorkflow
    task_terms = TaskTerms(name=terms.name, queue=terms.queue, timeout=terms.timeout, cancel_grace=terms.cancel_grace)
    workflow: Workflow = workflow_class(app, function, task_terms, local_names, connections)
    workflow.pipeline.version = terms.version
    return workflow


def _error_of_call(workflow: Task[..., Any]) -> TypeError:
    return TypeError(f"{workflow.name} is a workflow: submit it")


def _check_function(function: Callable[..., Any]) -> None:
    """Raises DeclarationError for a function that cannot be a workflow."""
    inner = inspect.unwrap(function)
    if not inspect.iscoroutinefunction(inner):
        raise declaration_error(function, "a workflow is an async def")
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].kind not in POSITIONAL:
        raise declaration_error(function, _FIRST_PARAMETER)


def _may_be_context(name: str, annotation: Any) -> bool:
    """Whether the parameter may be the context. Without an annotation, its name decides."""
    if annotation is None:
        return name in ("ctx", "context")
    from leasehold.workflows.context import Context  # noqa: PLC0415 - a program that annotates with Context has loaded it

    return annotation in (Any, Context)
