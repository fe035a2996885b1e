"""The HTTP API, imported as `leasehold.api`. The folders `process`, `auth` and `http` serve all endpoints. They import
none of the other folders, which have the endpoints and the console.

The API imports no module of the worker.
"""
