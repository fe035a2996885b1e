"""Counts a worker's requests to providers (services that make images or videos), and measures their duration.
`ProviderContext` wraps each provider with `measured`.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from leasehold.pipelines.generation.provider import NoAccess, OutcomeUnknown, Provider, Rejected, TryLater
from leasehold.pipelines.generation.wrapped import Wrapped
from leasehold.telemetry.meters import Bounded, counter, histogram

REQUESTS = counter(
    "generation_provider_requests_total",
    "Requests to providers. ok; rejected: for good; no_access: the credential, the account or the settings forbid the "
    "request; later: the provider is busy or down; unknown: no readable answer came; cancelled: the worker stopped "
    "waiting; error: a bug in Leasehold",
    ["provider", "operation", "outcome"],
)
SECONDS = histogram(
    "generation_provider_request_duration_seconds",
    "Seconds of a request to a provider, until its answer is read",
    ["provider"],
)

#: The class of the error that a request raised -> the label `outcome`. Any other error gets the label `error`.
_OUTCOMES = {
    Rejected: "rejected",
    NoAccess: "no_access",
    TryLater: "later",
    OutcomeUnknown: "unknown",
    CancelledError: "cancelled",
}
_bounded_names = Bounded()  # the names of providers; all names beyond the bound go to one time series


def measured(provider: Provider) -> Provider:
    """The provider, wrapped so that each of its requests is counted and timed."""
    label = _bounded_names(provider.name)
    return Wrapped(provider, lambda operation, _credential: _measured_request(label, operation))


@contextmanager
def _measured_request(label: str, operation: str) -> Iterator[None]:
    began, outcome = perf_counter(), "ok"
    try:
        yield
    except BaseException as error:
        outcome = _OUTCOMES.get(type(error), "error")
        raise
    finally:
        REQUESTS.labels(label, operation, outcome).inc()
        SECONDS.labels(label).observe(perf_counter() - began)
