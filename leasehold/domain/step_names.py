"""The names of a job's steps. A declared step is named as in its declaration, such as `render`. Part 17 of `render` is
named `render.17`, or `page.render.17` if a second step, `page`, has also fanned out into parts `render`. A step of a
workflow is named by its branch, its task and the number of the call, such as `1.0/charge#2`.
"""

from __future__ import annotations

from leasehold.domain.pipeline import NAME

#: The most characters of a step's name in a request. The index `task_job_id_step_key` refuses a longer name, unless
#: PostgreSQL can compress the name well. Such a long name is the path of a step inside more than 600 nested gathers.
MAX_STEP_NAME = 2676


def declared_step(step: str, handler: str | None) -> str:
    """The name of a task's step in the labels of metrics. It is the declared name, because a label must have few
    values. `step`: the task's own name, which may contain the number of a part or of a call. `handler`: the
    `pipeline.step` of the task's code; None: the step is declared in the job's own pipeline, so `step` is the declared
    name.
    """
    # Only the names of parts and of a workflow's steps have a `.` or a `#`. Any other name was declared, by the code or
    # by a template.
    if handler is None or NAME.fullmatch(step):
        return step
    return handler.rpartition(".")[2]
