"""Counts and times a worker's requests to providers. `ProviderContext` wraps each provider with `measured`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from leasehold.pipelines.generation.provider import (
    Accepted,
    Finished,
    Order,
    OutcomeUnknown,
    Provider,
    Rejected,
    TryLater,
    Working,
)
from leasehold.telemetry.meters import Bounded, counter, histogram

REQUESTS = counter(
    "generation_provider_requests_total",
    "Requests to providers. ok; rejected: for good; later: the provider is busy or down; unknown: no readable answer "
    "came; error: a bug in Leasehold",
    ["provider", "operation", "outcome"],
)
SECONDS = histogram(
    "generation_provider_request_duration_seconds",
    "Seconds of a request to a provider, until its answer is read",
    ["provider"],
)

_OUTCOMES = {Rejected: "rejected", TryLater: "later", OutcomeUnknown: "unknown"}
_bounded_names = Bounded()


class _Measured:
    """A provider whose requests are counted and timed."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._label = _bounded_names(provider.name)

    @property
    def name(self) -> str:
        return self._provider.name

    @property
    def honours_token(self) -> bool:
        return self._provider.honours_token

    async def submit(self, order: Order, credential: str) -> Accepted | Finished:
        with self._request("submit"):
            return await self._provider.submit(order, credential)

    async def poll(self, ref: str, order: Order, credential: str) -> Working | Finished:
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
