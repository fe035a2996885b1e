"""Concurrency limits admit jobs: a job with limits is held until each of them has room. In the schema a limit is a
`gate`, and a `gate_job` row is a job that waits at it or was admitted.

PostgreSQL counts the admitted, unfinished jobs each time: a stored count could drift. A transaction that admits locks
the limits' rows in order, so that no limit is ever exceeded. Jobs are admitted when a job arrives, when a job of the
same limit ends, and by the sweeper. A job without limits costs nothing.

Tenants that share a limit take turns: the tenant with the fewest admitted jobs comes first. One place of a shared limit
is reserved for tenants without an admitted job, because a job that was admitted cannot be made to wait again.
"""

from leasehold.transitions.concurrency.admission import admit, admit_each
from leasehold.transitions.concurrency.names import JOBS, LIMITS, ConcurrencyLimitName, without_value
from leasehold.transitions.concurrency.queueing import (
    LimitedJob,
    forget_admission,
    forget_unused_limits,
    limits_of,
    queue_up,
    with_waiting_jobs,
)

__all__ = [
    "JOBS",
    "LIMITS",
    "ConcurrencyLimitName",
    "LimitedJob",
    "admit",
    "admit_each",
    "forget_admission",
    "forget_unused_limits",
    "limits_of",
    "queue_up",
    "with_waiting_jobs",
    "without_value",
]
