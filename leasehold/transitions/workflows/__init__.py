"""A workflow's journal: read it, record calls under the lease, store signals for it; a module each.

`suspend`, which also writes to the journal, is a settlement (transitions/settlements/suspending.py). Import the
modules, not this package: `settlements` imports modules of this package, and these import `settlements.guard`.
"""
