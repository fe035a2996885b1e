"""Keeps the logs of the platform and its libraries out of what a command prints."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import structlog

#: Libraries that log each try to connect. A command prints the result itself.
_CHATTY = ("aio_pika", "aiormq", "aiobotocore", "botocore", "httpx2", "asyncio")


@contextmanager
def quiet() -> Iterator[None]:
    """Log nothing inside the block. Stdout may have to be pure JSON, and stderr is for the command's own errors."""
    levels = {name: logging.getLogger(name).level for name in _CHATTY}
    configured, config = structlog.is_configured(), structlog.get_config()
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    structlog.configure(processors=[_drop])
    try:
        yield
    finally:
        if configured:
            structlog.configure(**config)
        else:
            structlog.reset_defaults()
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _drop(_logger: Any, _method: str, _event: Mapping[str, Any]) -> NoReturn:
    raise structlog.DropEvent
