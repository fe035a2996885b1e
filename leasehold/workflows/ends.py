"""Computes how many steps must end before a workflow can go on. The driver suspends the workflow until then."""

from __future__ import annotations

from typing import Any

from leasehold.workflows.branch import Branch
from leasehold.workflows.pending import Gather, Pending, RunCall


def needed_ends(pending: Pending[Any] | None) -> int | None:
    """How many more steps must end before the coroutine that awaits `pending` can go on. None: it waits for no step.

    The number may be too small, but never too large: a workflow that wakes too early suspends again.
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
    # A branch among the parts may go on before the other parts have ended. So the workflow must wake for the first
    # branch that can go on.
    other_parts = [part for part in open_parts if not _is_step(part)]
    if not other_parts:
        return len(open_parts)
    return min((ends for part in other_parts if (ends := needed_ends(part)) is not None), default=None)


def _is_step(pending: Pending[Any]) -> bool:
    """Whether the call waits for a step. The end of a run of its own is no end of a step: a duty wakes the workflow."""
    return isinstance(pending, RunCall) and not pending.is_own_run
