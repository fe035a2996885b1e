"""Sends the platform's log lines in the user's program to the standard `logging`, which the program configures."""

from __future__ import annotations

import structlog


def log_to_the_program() -> None:
    """Let structlog log through `logging`, unless the program has configured structlog itself. Without a configuration,
    structlog would write to stdout, among the lines that the program prints.
    """
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
