"""The platform's log lines in a program of the user's go to the standard `logging`, which the program configures."""

from __future__ import annotations

import structlog


def log_to_the_program() -> None:
    """Without a configuration of structlog its lines would go to stdout, among what the program prints."""
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
