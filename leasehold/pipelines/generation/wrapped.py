"""A provider with a block around each of its requests: metrics.py times it, redaction.py hides secrets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

from leasehold.pipelines.generation.provider import Accepted, Finished, Order, Provider, Working

#: (operation, credential): the block around one request. The operations are submit, poll and cancel.
Around: TypeAlias = Callable[[str, str], AbstractContextManager[None]]


class Wrapped:
    """Passes everything on to `provider`."""

    def __init__(self, provider: Provider, around: Around) -> None:
        self._provider = provider
        self._around = around

    @property
    def name(self) -> str:
        return self._provider.name

    @property
    def honours_token(self) -> bool:
        return self._provider.honours_token

    async def submit(self, order: Order, credential: str) -> Accepted | Finished:
        with self._around("submit", credential):
            return await self._provider.submit(order, credential)

    async def poll(self, ref: str, order: Order, credential: str) -> Working | Finished:
        with self._around("poll", credential):
            return await self._provider.poll(ref, order, credential)

    async def cancel(self, ref: str, order: Order, credential: str) -> bool:
        with self._around("cancel", credential):
            return await self._provider.cancel(ref, order, credential)
