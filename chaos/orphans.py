"""Makes orphans of a run's processes children of this process, so that a search among its descendants finds them.

Otherwise an orphan would become a child of the system's first process, and no run would notice it.
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
