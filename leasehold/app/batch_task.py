"""`BatchTask`: a task whose function takes a list of items and returns a list of results. Each item is a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, get_args, get_origin

from leasehold.app.arguments import POSITIONAL, hints_of
from leasehold.app.batches import result_of_one
from leasehold.app.source_location import declaration_error
from leasehold.app.task import PositionalTask

A = TypeVar("A")  # the type of an item
R = TypeVar("R")  # the type of an item's result
C = TypeVar("C")  # what a call of the function returns: a list[R], or a coroutine that returns a list[R]


class BatchTask(PositionalTask[A, [], R, C], Generic[A, R, C]):
    """A batch task. `task.submit(item)` submits one item, and `task.submit(item).result()` is the item's result. A call
    `task(items)` only calls the function.
    """

    def __call__(self, items: list[A], /) -> C:  # type: ignore[override]  # the function takes the items together
        result: C = self.function(items)
        return result

    @staticmethod
    def _hints(function: Callable[..., Any], local_names: Mapping[str, Any] | None) -> dict[str, Any]:
        """The types of one item and of its result. `local_names`: the names where the function is declared, because its
        annotations may use them. Raises DeclarationError.
        """
        hints = hints_of(function, local_names)
        parameters = list(inspect.signature(function).parameters.values())
        items_type = hints.get(parameters[0].name) if len(parameters) == 1 else None
        if get_origin(items_type) is not list or not get_args(items_type):
            raise declaration_error(function, "a task with a batch takes one parameter, a list[...] of items")
        if parameters[0].kind not in POSITIONAL:
            raise declaration_error(function, "a worker gives the items by their position: write no * before them")
        results_type = hints.get("return", list[Any])
        if get_origin(results_type) is not list or not get_args(results_type):
            raise declaration_error(function, "a task with a batch returns a list[...], the result of each item")
        return {parameters[0].name: get_args(items_type)[0], "return": get_args(results_type)[0]}

    def _handler(self) -> Callable[..., Any]:
        if self.terms.process or self.terms.isolated:
            raise declaration_error(
                self.function, "a batch runs in the worker: process=True and isolated=True run one item"
            )
        assert self.terms.batch is not None
        wait, timeout = self.terms.batch.wait.total_seconds(), self.terms.timeout.total_seconds()
        if wait >= timeout:  # a lone run would reach its time limit before the call begins
            raise declaration_error(
                self.function,
                f"the batch waits {wait:g} s for others, and its timeout is {timeout:g} s: make it longer",
            )
        return self.handling.batched  # calls the function once for several attempts

    def _call_locally(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Call the function with one item, which is the only argument. The caller gave it by position or by name."""
        returned = self.function([*positional, *named.values()])
        return _awaited_result(returned) if self._is_async else result_of_one(returned)


async def _awaited_result(returned: Any) -> Any:
    return result_of_one(await returned)
