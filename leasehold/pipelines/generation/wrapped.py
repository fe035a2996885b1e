"""Wraps a provider (a service that makes images or videos), so that each request runs inside a `with` block. metrics.py
measures requests in this way, and redaction.py hides secrets in the errors of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

from leasehold.pipelines.generation.provider import Accepted, Finished, Order, Provider, Working

#: (operation, credential) -> the context manager for one request. The operations are submit, poll and cancel.
RequestContext: TypeAlias = Callable[[str, str], AbstractContextManager[None]]


class Wrapped:
    """Passes each request on to `provider`, inside the context manager that `context_of` makes for the request."""

    def __init__(self, provider: Provider, context_of: RequestContext) -> None:
        self._provider = provider
        self._context_of = context_of

    @property
    def name(self) -> str:
        return self._provider.name

    @property
    def honours_token(self) -> bool:
        # Whether a repeated submit with the same token orders nothing more.
        return self._provider.honours_token

    async def submit(self, order: Order, credential: str) -> Accepted | Finished:
        with self._context_of("submit", credential):
            return await self._provider.submit(order, credential)

    async def poll(self, ref: str, order: Order, credential: str) -> Working | Finished:
        with self._context_of("poll", credential):
            return await self._provider.poll(ref, order, credential)

    async def cancel(self, ref: str, order: Order, credential: str) -> bool:
        with self._context_of("cancel", credential):
            return await self._provider.cancel(ref, order, credential)
