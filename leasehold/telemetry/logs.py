"""Structured logs: one JSON object a line in production, readable on a terminal."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any
from uuid import UUID

import orjson
import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, Processor

from leasehold.settings import Settings
from leasehold.telemetry import redaction

_SAID: ContextVar[Mapping[str, object]] = ContextVar("said", default=MappingProxyType({}))


def say_with_every_line(words: Mapping[str, object]) -> None:
    """From now on, in this context; instead of what was said so before. Values become text when a line is written.

    Beside structlog's own, which sets a variable a word: on the hot path that was a twelfth of the worker's CPU.
    """
    _SAID.set(words)


def _add_said(_logger: object, _method: str, event: EventDict) -> EventDict:
    for name, value in _SAID.get().items():
        event.setdefault(name, str(value) if isinstance(value, UUID) else value)
    return event


def configure_logs(settings: Settings) -> None:
    """Called once by a process's main; libraries' own logs come out in the same form."""
    redaction.learn(settings)
    for_machines = settings.log_format == "json" or (settings.log_format == "auto" and not sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _add_said,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    renderer: Processor
    # Tracebacks without local variables, which both ways show by default: they hold keys, bodies and signed URLs.
    if for_machines:
        shared.append(structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)))
        renderer = structlog.processors.JSONRenderer(as_json)
    else:
        renderer = structlog.dev.ConsoleRenderer(
            exception_formatter=structlog.dev.plain_traceback,  # the rich one takes seconds, and shows values
            colors=sys.stderr.isatty(),
        )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    # What no line of ours shows costs a stack walk and three look-ups a line (the logging HOWTO, "Optimization").
    logging._srcfile = None  # noqa: SLF001 - the documented way
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer, _redact],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.log_level.upper())
    for chatty in ("aiormq", "aio_pika", "botocore", "aiobotocore", "urllib3", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def as_json(event: EventDict, **options: Any) -> str:
    """A line's words, whatever they are. `options`: of `json.dumps`."""
    try:
        return orjson.dumps(event, default=options["default"]).decode()
    except TypeError:  # a number or a text that is none of JSON's: Python's own encoder has a way to write it
        return json.dumps(event, **options)


def _redact(_logger: object, _method: str, line: Any) -> str:
    """The last step of all: it sees the line as it will be written, tracebacks included."""
    return redaction.redact(line)
