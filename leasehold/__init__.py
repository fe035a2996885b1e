"""Leasehold: a durable job platform on PostgreSQL leases and RabbitMQ.

The names in `__all__` are public, and every release keeps them. Everything else in the package may change. Python loads
the module of a name when code first uses the name. So `import leasehold` is quick, and a module that declares a
pipeline loads no database driver, no web framework and no S3 client.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leasehold.app.app import App
    from leasehold.app.current import Current, current
    from leasehold.app.failed import Failed
    from leasehold.app.retry import Retry
    from leasehold.app.run import Run
    from leasehold.app.run_limits import Batch, Limit, Unique
    from leasehold.app.task import Task
    from leasehold.client.external import ExternalWorker
    from leasehold.db.database import connect
    from leasehold.domain.attempt import Attempt
    from leasehold.domain.concurrency_limit import ConcurrencyLimit
    from leasehold.domain.errors import (
        Cancelled,
        DeclarationError,
        InvalidArguments,
        LeaseholdError,
        LeaseLost,
        NotWhileUndoing,
        ObjectMissing,
        Permanent,
        Retryable,
        SignalInvalid,
        TaskFailed,
    )
    from leasehold.domain.kind import Kind
    from leasehold.domain.pipeline import Limits, Pipeline, RunTerms, SkipIf, Step
    from leasehold.domain.plain_attempt import PlainAttempt
    from leasehold.domain.registry import Pipelines
    from leasehold.domain.verdicts import Done, FanOut, File, Snooze
    from leasehold.domain.work import Work
    from leasehold.pipelines.conversion import nef
    from leasehold.settings import Settings
    from leasehold.transitions.jobs import NewJob, replay, request_cancel, submit
    from leasehold.workflows.context import Context

__all__ = [
    "App",
    "Attempt",
    "Batch",
    "Cancelled",
    "ConcurrencyLimit",
    "Context",
    "Current",
    "DeclarationError",
    "Done",
    "ExternalWorker",
    "Failed",
    "FanOut",
    "File",
    "InvalidArguments",
    "Kind",
    "LeaseLost",
    "LeaseholdError",
    "Limit",
    "Limits",
    "NewJob",
    "NotWhileUndoing",
    "ObjectMissing",
    "Permanent",
    "Pipeline",
    "Pipelines",
    "PlainAttempt",
    "Retry",
    "Retryable",
    "Run",
    "RunTerms",
    "Settings",
    "SignalInvalid",
    "SkipIf",
    "Snooze",
    "Step",
    "Task",
    "TaskFailed",
    "Unique",
    "Work",
    "connect",
    "current",
    "nef",
    "replay",
    "request_cancel",
    "submit",
]

#: A module -> the public names that it defines. Exception: `nef` is itself a module, in the package
#: `pipelines.conversion`. It reads and writes the file format of converted models.
_MODULES = {
    "app.app": ("App",),
    "app.current": ("Current", "current"),
    "app.failed": ("Failed",),
    "app.run_limits": ("Batch", "Limit", "Unique"),
    "app.retry": ("Retry",),
    "app.run": ("Run",),
    "app.task": ("Task",),
    "client.external": ("ExternalWorker",),
    "db.database": ("connect",),
    "domain.attempt": ("Attempt",),
    "domain.concurrency_limit": ("ConcurrencyLimit",),
    "domain.errors": (
        "Cancelled", "DeclarationError", "InvalidArguments", "LeaseholdError", "LeaseLost", "NotWhileUndoing",
        "ObjectMissing", "Permanent", "Retryable", "SignalInvalid", "TaskFailed",
    ),
    "domain.kind": ("Kind",),
    "domain.pipeline": ("Limits", "Pipeline", "RunTerms", "SkipIf", "Step"),
    "domain.plain_attempt": ("PlainAttempt",),
    "domain.registry": ("Pipelines",),
    "domain.verdicts": ("Done", "FanOut", "File", "Snooze"),
    "domain.work": ("Work",),
    "pipelines.conversion": ("nef",),
    "settings": ("Settings",),
    "workflows.context": ("Context",),
    "transitions.jobs": ("NewJob", "replay", "request_cancel", "submit"),
}  # fmt: skip
_MODULE_OF = {name: f"leasehold.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'leasehold' has no attribute {name!r}")
    module = import_module(_MODULE_OF[name])
    value = import_module(f"{module.__name__}.{name}") if name == "nef" else getattr(module, name)
    globals()[name] = value  # from now on Python finds the name without calling this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
