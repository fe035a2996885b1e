"""The right to settle one attempt. Code without a lease cannot settle: every settling verb takes one."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Lease:
    """What `claim` returned. `epoch` is the fencing token: it rises by one with every claim of the task, and a
    write that carries an older one changes nothing. `trusted_until` is on this process's monotonic clock.
    """

    task_id: UUID
    owner: UUID
    epoch: int
    attempt: int
    trusted_until: float
