"""`Slot`: the methods of its slot that an attempt may call. The slot pool (worker/claiming) makes a slot for each
attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class Slot(Protocol):
    """The slot of one attempt."""

    def may_continue(self) -> bool:
        """Whether this worker may go on with the job's later steps in this slot."""
        ...

    def lent(self) -> AbstractContextManager[None]:
        """Lend the slot to other attempts during the block, while this attempt only waits for a thread or a process.
        The attempt keeps its lease. At the end of the block the attempt has a slot again, without waiting for it.
        """
        ...

    def rest_while(self, is_down: Callable[[], bool]) -> None:
        """After this attempt, let the slot take no other task while `is_down` returns True, for a minute at most. The
        reason: the next task would need what this attempt could not get, for example a child process.
        """
        ...
