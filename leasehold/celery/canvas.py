"""`chain`, `group` and `chord`: signatures that one workflow runs, each call as a durable step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from leasehold.celery.exceptions import NotSupported

if TYPE_CHECKING:
    from leasehold.celery.app import Celery
    from leasehold.celery.result import AsyncResult
    from leasehold.celery.task import CeleryTask
    from leasehold.workflows.context import Context

#: JSON that says what to run: {"task", "args", "kwargs", "immutable"}, {"chain": [...]}, {"group": [...]} or
#: {"group": [...], "body": ...}.
Plan = dict[str, Any]
_NOTHING = object()


class Signature:
    """A call, or calls in an order, that can be submitted and combined."""

    def __init__(self, app: Celery, plan: Plan) -> None:
        self.app = app
        self.plan = plan

    @classmethod
    def of(
        cls, task: CeleryTask, args: Sequence[Any], kwargs: Mapping[str, Any], *, immutable: bool = False
    ) -> Signature:
        plan = {"task": task.name, "args": list(args), "kwargs": dict(kwargs), "immutable": immutable}
        return cls(task.app, plan)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Of one call: run the function here. Of several: submit them."""
        if "task" not in self.plan:
            return self.delay(*args)
        task = self.app.tasks[self.plan["task"]]
        return task(*args, *self.plan["args"], **{**self.plan["kwargs"], **kwargs})

    def __or__(self, other: Signature) -> Signature:
        return chain(self, other)

    def delay(self, *args: Any, **kwargs: Any) -> AsyncResult:
        """Submit. `args` come before the arguments of the first call."""
        return self.apply_async(args, kwargs)

    def apply_async(
        self, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> AsyncResult:
        """Submit. The options of a task's apply_async are for one call alone."""
        if "task" in self.plan:
            task = self.app.tasks[self.plan["task"]]
            both = {**self.plan["kwargs"], **(kwargs or {})}
            return task.apply_async([*(args or ()), *self.plan["args"]], both, **options)
        if options or kwargs:
            raise NotSupported("leasehold.celery submits a chain, group or chord without options")
        return self.app.submit_canvas(self.plan, list(args or ()))


def chain(*signatures: Signature) -> Signature:
    """One after another: each takes the result of the one before it as its first argument."""
    first = _flat(signatures)
    plans = [step for one in first for step in one.plan.get("chain", [one.plan])]
    return Signature(first[0].app, {"chain": plans})


def group(*signatures: Signature) -> Signature:
    """All at once. The result is the list of their results."""
    members = _flat(signatures)
    return Signature(members[0].app, {"group": [one.plan for one in members]})


def chord(header: Any, body: Signature | None = None) -> Any:
    """All of the header at once; then the body takes the list of their results."""
    if body is None:
        return lambda body: chord(header, body)()
    members = header.plan["group"] if isinstance(header, Signature) else [one.plan for one in header]
    return Signature(body.app, {"group": members, "body": body.plan})


def _flat(signatures: Sequence[Any]) -> list[Signature]:
    """Celery also takes one list, or a generator."""
    if len(signatures) == 1 and not isinstance(signatures[0], Signature):
        signatures = list(signatures[0])
    if not signatures:
        raise NotSupported("leasehold.celery has no chain, group or chord of nothing")
    return list(signatures)


async def run_plan(ctx: Context, tasks: Mapping[str, CeleryTask], plan: Plan, before: Any = _NOTHING) -> Any:
    """Run the plan in a workflow. `before`: the result that its first call takes."""
    if "chain" in plan:
        for step in plan["chain"]:
            before = await run_plan(ctx, tasks, step, before)
        return before
    if "group" in plan:
        results = await ctx.gather(*(run_plan(ctx, tasks, one, before) for one in plan["group"]))
        return await run_plan(ctx, tasks, plan["body"], results) if "body" in plan else results
    task = tasks[plan["task"]]
    args = plan["args"] if before is _NOTHING or plan["immutable"] else [before, *plan["args"]]
    return await ctx.run(task.task, args=args, kwargs=plan["kwargs"])
