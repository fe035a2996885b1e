"""`chain`, `group` and `chord` combine signatures (calls of tasks). One workflow runs all calls, each as a durable
step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from leasehold.celery.apps import CeleryApp
from leasehold.celery.exceptions import NotSupported
from leasehold.celery.lacking import OF_SIGNATURE, Lacking
from leasehold.celery.result import AsyncResult
from leasehold.domain.errors import HandlerMissing

if TYPE_CHECKING:
    from leasehold.workflows.context import Context

#: The calls to run, as JSON. A single call is {"task", "args", "kwargs", "immutable", "handler"}. A chain is {"chain":
#: [plan, ...]}, a group {"group": [plan, ...]}, and a chord {"group": [plan, ...], "body": plan}. `handler`: the name
#: of the task's code, as `pipeline.step`. Plans of earlier releases have no `handler`.
Plan = dict[str, Any]
#: Stands for the previous result when no call has run before.
_NOTHING = object()


class Signature(Lacking):
    """A single call, or a chain, group or chord of calls. It can be submitted, or combined with other signatures."""

    # Lacking uses these in its errors: the name of the class in Celery, and what to use in place of each attribute that
    # is missing here.
    _IN_CELERY, _LACKS = "Signature", OF_SIGNATURE

    def __init__(self, app: CeleryApp, plan: Plan) -> None:
        self.app = app
        self.plan = plan

    @classmethod
    def of(
        cls, app: CeleryApp, task: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, immutable: bool = False
    ) -> Signature:
        """A single call. `task`: the name of the task."""
        handler = app.tasks[task].task.runnable.handler
        plan = {"task": task, "args": list(args), "kwargs": dict(kwargs), "immutable": immutable, "handler": handler}
        return cls(app, plan)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A single call: run its function in this process. A chain, group or chord: submit it, as `delay` does."""
        if "task" not in self.plan:
            return self.delay(*args, **kwargs)
        all_args, all_kwargs = self._arguments(args, kwargs)
        return self.app.tasks[self.plan["task"]](*all_args, **all_kwargs)

    def __or__(self, other: Signature) -> Signature:
        return chain(self, other)

    def delay(self, *args: Any, **kwargs: Any) -> AsyncResult:
        """Submit the calls. `args` come before the arguments of the first call."""
        return self.apply_async(args, kwargs)

    def apply_async(
        self, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> AsyncResult:
        """Submit the calls. Only a single call takes `kwargs` and the options of a task's apply_async. A chain, group
        or chord raises NotSupported for them.
        """
        if "task" in self.plan:
            task = self.app.tasks[self.plan["task"]]
            result: AsyncResult = task.apply_async(*self._arguments(args or (), kwargs or {}), **options)
            return result
        if options:
            reason = "submit it in a task, and give the options to that task"
            raise NotSupported(f"leasehold.celery has no options of a chain, group or chord: {reason}")
        if kwargs:
            reason = "give them to its calls, as in add.s(1, y=2)"
            raise NotSupported(f"leasehold.celery has no keyword arguments of a chain, group or chord: {reason}")
        canvas_result: AsyncResult = self.app.submit_canvas(self.plan, list(args or ()))
        return canvas_result

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The positional and the keyword arguments of a single call: `args` come before the arguments of the call, and
        `kwargs` replace keyword arguments of the call. An immutable call (`.si`) takes neither.
        """
        if self.plan["immutable"]:
            return self.plan["args"], self.plan["kwargs"]
        return [*args, *self.plan["args"]], {**self.plan["kwargs"], **kwargs}


def chain(*signatures: Signature | Iterable[Signature]) -> Signature:
    """Calls that run one after the other. Each call takes the result of the previous call as its first argument. Raises
    NotSupported without calls.
    """
    members = _flattened(signatures)
    # If a member is a chain, its calls become calls of this chain.
    plans = [step for signature in members for step in signature.plan.get("chain", [signature.plan])]
    return Signature(members[0].app, {"chain": plans})


def group(*signatures: Signature | Iterable[Signature]) -> Signature:
    """Calls that run at the same time. The result is the list of their results. Raises NotSupported without calls."""
    members = _flattened(signatures)
    return Signature(members[0].app, {"group": [signature.plan for signature in members]})


def chord(header: Any, body: Signature | None = None) -> Any:
    """Calls that run at the same time (the header), and then a call that takes the list of their results (the body). If
    the header has no calls, the body takes the empty list immediately, as in Celery.

    Without a body, returns a function that takes the body and submits the chord, as in Celery.
    """
    if body is None:
        return lambda body: chord(header, body)()
    if isinstance(header, Signature):
        # The calls of a group are the header. Any other signature, such as a chord, is the only call of the header.
        is_group = "group" in header.plan and "body" not in header.plan
        header_plans = header.plan["group"] if is_group else [header.plan]
    else:
        header_plans = [signature.plan for signature in header]
    return Signature(body.app, {"group": header_plans, "body": body.plan})


def _flattened(signatures: Sequence[Any]) -> list[Signature]:
    """The signatures as a list. Celery also accepts a single list or generator of them."""
    if len(signatures) == 1 and not isinstance(signatures[0], Signature):
        signatures = list(signatures[0])
    if not signatures:
        raise NotSupported("leasehold.celery has no chain or group of nothing: make it only if there are calls")
    return list(signatures)


def check_tasks(tasks: Mapping[str, Any], plan: Plan) -> None:
    """Raises HandlerMissing if `tasks` (CeleryTasks by name) lacks the task of a call. During a deployment, a worker of
    the earlier release lacks the tasks of the later one.

    The error names the code of all calls, and not only the code that is missing here. The reason: the run then waits
    for a worker that has all the code that the error names. If worker A lacked the code of one call, worker B lacked
    the code of another call, and the error named only the missing code, A and B would pass the run to each other
    without end. If a call whose task is missing has no `handler`, the error names no code.
    """
    calls = list(_calls_of(plan))
    missing = [call for call in calls if call["task"] not in tasks]
    if missing:
        is_named = all("handler" in call for call in missing)
        raise HandlerMissing([call["handler"] for call in calls if "handler" in call] if is_named else [])


def _calls_of(plan: Plan) -> Iterator[Plan]:
    if "task" in plan:
        yield plan
        return
    for member in [*plan.get("chain", ()), *plan.get("group", ()), *([plan["body"]] if "body" in plan else ())]:
        yield from _calls_of(member)


async def run_plan(ctx: Context, tasks: Mapping[str, Any], plan: Plan, previous_result: Any = _NOTHING) -> Any:
    """Run the plan in a workflow. `tasks`: CeleryTasks by name. `previous_result`: the first argument of the first
    call. A group gives this argument to each of its members. `_NOTHING`: there is no such argument.
    """
    if "chain" in plan:
        for step in plan["chain"]:
            previous_result = await run_plan(ctx, tasks, step, previous_result)
        return previous_result
    if "group" in plan:
        results = await ctx.gather(*(run_plan(ctx, tasks, member, previous_result) for member in plan["group"]))
        return await run_plan(ctx, tasks, plan["body"], results) if "body" in plan else results
    task = tasks[plan["task"]]
    args = plan["args"] if previous_result is _NOTHING or plan["immutable"] else [previous_result, *plan["args"]]
    return await ctx.run(task.task, args=args, kwargs=plan["kwargs"])
