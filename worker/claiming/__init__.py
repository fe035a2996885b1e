"""From a hint or a poll to an attempt: slot pools, fair shares between tenants, the claimer.

The walk goes one way: broker, hint router, slot pool, claimer, then the runner (attempts), then the ACK.
"""
