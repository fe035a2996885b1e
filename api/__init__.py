"""The HTTP API, imported as `leasehold.api`. Each kind of work has a folder, above `process`, `auth` and `http`.

The API imports nothing of the worker.
"""
