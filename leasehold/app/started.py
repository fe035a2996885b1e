"""A task as a workflow's `ctx.run` starts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from leasehold.app.arguments import Arguments
from leasehold.app.results import Results
from leasehold.domain.pipeline import Pipeline


class StartedTask:
    """A leasehold.workflows.pending.Runnable."""

    def __init__(self, pipeline: Pipeline, arguments: Arguments, results: Results) -> None:
        (self._step,) = pipeline.steps
        self._arguments = arguments
        self._results = results
        self.step_name = pipeline.name.partition(".")[2]
        self.handler = f"{pipeline.name}.{self._step.name}"

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._arguments.encoded(args, kwargs)

    def new_step(self) -> Mapping[str, Any]:
        return {
            "queue": self._step.queue,
            "max_attempts": self._step.max_attempts,
            "timeout_seconds": self._step.timeout_seconds,
            "cancelable": self._step.cancelable,
        }

    def decode_result(self, value: Any) -> Any:
        return self._results.decoded(orjson.dumps(value))
