"""Computes how many steps must end before a workflow can go on. The driver suspends the workflow for so long."""

from __future__ import annotations

from typing import Any

from leasehold.workflows.branch import Branch
from leasehold.workflows.pending import Gather, Pending, RunCall


def needed_ends(pending: Pending[Any] | None) -> int | None:
    """How many more steps must end before the coroutine that awaits `pending` can go on. None: it waits for no step.

    The number may be too small: a workflow that is woken too early suspends again. It is never too large.
    """
    if pending is None or pending.is_done:
        return None
    if isinstance(pending, RunCall):
        return 1
    if isinstance(pending, Branch):
        return needed_ends(pending.waits_for)
    if not isinstance(pending, Gather):
        return None
    open_ones = [element for element in pending.parts if not element.is_done]
    others = [element for element in open_ones if not isinstance(element, RunCall)]
    if not others:
        return len(open_ones)
    return min((ends for element in others if (ends := needed_ends(element)) is not None), default=None)
