"""The statements about leases of workers. `claim` (by_hint.py) and `poll` (by_poll.py) take leases, and `renew`
(renewals.py) keeps them. `to_cancel` (renewals.py) finds the leased tasks whose worker must stop.

Lock order, here and in every transition: job rows by ascending id, then task rows. A task's status changes only under
its job's lock, so no transition locks in the opposite order.
"""

from leasehold.transitions.claims.by_hint import CLAIM, claim, claim_again
from leasehold.transitions.claims.by_poll import POLL, Polled, claim_due, poll
from leasehold.transitions.claims.records import Claimed, LeaseTerms, claimed_of
from leasehold.transitions.claims.renewals import (
    CANCELLED,
    RENEW,
    Renewal,
    lock_unlocked,
    owned,
    owned_before,
    renew,
    to_cancel,
)

__all__ = [
    "CANCELLED",
    "CLAIM",
    "POLL",
    "RENEW",
    "Claimed",
    "LeaseTerms",
    "Polled",
    "Renewal",
    "claim",
    "claim_again",
    "claim_due",
    "claimed_of",
    "lock_unlocked",
    "owned",
    "owned_before",
    "poll",
    "renew",
    "to_cancel",
]
