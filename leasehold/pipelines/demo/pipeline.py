"""Declares two pipelines for demonstrations and measurements.

`noop` has one step that does nothing, so a run of it shows the cost of the platform alone. `demo_long_task` sleeps in
its second step. It shows progress and cancelling, and it runs long enough that a worker can be killed during the run.
"""

from __future__ import annotations

from datetime import timedelta

from pydantic import BaseModel, ConfigDict, Field

from leasehold.domain.pipeline import Pipeline, RunTerms, Step

noop = Pipeline("noop", module="leasehold.pipelines.demo.steps", steps=[Step("only")])


class LongTask(BaseModel):
    """`seconds`: how long `execute` takes."""

    model_config = ConfigDict(extra="forbid")

    seconds: float = Field(5.0, ge=0, le=3600)


demo_long_task = Pipeline(
    "demo_long_task",
    module="leasehold.pipelines.demo.steps",
    params=LongTask,
    steps=[
        Step("prepare", max_attempts=2, timeout=timedelta(minutes=1)),
        Step("execute", needs=("prepare",), max_attempts=2, timeout=timedelta(hours=2)),
        Step("finalize", needs=("execute",), timeout=timedelta(seconds=30), cancelable=False),
    ],
    terms=RunTerms(
        title="A task that takes its time",
        description="Shows templates, progress, cancelling, reruns and schedules.",
        timeout=timedelta(hours=3),
    ),
)
