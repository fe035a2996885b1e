"""The HTTP API, imported as `leasehold.api`. Each kind of work has a folder, which may import `process`, `auth` and
`http`. These three import no folder of a kind of work.

The API imports no module of the worker.
"""
