"""Declares a pipeline for tests: its parameters name what the handler does. scripted_steps has the handler."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from pydantic import BaseModel, ConfigDict

from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.registry import Pipelines


class Script(BaseModel):
    """`act`: the name of a function in scripted_steps; `args`: its arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    act: str = "ok"
    args: dict[str, Any] = {}


scripted = Pipeline(
    "scripted",
    params=Script,
    inputs=("input",),
    module="tests.scripted_steps",
    steps=[Step("act", isolated=True, timeout=timedelta(seconds=30))],
)

unhandled = Pipeline("unhandled", module="tests.scripted_steps", steps=[Step("nobody", isolated=True)])
moduleless = Pipeline("moduleless", module="tests.no_such_module", steps=[Step("act", isolated=True)])
coroutine = Pipeline("coroutine", module="tests.scripted_steps", steps=[Step("act", isolated=True)])


def pipelines() -> Pipelines:
    """All pipelines of this module. Children load them with `source="tests.scripted:pipelines"`."""
    return Pipelines(scripted, unhandled, moduleless, coroutine)
