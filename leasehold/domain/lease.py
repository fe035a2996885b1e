"""A lease is a worker's right to settle one attempt of one task. Each function that settles an attempt has a parameter
for the attempt's lease.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def differ_in_a_task(leases: Iterable[Lease]) -> bool:
    """Whether two of the leases are different leases of the same task. This happens when a worker has lost a task and
    claimed it again.
    """
    different = {(lease.task_id, lease.owner, lease.epoch) for lease in leases}
    return len({task_id for task_id, _, _ in different}) < len(different)
