"""What a worker counts of its requests to providers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from leasehold.pipelines.generation.provider import (
    Made,
    Order,
    OutcomeUnknown,
    Provider,
    Rejected,
    Taken,
    TryLater,
    Working,
)
from leasehold.telemetry.meters import Bounded, counter, histogram

REQUESTS = counter(
    "generation_provider_requests_total",
    "Requests to providers. ok; rejected: it will never do this; later: busy or down; unknown: no answer that could "
    "be read; error: a bug of ours",
    ["provider", "operation", "outcome"],
)
SECONDS = histogram(
    "generation_provider_request_duration_seconds", "A request to a provider, answer read", ["provider"]
)

_OUTCOMES = {Rejected: "rejected", TryLater: "later", OutcomeUnknown: "unknown"}
_names = Bounded()


class _Measured:
    """A provider whose requests are counted."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._label = _names(provider.name)

    @property
    def name(self) -> str:
        return self._provider.name

    @property
    def takes_token(self) -> bool:
        return self._provider.takes_token

    async def submit(self, order: Order, credential: str) -> Taken | Made:
        with self._request("submit"):
            return await self._provider.submit(order, credential)

    async def poll(self, ref: str, order: Order, credential: str) -> Working | Made:
        with self._request("poll"):
            return await self._provider.poll(ref, order, credential)

    async def cancel(self, ref: str, order: Order, credential: str) -> bool:
        with self._request("cancel"):
            return await self._provider.cancel(ref, order, credential)

    @contextmanager
    def _request(self, operation: str) -> Iterator[None]:
        began, outcome = perf_counter(), "ok"
        try:
            yield
        except BaseException as error:
            outcome = _OUTCOMES.get(type(error), "error")
            raise
        finally:
            REQUESTS.labels(self._label, operation, outcome).inc()
            SECONDS.labels(self._label).observe(perf_counter() - began)


def measured(provider: Provider) -> Provider:
    return _Measured(provider)
