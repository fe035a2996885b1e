"""A settlement ends an attempt. There are seven: complete, fail, snooze, suspend, release, acknowledge_cancel and
fan_out. Each has a module of its own.

A settlement takes a batch of leases and returns one verdict for each lease. All settlements have the same guard (in the
module `guard`): a settlement changes nothing if the lease's owner or epoch does not match the task, or if the task is
not running. If the answer to a settlement was lost, the worker may repeat the settlement. If the first try has settled
the task under this epoch, the verdict of the repetition is also `settled`.
"""

from leasehold.transitions.settlements.cancellation import acknowledge_cancel
from leasehold.transitions.settlements.completion import complete
from leasehold.transitions.settlements.failing import MAX_CRASHES, fail
from leasehold.transitions.settlements.fanning_out import fan_out
from leasehold.transitions.settlements.records import (
    Completion,
    Failure,
    FanningOut,
    Output,
    Part,
    Settled,
    Snoozing,
    Verdict,
)
from leasehold.transitions.settlements.releasing import release
from leasehold.transitions.settlements.snoozing import snooze
from leasehold.transitions.settlements.suspending import Suspending, suspend

__all__ = [
    "MAX_CRASHES",
    "Completion",
    "Failure",
    "FanningOut",
    "Output",
    "Part",
    "Settled",
    "Snoozing",
    "Suspending",
    "Verdict",
    "acknowledge_cancel",
    "complete",
    "fail",
    "fan_out",
    "release",
    "snooze",
    "suspend",
]
