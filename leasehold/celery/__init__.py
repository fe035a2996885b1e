"""Celery's API on top of leasehold: change `from celery import ...` to `from leasehold.celery import ...`.

Call sites stay as they are. A feature of Celery that has no equivalent here raises NotSupported where a program
declares it, or ImportError where a program imports it. The message says what to do instead. The guide:
docs/guides/from-celery.md.
"""

from __future__ import annotations

import logging
from typing import Any

from leasehold.celery.app import Celery, current_app, shared_task
from leasehold.celery.canvas import Signature, chain, chord, group
from leasehold.celery.result import AsyncResult

__all__ = [
    "AsyncResult",
    "Celery",
    "Signature",
    "chain",
    "chord",
    "current_app",
    "get_task_logger",
    "group",
    "shared_task",
]

#: Names in Celery's modules that have no equivalent here, and what to do instead.
_UNSUPPORTED = {
    "Task": "write a function, and open clients in the app's lifespan",
    "crontab": "declare the task with leasehold's @app.cron",
    "chunks": "use group(...), or a leasehold task with batch=",
    "current_task": "use bind=True and self, or leasehold's current()",
    "signals": "use leasehold's @app.middleware and @app.lifespan",
    "signature": "use the task's own: task.signature(args, kwargs), or task.s(...)",
    "subtask": "use the task's own: task.signature(args, kwargs), or task.s(...)",
    "maybe_signature": "use the task's own: task.signature(args, kwargs), or task.s(...)",
    "xmap": "use group(task.s(item) for item in items)",
    "xstarmap": "use group(task.s(*item) for item in items)",
    "uuid": "use str(uuid.uuid4())",
    "bootsteps": "use leasehold's @app.lifespan",
}


def get_task_logger(name: str) -> logging.Logger:
    """A standard logger. The platform keeps its lines with the run, as it keeps all lines that a task logs."""
    return logging.getLogger(name)


def __getattr__(name: str) -> Any:
    if name in _UNSUPPORTED:
        raise ImportError(f"leasehold.celery has no {name}: {_UNSUPPORTED[name]}")
    raise AttributeError(f"module 'leasehold.celery' has no attribute {name!r}")
