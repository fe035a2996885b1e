"""Clients of the HTTP API: `Client` and `AsyncClient` submit jobs and follow them, `ExternalWorker` works on tasks.

They need the HTTP library, pydantic and the domain's errors, and load nothing of the engine: no database driver, no
broker, no web framework.
"""

from leasehold.client.async_client import AsyncClient
from leasehold.client.calls import Call
from leasehold.client.client import Client
from leasehold.client.errors import ApiError, ClientError, RunFailed, Unavailable

__all__ = ["ApiError", "AsyncClient", "Call", "Client", "ClientError", "RunFailed", "Unavailable"]
