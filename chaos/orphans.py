"""Adopts what the processes of a run leave behind: an orphan becomes this process's child, so that a look below it
finds it. Without that an orphan belongs to the system's first process, and no run would ever be red for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from leasehold.embedded.guard import PR_SET_CHILD_SUBREAPER, prctl


@contextmanager
def adopting() -> Iterator[None]:
    """Inside the block, every orphan among this process's descendants is its child."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)
