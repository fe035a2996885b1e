"""The names of a job's steps: `render`, a part `render.17` or `page.render.17`, a step of a workflow `1.0/charge#2`."""

from __future__ import annotations

from leasehold.domain.pipeline import NAME

#: The most characters of a step's name in a request. The index `task_job_id_step_key` takes no longer name, unless the
#: name compresses well: the path of a step inside over 600 gathers, each inside the other.
MAX_STEP_NAME = 2676


def declared_step(step: str, handler: str | None) -> str:
    """The name that a label has for a task's step, because labels must have few values: that of the step as code or a
    template declares it. `step`: the task's own name, which may count parts or calls. `handler`: the `pipeline.step`
    of the task's code; None: the code of the job's own pipeline.
    """
    # Only the names of parts and of a workflow's steps have a `.` or a `#`. A template names its steps itself.
    if handler is None or NAME.fullmatch(step):
        return step
    return handler.rpartition(".")[2]
