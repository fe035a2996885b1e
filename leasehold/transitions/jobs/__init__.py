"""What clients, operators and maintenance do to jobs: `submit`, `request_cancel`, `replay` (run again), `resolve` (give
a result to a failed step whose outcome was unknown), `delete` (hide the job), and `forget` (delete the job's rows).
A NewJob describes a job for `submit`. The functions `..._together` act on many jobs at once.
"""

from leasehold.transitions.jobs.cancels import Cancels, request_cancel
from leasehold.transitions.jobs.deletions import delete, delete_together, expire_early, forget, forget_tombstones
from leasehold.transitions.jobs.records import (
    EXTERNAL,
    NewJob,
    RunOf,
    client_queue,
    external_queue,
    first_state,
    first_steps,
    queue_of,
)
from leasehold.transitions.jobs.replays import REWIND, AdmissionTerms, replay, replay_together, state_of
from leasehold.transitions.jobs.resolving import resolve
from leasehold.transitions.jobs.submissions import submit

__all__ = [
    "EXTERNAL",
    "REWIND",
    "AdmissionTerms",
    "Cancels",
    "NewJob",
    "RunOf",
    "client_queue",
    "delete",
    "delete_together",
    "expire_early",
    "external_queue",
    "first_state",
    "first_steps",
    "forget",
    "forget_tombstones",
    "queue_of",
    "replay",
    "replay_together",
    "request_cancel",
    "resolve",
    "state_of",
    "submit",
]
