"""Reads and writes the journals of workflows (the rows of their calls), stores signals, and handles the runs that
workflows start.

`suspend`, which also writes to the journal, is a settlement (transitions/settlements/suspending.py). Import the
modules, not this package: `settlements` imports modules of this package, and these import `settlements.guard`.
"""
