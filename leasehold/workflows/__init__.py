"""Runs a workflow's coroutine step by step: the context that it calls, its branches, and the replay of its journal.

The package does no I/O: a worker reads and writes the journal through the `Port`. It imports only `transitions`, and
packages that `transitions` may import, too.
"""
