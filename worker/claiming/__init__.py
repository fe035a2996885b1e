"""From a hint (a message that a task is due) or a poll to an attempt: slot pools, fair shares between tenants, the
claimer.

A hint goes one way: broker, hint router, slot pool, claimer, then the runner (worker/attempts), then the ACK.
"""
