"""Clients of the HTTP API: `Client` and `AsyncClient` submit jobs and follow them, `ExternalWorker` works on tasks.

This package needs the HTTP library, pydantic and the errors of `leasehold.domain`. It loads no database driver, no
broker and no web framework.
"""

from leasehold.client.async_client import AsyncClient
from leasehold.client.calls import Call
from leasehold.client.client import Client
from leasehold.client.errors import ApiError, ClientError, RunFailed, Unavailable

__all__ = ["ApiError", "AsyncClient", "Call", "Client", "ClientError", "RunFailed", "Unavailable"]
