"""One attempt: fetch inputs, run the handler, publish outputs, settle. Knows leases, and nothing of slots (a slot is
room for an attempt) or hints (messages that a task is due).
"""
