"""Computes how many steps must end before a workflow can go on. The driver suspends the workflow until then."""

from __future__ import annotations

from typing import Any

from leasehold.workflows.branch import Branch
from leasehold.workflows.pending import Gather, Pending, RunCall


def needed_ends(pending: Pending[Any] | None) -> int | None:
    """How many more steps must end before the coroutine that awaits `pending` can go on. None: it waits for no step.

    The number may be too small, because a workflow that wakes too early only suspends again. It is never too large.
    """
    if pending is None or pending.is_done:
        return None
    if _is_step(pending):
        return 1
    if isinstance(pending, Branch):
        return needed_ends(pending.waits_for)
    if not isinstance(pending, Gather):
        return None
    open_parts = {part for part in pending.parts if not part.is_done}  # a set: one part may occur several times
    # If all parts are steps, the coroutine goes on when the last of them has ended. But a branch among the parts may go
    # on before the other parts have ended. So the workflow must wake for the first branch that can go on.
    other_parts = [part for part in open_parts if not _is_step(part)]
    if not other_parts:
        return len(open_parts)
    return min((ends for part in other_parts if (ends := needed_ends(part)) is not None), default=None)


def _is_step(pending: Pending[Any]) -> bool:
    """Whether `pending` waits for the end of a step. A call of a limited task does not, because a separate run does the
    work. When this run ends, a duty (a loop of the workers) wakes the workflow.
    """
    return isinstance(pending, RunCall) and not pending.is_own_run
