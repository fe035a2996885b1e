"""A workflow's journal: read it, record calls under the lease, store signals for it; a module each.

`suspend`, which also writes to the journal, is a settlement (transitions/settlements/suspending.py). Import the modules
themselves: settlements uses this room, and this room the guard of settlements.
"""
