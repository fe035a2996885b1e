"""Finds due tasks by hints (messages that a task is due) and by polls, and starts an attempt for each: slot pools, fair
shares between tenants, the claimer.

Each hint passes through these parts in order: broker, hint router, slot pool, claimer, runner (worker/attempts). At the
end the slot pool ACKs it.
"""
