"""What an attempt may ask of the slot that it runs in. The slot pool (worker/claiming) makes one for each attempt."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class Slot(Protocol):
    """The slot of one attempt."""

    def may_continue(self) -> bool:
        """Whether this worker may go on with the job's later steps in this slot."""
        ...

    def lent(self) -> AbstractContextManager[None]:
        """Lend the slot to other attempts during the block, in which this attempt only waits for a thread or a process.
        The lease stays. After the block the attempt has a slot again, at once.
        """
        ...
