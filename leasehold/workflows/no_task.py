"""`NoTask`: keeps asyncio's tasks away from a workflow's code.

The code runs inside the asyncio task of one attempt. The next attempt may go on with the code in another asyncio task.
So a time limit (asyncio.timeout) in the code would cancel the whole attempt instead of one wait, or would cancel
nothing. If the code created an asyncio task, this task would run beside the code, and each replay would create it
again.
"""

from __future__ import annotations

import asyncio

# asyncio documents these two functions for code that runs coroutines in place of asyncio.Task.
from asyncio import _enter_task, _leave_task
from typing import Any, NoReturn

from leasehold.domain.errors import Permanent

#: The methods by which a time limit (asyncio.timeout, a scope of anyio) uses the asyncio task that it may cancel.
_REFUSED = frozenset({"add_done_callback", "cancel", "cancelling", "uncancel"})
#: How the sentence "the workflow awaits ..." of an error ends: for a time limit, and for a new asyncio task.
_LIMIT = (
    "with asyncio.timeout, asyncio.wait_for, a scope of anyio, or something else that needs asyncio.current_task: a"
    " workflow waits without a task. Limit a wait with ctx.wait_for(..., timeout=...), a step with the timeout of its"
    " task (ctx.run), and a function from within (ctx.call)"
)
_TASK = (
    "a task of asyncio (asyncio.create_task, asyncio.gather, asyncio.wait_for, asyncio.TaskGroup), which a replay would"
    " begin again: wait for several calls with ctx.gather, and do other work in a task (ctx.run), or in ctx.call"
)


def wrong_await(what: str) -> Permanent:
    return Permanent("workflow_awaits", f"the workflow awaits {what}")


class NoTask:
    """In a block `with no_task:`, the code cannot use the asyncio task in which it runs (for a time limit), and cannot
    create a new asyncio task. Each try raises Permanent `workflow_awaits`. `refusal`: the first such error, or None. It
    is kept here, because the code may have caught the error.

    Without a running loop the block changes nothing.
    """

    __slots__ = ("_factory", "_loop", "_stand_in", "_task", "refusal")

    def __init__(self) -> None:
        self.refusal: Permanent | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._factory: Any = None
        self._stand_in: Any = None

    def __enter__(self) -> None:
        try:
            self._loop = loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        self._factory = loop.get_task_factory()
        loop.set_task_factory(self._refuse_task)
        self._task = asyncio.current_task(loop)
        if self._task is not None:
            _leave_task(loop, self._task)
        # From now on, asyncio.current_task returns the stand-in.
        self._stand_in = _StandIn(self, self._task)
        _enter_task(loop, self._stand_in)

    def __exit__(self, *_error: object) -> None:
        loop = self._loop
        if loop is None:
            return
        _leave_task(loop, self._stand_in)
        if self._task is not None:
            _enter_task(loop, self._task)
        loop.set_task_factory(self._factory)
        self._task = self._stand_in = self._factory = self._loop = None

    def _refuse_task(self, _loop: asyncio.AbstractEventLoop, coroutine: Any, **_options: Any) -> NoReturn:
        if asyncio.iscoroutine(coroutine):
            coroutine.close()  # otherwise Python warns that the coroutine was never awaited
        raise self.refused(_TASK)

    def refused(self, what: str) -> Permanent:
        """Make the error, which the caller of this method must raise. `refusal` keeps the first such error."""
        error = wrong_await(what)
        self.refusal = self.refusal or error
        return error


class _StandIn:
    """The object that asyncio.current_task returns in the block. Code may read the attributes of the real asyncio task
    through it. For example, logging reads the task's name. But the methods in `_REFUSED` raise the error, because they
    concern the end or the cancellation of the task.
    """

    def __init__(self, block: NoTask, task: asyncio.Task[Any] | None) -> None:
        self._block = block
        self._task = task

    def __getattr__(self, name: str) -> Any:
        if name in _REFUSED:
            raise self._block.refused(_LIMIT)
        return getattr(self._task, name)

    def __hash__(self) -> int:
        raise self._block.refused(_LIMIT)  # anyio uses the task as a key, under which it keeps its scopes

    def __eq__(self, other: object) -> bool:
        return self is other
