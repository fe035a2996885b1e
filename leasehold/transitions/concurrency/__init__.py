"""The statements of concurrency limits. A limit bounds how many jobs are under way at once. A job with limits is held
until each of its limits has room and admits the job. In the database a limit is a row of the table `gate`. A row of
`gate_job` is a job that waits at a limit, or that the limit has admitted.

PostgreSQL counts the admitted, unfinished jobs at each admission, because a stored count could become wrong. A
transaction that admits jobs first locks the limits' rows, so no limit is ever exceeded. All transactions lock these
rows in the same order, so they cannot deadlock. This order is by the bytes of the limits' names, whatever the collation
of the database. Jobs are admitted when a job arrives, when a job of the same limit ends, and by the sweeper. A job
without limits costs nothing.

Tenants that share a limit take turns: the tenant with the fewest admitted jobs comes first. A shared limit of at least
four jobs reserves one place for tenants without an admitted job. Without the reserved place, other tenants could fill
the limit with long jobs, and such a tenant would wait until one of these jobs ends.
"""

from leasehold.transitions.concurrency.admission import FIRST_STEP_OF_HELD_JOB, admit, admit_each, new_search
from leasehold.transitions.concurrency.names import JOBS, LIMITS, ConcurrencyLimitName, without_value
from leasehold.transitions.concurrency.queueing import (
    LimitedJob,
    forget_admission,
    forget_unused_limits,
    limits_of,
    lock_limits,
    queue_up,
    queue_up_again,
    with_waiting_jobs,
    write_limits,
)

__all__ = [
    "FIRST_STEP_OF_HELD_JOB",
    "JOBS",
    "LIMITS",
    "ConcurrencyLimitName",
    "LimitedJob",
    "admit",
    "admit_each",
    "forget_admission",
    "forget_unused_limits",
    "limits_of",
    "lock_limits",
    "new_search",
    "queue_up",
    "queue_up_again",
    "with_waiting_jobs",
    "without_value",
    "write_limits",
]
