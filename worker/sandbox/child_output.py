"""Copies what a child process prints into the worker's log, line by line, up to a bound for each run.

The worker always empties the pipe, so a child that prints a lot never blocks. Beyond the bound the worker drops the
output and counts its bytes. So the output cannot fill the memory or the log.
"""

from __future__ import annotations

import asyncio
import os
from contextvars import copy_context

import structlog

from leasehold.telemetry.attempt_logs import Recorder, current, record_in

#: Bytes of one read.
_CHUNK = 64 * 1024
#: The most bytes of one line in the log. A longer line is cut, and then ends in _CUT.
_MAX_LINE = 1000
_CUT = b" [...]"
#: The most bytes of output that the worker logs for one run.
MAX_BYTES_PER_RUN = 32 * 1024


class ChildOutput:
    """A pipe whose write end becomes a child's stdout and stderr."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        self._recorder: Recorder | None = None  # the attempt's recorder, which stores the lines with the job
        self._context = copy_context()  # the context in which each line is logged
        # `_emit` itself adds each line to the recorder. With `record_in(None)` the log call does not add the line
        # again.
        self._context.run(record_in, None)
        os.set_blocking(self._read_end, False)
        self._loop = asyncio.get_running_loop()
        self._log = structlog.get_logger()
        self._allowance = MAX_BYTES_PER_RUN  # bytes that are still logged in this run
        self._dropped = 0  # bytes beyond the allowance
        self._line = b""  # a line whose end has not come yet

    def watch(self, pid: int) -> None:
        """Start reading. Call this when the child `pid` has its copy of the write end."""
        self._log = self._log.bind(child=pid)
        self._close_write_end()
        self._loop.add_reader(self._read_end, self._read)

    def begin(self, pipeline: str, step: str) -> None:
        """Call this when a run begins, in the context of its attempt. From now on, log at most MAX_BYTES_PER_RUN of the
        child's output, with the names of the pipeline and the step.
        """
        self._log_last_line()
        self._recorder = current()
        self._context = copy_context()  # names the job in the worker's log
        self._context.run(record_in, None)  # as in `__init__`
        self._allowance, self._dropped = MAX_BYTES_PER_RUN, 0
        self._log = self._log.bind(pipeline=pipeline, step=step)

    def read(self) -> None:
        """Log the output that is in the pipe now. Also log a last line that has no end."""
        if self._read_end >= 0:
            self._read()
        self._log_last_line()

    def close(self) -> None:
        """Log the output that is still in the pipe, and close the pipe. May be called twice."""
        self._close_write_end()
        self.read()
        self._close_read_end()

    def _read(self) -> None:
        try:
            chunk = os.read(self._read_end, _CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            self._close_read_end()
            return
        allowed = chunk[: self._allowance]
        self._allowance -= len(allowed)
        self._dropped += len(chunk) - len(allowed)
        *lines, self._line = (self._line + allowed).split(b"\n")
        if len(self._line) > _MAX_LINE:  # log the line before its end has come, so that `_line` stays small
            lines, self._line = [*lines, self._line], b""
        for line in lines:
            self._emit(line)

    def _emit(self, line: bytes) -> None:
        if line.strip():
            if len(line) > _MAX_LINE:
                line = line[: _MAX_LINE - len(_CUT)] + _CUT
            text = line.decode("utf-8", "replace")
            self._context.run(self._log.info, "child output", line=text)
            if self._recorder is not None:
                self._recorder.add("info", "output", text)

    def _log_last_line(self) -> None:
        """Log the line whose end the child has not written yet, and how many bytes were dropped."""
        self._emit(self._line)
        self._line = b""
        if self._dropped:
            self._log.warning("child output dropped", bytes=self._dropped)
            if self._recorder is not None:
                self._recorder.add(
                    "warning", "output", f"Output of this run that is not kept: {self._dropped:,} bytes."
                )
            self._dropped = 0

    def _close_write_end(self) -> None:
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def _close_read_end(self) -> None:
        if self._read_end >= 0:
            self._loop.remove_reader(self._read_end)
            os.close(self._read_end)
            self._read_end = -1
