"""A lease: a worker's right to settle one attempt of one task. Every verb that settles an attempt takes its lease."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease that a claim returned.

    `epoch`: the fencing token. Each claim of the task raises it by one; a write with an older epoch changes nothing.
    `trusted_until`: when this process stops trusting the lease, in seconds of its own monotonic clock.
    """

    task_id: UUID
    owner: UUID
    epoch: int
    attempt: int
    trusted_until: float
