"""Logs, in the worker, the lines of its child processes, so that each line is in the worker's log and in the job's log.
The child itself uses `structlog_by_logging` and `own_fields`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType

#: The attributes of each record of `logging`. Other attributes are fields, which the caller gave as `extra`.
STANDARD_ATTRIBUTES = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {
    "message",
    "asctime",
    "taskName",
}
_CHILD_LOG = logging.getLogger("leasehold.child")


def structlog_by_logging() -> None:
    """Let structlog log through `logging`. Call this in a child, because a child sends only the lines of `logging` to
    its worker. Without this call, structlog prints its lines.
    """
    import structlog  # noqa: PLC0415 - a worker has its own configuration

    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.dev.set_exc_info,
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["event"], drop_missing=True),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


def level() -> int:
    """The lowest level of the lines that children need to send, because this process logs no lower level."""
    return _CHILD_LOG.getEffectiveLevel()


def own_fields(record: logging.LogRecord) -> dict[str, object]:
    """The fields that the caller of `logging` gave as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in STANDARD_ATTRIBUTES}


def log_line(
    logger: str,
    line_level: int,
    message: str,
    *,
    trace: str,
    child: int,
    fields: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Log a line of a child. The log context of the caller names the attempt. The record has the name of the child's
    logger, but this process makes no logger of that name, because a hostile child could send any number of names.
    `child`: the child's process id. `trace`: the text of a traceback, or "".
    """
    if not _CHILD_LOG.isEnabledFor(line_level):
        return
    record = logging.LogRecord(logger, line_level, "", 0, message, (), None)
    for name, value in ({"child": child} | dict(fields)).items():
        if not hasattr(record, name):  # otherwise a hostile child could replace the record's own attributes and methods
            setattr(record, name, value)
    if trace:
        record.traceback = trace
    _CHILD_LOG.handle(record)
