"""Records the log lines of an attempt for the log of its job. `Recorder` keeps the lines of one attempt until the
worker writes them to the database.

A context variable names the recorder of the running attempt. `Handler`, a handler of the root logger, gives every line
of that context to the recorder. These are the lines of the standard `logging`, and those of structlog if structlog is
configured to use `logging`. Lines of threads that carry the context (asyncio.to_thread, the worker's own threads) are
recorded, too. Exception: lines of a logger that does not propagate are not recorded.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial
from threading import Lock
from typing import Any, Protocol

import orjson

from leasehold.telemetry.child_logs import own_fields
from leasehold.telemetry.emissions import Emissions
from leasehold.telemetry.logs import is_fact
from leasehold.telemetry.redaction import redact

#: The bounds of one line, in characters. A longer message loses its end. A longer traceback loses its beginning.
MAX_MESSAGE, MAX_TRACEBACK, MAX_NAME = 8192, 16_384, 200
#: The most fields of one line, and the most characters of a field's value.
MAX_FIELDS, MAX_VALUE = 32, 2000
#: The logger's name in lines that the platform itself adds.
PLATFORM = "leasehold"

#: The lines of these loggers get into the log of no attempt, only into the worker's log. The reason: asyncio logs a
#: forgotten task, or a client that nobody closed, when the garbage collector finds it. The collector may run during any
#: attempt, and what it finds may belong to another tenant.
_LOGGERS_OF_ALL_ATTEMPTS = frozenset({"asyncio"})

#: Members of a structlog event that do not become fields of the line, because the line shows them elsewhere.
_NOT_FIELDS = frozenset({
    "event", "level", "timestamp", "logger", "exc_info", "stack", "exception", "traceback", "_record", "_from_structlog"
})  # fmt: skip


def text_of(value: object, limit: int, *, keep_end: bool = False) -> str:
    """`value` as text that PostgreSQL can store: redacted, without NUL and lone surrogates, and cut to `limit`
    characters. `keep_end`: cut off the beginning, and not the end.
    """
    text = redact(str(value)).replace("\x00", "").encode("utf-8", "replace").decode()
    if len(text) <= limit:
        return text
    return f"[...] {text[-limit:]}" if keep_end else f"{text[:limit]} [...]"


def full_traceback(error: BaseException) -> str:
    """The traceback of `error` and the tracebacks of its causes, as Python prints them."""
    return "".join(traceback.format_exception(error))


class Recorder:
    """The lines of one attempt. Any thread may add lines.

    The log has bounds: `max_lines` and `max_bytes`. At the first line beyond a bound the log is cut. From then on,
    lines are only counted and dropped, except those of `add_final`. If `max_lines` is 0, nothing is recorded.

    `_lines` is a buffer, because it has only the lines that `take` has not returned yet. `lines` and `bytes`: the
    number of all lines so far, and their size. `on_first`: called each time when a line comes into the empty buffer, so
    at the first line of all, and at the first line after each `take`. `lock`: several recorders may use the same lock.
    `stream`: the chunks that the attempt emits.
    """

    __slots__ = (
        "_closed",
        "_dropped",
        "_lines",
        "_lock",
        "_max_bytes",
        "_max_lines",
        "_written",
        "bytes",
        "lines",
        "on_first",
        "stream",
    )

    def __init__(
        self,
        max_lines: int,
        max_bytes: int,
        lock: Lock,
        on_first: Callable[[], None] | None = None,
        stream: Emissions | None = None,
    ) -> None:
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self.on_first = on_first
        self._lock = lock
        self._lines: list[bytes] = []
        self._written = 0  # lines that `take` has returned
        self._dropped = 0  # lines that were dropped; above 0: the log is cut
        self._closed = False
        self.stream = stream
        self.lines = 0
        self.bytes = 0

    @property
    def recorder(self) -> Recorder:  # makes a recorder usable as a Source
        return self

    @property
    def is_cut(self) -> bool:
        """Whether the log is cut, which means that at least one line was dropped."""
        return self._dropped > 0

    def resume(self, lines: int, size: int) -> None:
        """Begin the counts with those of the attempt's earlier recorders, so that the bounds hold for all these
        recorders together. `lines`: the number of the earlier lines. `size`: their bytes.
        """
        self.lines, self.bytes = lines, size

    def add(
        self,
        level: str,
        logger: str,
        message: object,
        *,
        fields: Mapping[str, object] | None = None,
        trace: str = "",
        at: float | None = None,
    ) -> None:
        """Add a line, unless the log is cut or the attempt has ended. `trace`: the traceback of an error. `at`: seconds
        since 1970; None: now.
        """
        if not self._drops_next():
            self._add_line(_encode_line(level, logger, message, fields or {}, trace, at))

    def _drops_next(self) -> bool:
        """Whether the next line is dropped, because the log is cut or the attempt has ended. Counts a line that is
        dropped because of the cut.
        """
        if self._dropped and not self._closed:
            self._dropped += 1
        return self._closed or self._dropped > 0

    def _add_line(self, line: bytes) -> None:
        """Add the line. The first line beyond the bounds is dropped, and a line about the cut takes its place."""
        if self.lines >= self._max_lines or self.bytes + len(line) > self._max_bytes:
            self._dropped = 1
            if self._max_lines:
                bounds = f"an attempt keeps {self._max_lines:,} lines, or {self._max_bytes:,} bytes"
                message = f"The log is cut here: {bounds}."
                # The line has two marks of the cut. Processes of earlier releases recognise the field `cut`. Those of
                # this release recognise the member `cut` that `is_cut` adds.
                self._append(_encode_line("warning", PLATFORM, message, {"cut": True}, "", None, is_cut=True))
            return
        self._append(line)

    def add_final(self, level: str, message: str, *, trace: str = "") -> None:
        """Add a line of the platform about the attempt's end, even if the attempt's log is cut."""
        if not self._closed and self._max_lines:
            self._append(_encode_line(level, PLATFORM, message, {}, trace, None))

    def _append(self, line: bytes) -> None:
        with self._lock:
            self._lines.append(line)
            self.lines += 1
            self.bytes += len(line)
            is_first = len(self._lines) == 1
        if is_first and self.on_first is not None:
            self.on_first()

    def take(self) -> tuple[int, list[bytes]]:
        """Empty the buffer. Returns two values: the number of the first line in the buffer (the recorder's first line
        of all has the number 1), and the lines of the buffer, each as JSON.
        """
        with self._lock:
            lines, self._lines = self._lines, []
            first_number = self._written + 1
            self._written += len(lines)
        return first_number, lines

    def for_later(self) -> Recorder:
        """A recorder with the same bounds, for the next step. This attempt's worker may start that step speculatively,
        before it has claimed the step. Once the step has an attempt of its own, `hand_over` gives the lines to the
        recorder of that attempt.
        """
        stream = None if self.stream is None else self.stream.for_later()
        return Recorder(self._max_lines, self._max_bytes, self._lock, stream=stream)

    def hand_over(self, other: Recorder) -> None:
        """Give the lines so far to `other`, and let all later lines follow."""
        # The later lines follow because this function is `on_first` from now on. `take` below empties the buffer. So
        # each later line comes into an empty buffer, `_append` calls `on_first`, and this function passes the line on.
        self.on_first = partial(self.hand_over, other)
        if self.stream is not None and other.stream is not None:
            self.stream.hand_over(other.stream)
        for line in self.take()[1]:
            if not other._drops_next():
                other._add_line(line)

    def close(self) -> None:
        """End the recording, because the attempt has ended. If lines were dropped, a last line says how many."""
        if self._dropped:
            self.add_final("warning", f"Lines of this attempt that are not kept: {self._dropped:,}.")
        self._closed = True


def _encode_line(
    level: str,
    logger: str,
    message: object,
    fields: Mapping[str, object],
    trace: str,
    at: float | None,
    *,
    is_cut: bool = False,
) -> bytes:
    """The line as JSON. `is_cut`: this line marks where the log is cut, by a member `cut` beside `message`. A handler
    cannot log a line with this member, because the names that it chooses become members of `fields`.
    """
    instant = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    line: dict[str, Any] = {
        "at": instant.isoformat(timespec="milliseconds"),
        "level": level,
        "logger": text_of(logger, MAX_NAME),
        "message": text_of(message, MAX_MESSAGE),
    }
    if fields:
        kept_fields = list(fields.items())[:MAX_FIELDS]
        line["fields"] = {text_of(name, MAX_NAME): _field_value(value) for name, value in kept_fields}
    if trace:
        line["traceback"] = text_of(trace, MAX_TRACEBACK, keep_end=True)
    if is_cut:
        line["cut"] = True
    return orjson.dumps(line)


def _field_value(value: object) -> object:
    if isinstance(value, bool | None):
        return value
    if isinstance(value, float):
        return float(value)  # orjson refuses a subclass, such as a float of numpy
    if isinstance(value, int) and abs(value) < 2**53:
        return int(value)
    return text_of(value, MAX_VALUE)


class Source(Protocol):
    """An object that has the recorder of an attempt, or makes the recorder at the first access."""

    @property
    def recorder(self) -> Recorder: ...


#: The object whose recorder gets the lines of the current context; None: no recorder gets them.
_source: ContextVar[Source | None] = ContextVar("recorder", default=None)


def record_in(source: Source | None) -> None:
    """Let the recorder of `source` get all later lines of this context. With None, no recorder gets them."""
    _source.set(source)


def source() -> Source | None:
    """The source of this context."""
    return _source.get()


def current() -> Recorder | None:
    """The recorder of this context."""
    own_source = _source.get()
    return None if own_source is None else own_source.recorder


class Handler(logging.Handler):
    """Gives each line to the recorder of its context. Install it with `installed`."""

    def emit(self, record: logging.LogRecord) -> None:
        own_source = _source.get()
        try:
            if own_source is not None and record.name not in _LOGGERS_OF_ALL_ATTEMPTS:
                _record(own_source.recorder, record)
        except Exception:  # noqa: BLE001 - as in every handler of `logging`: an odd line must not end the attempt
            self.handleError(record)
        root, last = logging.getLogger(), logging.lastResort
        # Without configured logs, Python prints warnings to stderr (`lastResort`), but only while the root logger has
        # no handler. This handler would silence these warnings, so it prints them itself.
        if root.handlers == [self] and last is not None and record.levelno >= last.level:
            last.handle(record)


def _record(recorder: Recorder, record: logging.LogRecord) -> None:
    if isinstance(record.msg, dict):  # an event of structlog
        event, message = record.msg, record.msg.get("event", "")
        error = event.get("exc_info")
        # Leave out the facts. A fact is a field that the platform itself adds to each line, such as the job's id.
        fields = {name: value for name, value in event.items() if name not in _NOT_FIELDS and not is_fact(name, value)}
    else:
        event = own_fields(record)
        message, error = record.getMessage(), record.exc_info
        fields = {name: value for name, value in event.items() if name != "traceback"}
    trace = event.get("traceback")
    recorder.add(
        logging.getLevelName(record.levelno).lower(),  # not `levelname`: a formatter may have coloured it
        record.name,
        message,
        fields=fields,
        trace=trace if isinstance(trace, str) else _trace_of(error),
        at=record.created,
    )


def _trace_of(error: object) -> str:
    if isinstance(error, tuple):
        error = error[1]
    elif error and not isinstance(error, BaseException):  # True: the error that is being handled
        error = sys.exc_info()[1]
    return full_traceback(error) if isinstance(error, BaseException) else ""


_handler = Handler()
#: How many workers of this process have installed the handler.
_users = 0


@contextmanager
def installed() -> Iterator[None]:
    """Install the handler at the root logger during the block. Several workers of a process use the same handler."""
    global _users  # noqa: PLW0603 - a process has only one root logger
    _users += 1
    logging.getLogger().addHandler(_handler)
    try:
        yield
    finally:
        _users -= 1
        if not _users:
            logging.getLogger().removeHandler(_handler)
