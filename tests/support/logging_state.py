"""What a test may change of the logging of its process, which all tests share."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

#: What `configure_logs` sets in the module `logging`.
_SWITCHES = ("_srcfile", "logThreads", "logProcesses", "logMultiprocessing")


@contextmanager
def logging_as_before() -> Iterator[None]:
    """After the block, the loggers have their levels again, the root logger its handlers, structlog its configuration,
    and the import system its path. Without this, a test that configures the logs, or a command that a test runs in its
    own process, decides whether the lines of a later test are seen.
    """
    root = logging.getLogger()
    handlers, levels = root.handlers[:], _levels()
    switches = {name: getattr(logging, name) for name in _SWITCHES}
    configured, config = structlog.is_configured(), structlog.get_config()
    path = sys.path[:]
    try:
        yield
    finally:
        root.handlers[:] = handlers
        for name, level in _levels().items():
            if level != (earlier := levels.get(name, logging.NOTSET)):
                logging.getLogger(name).setLevel(earlier)
        for name, value in switches.items():
            setattr(logging, name, value)
        if configured:
            structlog.configure(**config)
        elif structlog.is_configured():
            structlog.reset_defaults()
        sys.path[:] = path


def _levels() -> dict[str, int]:
    """{name: level} of all loggers."""
    root = logging.getLogger()
    loggers = root.manager.loggerDict.items()
    return {"": root.level} | {name: logger.level for name, logger in loggers if isinstance(logger, logging.Logger)}
