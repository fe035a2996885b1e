"""Reads and writes the journals of workflows (the rows of their calls), stores signals, and handles the runs that
workflows start.

`suspend`, which also writes to the journal, is a settlement (transitions/settlements/suspending.py). This package
exports no names, so import its modules. Exports would make a cycle of imports, because `settlements` imports modules of
this package, and these modules import `settlements.guard`.
"""
