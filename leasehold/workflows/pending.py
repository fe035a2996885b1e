"""`Pending`: what a method of a workflow's context (`ctx`) returns. The workflow awaits it, or gives it to
`ctx.gather`. The driver, which runs the workflow's code, gets each awaited Pending, and resumes the code when the
Pending is done.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from uuid import UUID

if TYPE_CHECKING:  # not at run time: a program that only declares workflows needs no transitions
    from leasehold.transitions.runs import NewRun
    from leasehold.transitions.settlements import Suspending

T = TypeVar("T")  # the result


class Pending(Generic[T]):
    """A call of the context. Nothing happens before the workflow awaits it. A second await gives the same result.

    A branch is a coroutine that `ctx.gather` got as an argument. The workflow's own coroutine is a branch, too. The
    first await begins the call, and gives it a place in the journal: the next number of the branch that awaits it.

    A second branch may await the call, too. Exception: at a replay (the workflow's code runs again from its start), the
    second branch might await the call first, and the call would get another place. Where this is possible, the driver
    refuses the second await.

    `owner`: the branch that began the call. If an ancestor of that branch has awaited the call since, the ancestor is
    the owner. `is_first`: the owner had awaited nothing before it began the call.
    """

    __slots__ = ("error", "is_done", "is_first", "owner", "value")

    def __init__(self) -> None:
        self.is_done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.owner: Any = None  # a Branch; this module cannot import the class, because its module imports this one
        self.is_first = False

    def __await__(self) -> Generator[Pending[T], None, T]:
        yield self  # to the driver; even if this call is done, because the driver checks which branch awaits it
        if self.error is not None:
            raise self.error
        result: T = self.value
        return result

    def resolve(self, value: Any) -> None:
        self.is_done, self.value = True, value

    def fail(self, error: BaseException) -> None:
        self.is_done, self.error = True, error


class Runnable(Protocol):
    """A function that an app declares as a task. The members are those that workflows need to start it."""

    @property
    def step_name(self) -> str:
        """The task's name without the name of its app."""

    @property
    def is_workflow(self) -> bool:
        """Whether the task is a workflow. Such a task cannot be a step in another workflow's run, which has one
        journal.
        """

    @property
    def handler(self) -> str:
        """The name of the handler, the code of the task, as `pipeline.step`."""

    @property
    def is_limited(self) -> bool:
        """Whether the task declares a concurrency limit. Limits count runs and not steps. So `ctx.run` of such a task
        starts a separate run, and not a step of the workflow's run.
        """

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments as JSON. Raises InvalidArguments."""

    def new_run(self, run_id: UUID, tenant: str, params: Mapping[str, Any], keep_seconds: int) -> NewRun:
        """A separate run of the task: for `ctx.start`, and for `ctx.run` if the task is limited."""

    def new_step(self) -> Mapping[str, Any]:
        """The columns queue, max_attempts, timeout_seconds and cancelable of the step's row, for `ctx.run`."""

    def decode_result(self, value: Any) -> Any:
        """The result, decoded from JSON. Raises ResultUnreadable."""


class Journaled(Pending[T]):
    """A call with a place in the run's journal: `branch` (which coroutine of a `gather` makes the call; empty for the
    workflow's own coroutine) and `number`. `kind` and `name`: at a replay, the journal must have the same kind and name
    at this place.
    """

    __slots__ = ("branch", "deadline", "kind", "name", "number")

    def __init__(self, kind: str, name: str) -> None:
        super().__init__()
        self.kind = kind
        self.name = name
        self.branch = ""
        self.number = 0
        self.deadline: float | None = None  # when a wait with a timeout ends by itself, on the event loop's clock


class RunCall(Journaled[T]):
    """`ctx.run`. The driver sets two attributes when it begins the call. `step`: `name#n`, for the nth call of this
    name in its branch. (The step that does the work has this name, with the branch before it.) `is_own_run`: not a step
    but a separate run does the work, because the task is limited.
    """

    __slots__ = ("argument", "is_own_run", "step", "task")

    def __init__(self, task: Runnable, argument: Mapping[str, Any], name: str | None) -> None:
        super().__init__("run", name or task.step_name)
        self.task = task
        self.argument = argument
        self.step = ""
        self.is_own_run = False


class SleepCall(Journaled[None]):
    """`ctx.sleep`. `seconds`: how long the workflow sleeps, by PostgreSQL's clock."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        super().__init__("sleep", "sleep")
        self.seconds = seconds


class SignalCall(Journaled[T]):
    """`ctx.wait_for`. `seconds`: the timeout, or None. `decode` checks the payload. `schema`: the payload's JSON
    schema.
    """

    __slots__ = ("decode", "schema", "seconds")

    def __init__(
        self, name: str, seconds: float | None, decode: Callable[[Any], T], schema: Mapping[str, Any] | None
    ) -> None:
        super().__init__("signal", name)
        self.seconds = seconds
        self.decode = decode
        self.schema = schema


class LocalCall(Journaled[T]):
    """`ctx.call`. `encode`: converts the function's result to JSON bytes. `decode`: converts the bytes back."""

    __slots__ = ("decode", "encode", "function")

    def __init__(
        self, name: str, function: Callable[[], Any], encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]
    ) -> None:
        super().__init__("call", name)
        self.function = function
        self.encode = encode
        self.decode = decode


class StartCall(Journaled[T]):
    """`ctx.start`. `make`: makes the handle of the started run from its id. `detach`: whether the started run goes on
    if the workflow ends without success. Otherwise it is cancelled.
    """

    __slots__ = ("argument", "detach", "make", "task")

    def __init__(self, task: Runnable, argument: Mapping[str, Any], make: Callable[[UUID], T], *, detach: bool) -> None:
        super().__init__("start", task.step_name)
        self.task = task
        self.argument = argument
        self.make = make
        self.detach = detach


class ResultCall(Journaled[T]):
    """The wait for the result of a run (`child`), which `ctx.start`, or `ctx.run` of a limited task, has started."""

    __slots__ = ("child", "task")

    def __init__(self, task: Runnable, child: UUID) -> None:
        super().__init__("result", task.step_name)
        self.task = task
        self.child = child


class Patch(Journaled[bool]):
    """`ctx.patched`: whether this run takes the new code of a changed workflow. The driver answers immediately, so the
    workflow never awaits this call.
    """

    __slots__ = ()

    def __init__(self, name: str) -> None:
        super().__init__("patch", name)


class Gather(Pending[list[Any]]):
    """`ctx.gather`. An element is a Pending, or a coroutine that becomes a branch."""

    __slots__ = ("elements", "open_count", "parts", "return_exceptions")

    def __init__(self, elements: tuple[Any, ...], *, return_exceptions: bool) -> None:
        super().__init__()
        self.elements = elements
        self.return_exceptions = return_exceptions
        self.parts: list[Pending[Any]] = []  # the elements; in place of a coroutine, its branch
        self.open_count = 0  # how many parts are not done


@dataclass(slots=True)
class Outcome:
    """How the workflow has stopped. `ended`: it has ended with `result`; otherwise it waits. A workflow that waits is
    due again when `wakes_after_ends` more steps have ended (None: no step makes it due), but at the latest after
    `delay` seconds (None: no time makes it due). The worker sets `suspension`, the settlement that suspends the
    workflow.
    """

    ended: bool
    result: Any = None
    wakes_after_ends: int | None = None
    delay: float | None = None
    suspension: Suspending | None = None
