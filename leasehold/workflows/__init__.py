"""Runs a workflow's coroutine by hand: the context that it calls, its branches, and the journal as it runs.

The package does no I/O: a worker reads and writes the journal through the `Port`. It imports only transitions and what
lies below.
"""
