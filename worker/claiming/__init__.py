"""Finds due tasks by hints (messages that a task is due) and by polls, and starts an attempt for each. Tenants share
the room for attempts.

Each hint passes through these parts in order: broker, hint router, slot pool, claimer, runner (worker/attempts). At the
end the slot pool ACKs the hint.
"""
