"""Structured logs: one JSON object a line in production, readable text on a terminal."""

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

#: The fields that the platform adds to each log line of a context, such as the ids of the job and the task.
_FACTS: ContextVar[Mapping[str, object]] = ContextVar("facts", default=MappingProxyType({}))


def set_facts_of_lines(facts: Mapping[str, object]) -> None:
    """Add `facts` to every later log line of this context, instead of the facts that were set before. A UUID becomes
    text when a line is written.

    structlog's own context variables are not used, because structlog sets one for each fact. To set them cost a twelfth
    of the worker's CPU.
    """
    _FACTS.set(facts)


def _add_facts(_logger: object, _method: str, event: EventDict) -> EventDict:
    for name, value in _FACTS.get().items():
        event.setdefault(name, str(value) if isinstance(value, UUID) else value)
    return event


def is_fact(name: str, value: object) -> bool:
    """Whether the platform has added this field to a line of this context. A field of the same name with another value
    belongs to the code that logs.
    """
    # A worker binds `worker_id` by structlog, for all its contexts. Any other field that is bound by structlog belongs
    # to the code that logs, so it is no fact.
    facts = structlog.contextvars.get_contextvars() if name == "worker_id" else _FACTS.get()
    return name in facts and str(facts[name]) == str(value)


def configure_logs(settings: Settings) -> None:
    """Set up the logs of this process, also those of libraries. A process's main calls it once."""
    redaction.learn(settings)  # the secrets that `_redact` removes from each line
    for_machines = settings.log_format == "json" or (settings.log_format == "auto" and not sys.stderr.isatty())
    processors_of_all_lines: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _add_facts,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *processors_of_all_lines,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    # Lines do not show the caller, the thread and the process. To find these, `logging` would walk the stack and do
    # three look-ups for each line (logging HOWTO, "Optimization").
    logging._srcfile = None  # noqa: SLF001 - the documented way
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    processors = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        *_renderers(for_machines=for_machines),
        _redact,
    ]
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=processors_of_all_lines, processors=processors)
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.log_level.upper())
    for library in ("aiormq", "aio_pika", "botocore", "aiobotocore", "urllib3", "httpx2", "asyncio"):
        logging.getLogger(library).setLevel(logging.WARNING)


def _renderers(*, for_machines: bool) -> list[Processor]:
    """The processors that make the text of a line: JSON for machines, readable text for people.

    By default, structlog shows local variables in tracebacks. Here it does not, because they may hold keys, bodies and
    signed URLs. The traceback is rendered here, and not earlier, because attempt_logs.Handler needs the error itself.
    """
    if for_machines:
        return [
            structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(as_json),
        ]
    # structlog's default formatter of exceptions ("rich") takes seconds, and shows the values of variables.
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(exception_formatter=plain, colors=sys.stderr.isatty())]


def as_json(event: EventDict, **options: Any) -> str:
    """The event as JSON. Values of types that JSON lacks are converted. `options`: the options of `json.dumps`."""
    try:
        return orjson.dumps(event, default=options["default"]).decode()
    except TypeError:  # orjson refuses some numbers and texts, but Python's encoder can write them
        return json.dumps(event, **options)


def _redact(_logger: object, _method: str, line: Any) -> str:
    """Remove secrets from the finished line, with its traceback. This must be the last processor."""
    return redaction.redact(line)
