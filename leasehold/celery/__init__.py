"""Celery's names over leasehold: change `from celery import ...` to `from leasehold.celery import ...`.

Call sites stay as they are. What has no equal raises NotSupported where it is declared, or ImportError where it is
imported, with what to do instead. The guide: docs/guides/from-celery.md.
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

#: Names of Celery's modules that have no equal, and what to do.
_GONE = {
    "Task": "write a function, and open clients in the app's lifespan",
    "crontab": "declare the task with leasehold's @app.cron",
    "chunks": "use group(...), or a leasehold task with batch=",
    "current_task": "use bind=True and self, or leasehold's current()",
    "signals": "use leasehold's @app.middleware and @app.lifespan",
    "bootsteps": "use leasehold's @app.lifespan",
}


def get_task_logger(name: str) -> logging.Logger:
    """Its lines are kept with the run, as all lines of the standard logging that a task writes."""
    return logging.getLogger(name)


def __getattr__(name: str) -> Any:
    if name in _GONE:
        raise ImportError(f"leasehold.celery has no {name}: {_GONE[name]}")
    raise AttributeError(f"module 'leasehold.celery' has no attribute {name!r}")
