"""The types of the decorators that `App.task` and `App.workflow` return. A type checker uses them to find the type of a
declared task or workflow.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from leasehold.app.batch_task import BatchTask
from leasehold.app.task import KeywordTask, PositionalTask
from leasehold.app.workflow import KeywordWorkflow, PositionalWorkflow

if TYPE_CHECKING:
    from leasehold.workflows.context import Context

# The context of a workflow does not count among the parameters of its function here.
P = ParamSpec("P")  # the parameters of a function
Q = ParamSpec("Q")  # the parameters of a function, without the first
A = TypeVar("A")  # the type of the first parameter; for a batch, the type of one item
T = TypeVar("T")  # the type of the result; for a batch, the type of the result of one item


class TaskDecorator(Protocol):
    """The type of the decorator that `@app.task(...)` with options returns."""

    # The first two overloads are for functions that can be called without arguments. They return `KeywordTask[..., T]`
    # and not `KeywordTask[[], T]`, because such a function may have parameters with defaults. Then its task takes
    # arguments.
    @overload
    def __call__(
        self, function: Callable[[], Coroutine[Any, Any, T]], /
    ) -> KeywordTask[..., T, Coroutine[Any, Any, T]]: ...
    @overload
    def __call__(self, function: Callable[[], T], /) -> KeywordTask[..., T, T]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]  # a coroutine function is a function, too: the first overload wins
        self, function: Callable[Concatenate[A, Q], Coroutine[Any, Any, T]], /
    ) -> PositionalTask[A, Q, T, Coroutine[Any, Any, T]]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[A, Q], T], /) -> PositionalTask[A, Q, T, T]: ...
    @overload
    def __call__(  # type: ignore[overload-cannot-match]  # mypy errs: a function with keyword-only parameters does match here, and not above
        self, function: Callable[P, Coroutine[Any, Any, T]], /
    ) -> KeywordTask[P, T, Coroutine[Any, Any, T]]: ...
    @overload
    def __call__(self, function: Callable[P, T], /) -> KeywordTask[P, T, T]: ...  # type: ignore[overload-cannot-match]  # as above


class BatchDecorator(Protocol):
    """The type of the decorator that `@app.task(batch=...)` returns."""

    @overload
    def __call__(
        self, function: Callable[[list[A]], Coroutine[Any, Any, list[T]]], /
    ) -> BatchTask[A, T, Coroutine[Any, Any, list[T]]]: ...
    @overload
    def __call__(self, function: Callable[[list[A]], list[T]], /) -> BatchTask[A, T, list[T]]: ...


class WorkflowDecorator(Protocol):
    """The type of the decorator that `@app.workflow(...)` with options returns."""

    # The first overload is for functions that can be called with the context alone. It returns
    # `KeywordWorkflow[..., T]` for the same reason as in TaskDecorator.
    @overload
    def __call__(self, function: Callable[[Context], Coroutine[Any, Any, T]], /) -> KeywordWorkflow[..., T]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Context, A, Q], Coroutine[Any, Any, T]], /
    ) -> PositionalWorkflow[A, Q, T]: ...
    @overload
    def __call__(  # type: ignore[overload-cannot-match]  # as above
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, T]], /
    ) -> KeywordWorkflow[P, T]: ...
