"""Runs a workflow's coroutine by hand: the context that it calls, its branches, and the journal as it runs.

No I/O of its own: a worker reads and writes the journal through the `Port`. Imports transitions and what lies below.
"""
