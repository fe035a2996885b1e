"""The parts of a declared task that `ctx.run` and `ctx.start` of a workflow need: the task's arguments, its step and
its result. A declared task is a pipeline of one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import orjson

from leasehold.app.arguments import Arguments
from leasehold.app.results import Results
from leasehold.domain.pipeline import Pipeline


class StartableTask:
    """A task that a workflow may start. `ctx.start` starts a separate run. `ctx.run` adds a step to the workflow's job.
    But if the task has concurrency limits (`is_limited`), `ctx.run` starts a separate run, too, and adds no step. This
    class implements leasehold.workflows.pending.Runnable.

    `is_workflow`: this task is itself a workflow. Then only `ctx.start` can start it.
    """

    def __init__(self, pipeline: Pipeline, arguments: Arguments, results: Results, *, is_workflow: bool) -> None:
        self.is_workflow = is_workflow
        self._pipeline = pipeline
        self._arguments = arguments
        self._results = results
        # The name of the step that the workflow adds. For the pipeline `shop.send_receipt`, it is `send_receipt`.
        self.step_name = pipeline.name.partition(".")[2]
        self.handler = f"{pipeline.name}.{pipeline.steps[0].name}"

    @property
    def is_limited(self) -> bool:
        return bool(self._pipeline.limits)

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._arguments.encoded(args, kwargs)

    def new_run(self, run_id: UUID, tenant: str, params: Mapping[str, Any], keep_seconds: int) -> Any:
        """The separate run that `ctx.start` starts, or `ctx.run` if the task is limited."""
        from leasehold.app.writing import template_version_of  # noqa: PLC0415 - code that only declares tasks does not load the database driver
        from leasehold.transitions.runs import NewRun  # noqa: PLC0415 - as above

        return NewRun(
            template_version=template_version_of(self._pipeline),  # made of the task's declaration
            tenant_id=tenant,
            params=params,
            keep_seconds=keep_seconds,
            id=run_id,
        )

    def new_step(self) -> Mapping[str, Any]:
        """The columns of the `task` row of the step that `ctx.run` adds."""
        (step,) = self._pipeline.steps  # a declared task has one step
        return {
            "queue": step.queue,
            "max_attempts": step.max_attempts,
            "timeout_seconds": step.timeout_seconds,
            "cancelable": step.cancelable,
        }

    def decode_result(self, value: Any) -> Any:
        return self._results.decoded(orjson.dumps(value))
