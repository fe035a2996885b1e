"""The HTTP API, imported as `leasehold.api`: one room a kind of work, on top of `process`, `auth` and `http`.
It imports nothing of the worker.
"""
