"""The pipelines of both cells: those for demonstrations, which have the shipped kinds of work; workflows; and steps
that fail.
"""

from __future__ import annotations

from leasehold.domain.registry import Pipelines
from leasehold.pipelines import with_demonstrations
from tests.runs.work import scripted
from tests.workflows import shop


def pipelines() -> Pipelines:
    both = with_demonstrations()
    both.add(scripted)
    for task in shop.app.tasks.values():
        both.add(task.pipeline)
    return both
