"""What clients and operators do to jobs: `submit`, `request_cancel`, `expire_early`, `replay`; a module each."""

from leasehold.transitions.jobs.cancels import Cancels, expire_early, request_cancel
from leasehold.transitions.jobs.records import EXTERNAL, NewJob, RunOf, external_queue
from leasehold.transitions.jobs.replays import REWIND, Place, replay
from leasehold.transitions.jobs.submissions import submit

__all__ = [
    "EXTERNAL",
    "REWIND",
    "Cancels",
    "NewJob",
    "Place",
    "RunOf",
    "expire_early",
    "external_queue",
    "replay",
    "request_cancel",
    "submit",
]
