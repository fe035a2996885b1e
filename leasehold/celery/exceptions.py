"""The names of `celery.exceptions` that tasks use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from leasehold.domain.errors import LeaseholdError, Retryable


class CeleryError(LeaseholdError):
    """The base class of the errors in this module, except `Retry` and `TimeoutError`."""


class NotSupported(CeleryError):
    """A feature of Celery that leasehold.celery does not have. The message says what to do instead."""


class NotSupportedName(NotSupported, AttributeError):
    """An attribute or method that the object has in Celery, but not here. It is an AttributeError, so that `hasattr`
    returns False.
    """

    def __init__(self, message: str, *, name: str, obj: object) -> None:
        super().__init__(message)
        self.name = name
        self.obj = obj


class MaxRetriesExceededError(CeleryError):
    """The task called `self.retry` after its last retry, and gave no exception to raise instead. `task_args` and
    `task_kwargs`: the arguments of the run.
    """

    def __init__(
        self, message: str, task_args: Sequence[Any] = (), task_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.task_args = list(task_args)
        self.task_kwargs = dict(task_kwargs or {})


class Retry(Retryable):
    """What `self.retry` raises, so that the run is tried again after `countdown` seconds."""

    def __init__(self, message: str, countdown: float) -> None:
        super().__init__(message, code="retry", after=timedelta(seconds=countdown))


TimeoutError = TimeoutError  # noqa: A001, PLW0127 - tasks import it from here, as from celery.exceptions
