"""The names of `celery.exceptions` that tasks use."""

from __future__ import annotations

from datetime import timedelta

from leasehold.domain.errors import LeaseholdError, Retryable


class CeleryError(LeaseholdError):
    """The root of these errors."""


class NotSupported(CeleryError):
    """Celery has it and Leasehold's facade has not. The message says what to do."""


class MaxRetriesExceededError(CeleryError):
    """`self.retry` was called after the last retry, without an exception to raise."""


class Retry(Retryable):
    """What `self.retry` raises: the run is tried again after `countdown` seconds."""

    def __init__(self, message: str, countdown: float) -> None:
        super().__init__(message, code="retry", after=timedelta(seconds=countdown))


TimeoutError = TimeoutError  # noqa: A001, PLW0127 - Celery exports its own under this name
