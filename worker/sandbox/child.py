"""The code that runs in a child process of the sandbox. The zygote (a process that has loaded the handlers) forks the
child and calls `live` in it. The child does one run of one step.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import tempfile
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NoReturn

from pydantic import ValidationError

from leasehold.domain.errors import Cancelled, Permanent, Retryable, deciding, is_disk_full
from leasehold.domain.params import params_of_json
from leasehold.domain.pipeline import Pipeline
from leasehold.domain.sentences import with_article
from leasehold.domain.storable import path_to_non_finite
from leasehold.domain.verdicts import Done
from leasehold.domain.work import Work, percent_of
from leasehold.runtime.foreign_errors import text_of
from leasehold.telemetry.child_logs import own_fields, structlog_by_logging
from leasehold.worker.sandbox import fences, frames

#: A child sends progress at most once in this many seconds.
_PROGRESS_SECONDS = 0.2

#: How a step failed. permanent: another try cannot help. retryable: another try may help. unforeseen: the step's code
#: raised an error of another class.
_Kind = Literal["permanent", "retryable", "unforeseen"]


def live(pipeline: Pipeline, own_fences: fences.Fences, zygote: int, channel: int, output: int) -> NoReturn:
    """Do all that a child process does: run one step, and exit. The function never returns into the zygote's code.

    `own_fences`: the restrictions of the sandbox that the child still has to add. `zygote`: the zygote's process id;
    when the zygote ends, the kernel kills the child. `channel`: the socket to the worker, for frames. `output`: the
    descriptor that becomes stdout and stderr.
    """
    status = 1
    try:
        fences.die_with(zygote)
        os.setsid()
        _take_descriptors(channel, output)
        own_fences.install_syscall_filter()
        _run(pipeline, own_fences)
        status = 0
    except MemoryError:
        os.write(2, b"out of memory\n")
        status = frames.OUT_OF_MEMORY
    except BaseException:  # noqa: BLE001 - a fence failed or the worker has ended: exit without an answer
        with contextlib.suppress(BaseException):
            os.write(2, traceback.format_exc().encode("utf-8", "replace"))
    finally:
        os._exit(status)


def _take_descriptors(channel: int, output: int) -> None:
    # Keep four descriptors: stdin, `output` as stdout and stderr, and `channel` as frames.CHANNEL. Close all others.
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(channel, frames.CHANNEL)
    fences.close_descriptors(frames.CHANNEL)


def _run(pipeline: Pipeline, own_fences: fences.Fences) -> None:
    """Receive two frames (messages of the protocol) and run the step. The first frame names only the files of the run,
    and the child then restricts itself to these files. The second frame has the client's parameters, so the child reads
    it only after the restriction.
    """
    if (body := frames.receive(frames.CHANNEL)) is None:
        return  # the worker has closed the channel: it does not need this child
    confinement = frames.Confinement.model_validate_json(body)
    own_fences.restrict_files([Path(path) for path in confinement.files], Path(confinement.directory))
    if (body := frames.receive(frames.CHANNEL)) is None:
        return
    run = frames.Run.model_validate_json(body)
    _log_to_worker(run.log_level)
    answer = _answer(pipeline, run)
    try:
        _send(answer)
    except frames.FrameError as error:
        # FrameError's text says how many bytes the frame has, or why it is no JSON.
        _send(_failed_frame("permanent", "bad_output", f"the answer cannot be sent: {error}"))
    frames.receive(frames.CHANNEL)  # wait here: the worker reads this process's peak memory, and then kills it


_send_lock = threading.Lock()  # the threads of a handler may send at the same time


def _send(frame: frames.Answer | frames.Progress | frames.LogLine | frames.Emitted) -> None:
    with _send_lock:
        frames.send(frames.CHANNEL, frame)


class _LogSender(logging.Handler):
    """Sends log records of the step's code to the worker, which stores them with the job."""

    def __init__(self) -> None:
        super().__init__()
        self._sent_lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        if self._sent_lines >= frames.MAX_LOG_LINES:
            return
        self._sent_lines += 1
        try:
            error = record.exc_info[1] if record.exc_info else None
            line = frames.LogLine(
                level=min(max(record.levelno, 0), 100),
                logger=bounded(record.name)[:200],
                message=bounded(record.getMessage(), frames.MAX_MESSAGE),
                traceback="" if error is None else bounded_traceback(error),
                fields=_fields_of(record),
            )
            _send(line)
        except Exception:  # noqa: BLE001 - as every handler of `logging` does: report the error, and go on
            self.handleError(record)


def _fields_of(record: logging.LogRecord) -> dict[str, bool | int | float | str | None]:
    """The fields that the step's code gave to `logging` as `extra`, within the protocol's bounds. A value that is a
    bool, a float, None or an integer of at most 53 bits stays as it is. Any other value becomes text.
    """
    return {
        bounded(name, frames.MAX_NAME): value
        if isinstance(value, bool | float | None) or (isinstance(value, int) and abs(value) < 2**53)
        else bounded(str(value), frames.MAX_VALUE)
        for name, value in list(own_fields(record).items())[: frames.MAX_FIELDS]
    }


def _log_to_worker(level: int) -> None:
    """Send the lines of `logging` to the worker. If the handlers use structlog, send its lines, too."""
    root = logging.getLogger()
    root.handlers = [_LogSender()]
    root.setLevel(level)
    if "structlog" in sys.modules:
        structlog_by_logging()


class _WorkerLink:
    """Connects the handler with the worker. It sends progress and chunks (values for the job's stream) over the
    channel, and checks whether the worker requests a stop. `directory`: the directory of the run. To request a stop,
    the worker makes a file in the parent of `directory`.
    """

    def __init__(self, directory: Path) -> None:
        self._cancel_path = str(directory.parent / frames.CANCEL)
        self._sent_at = -_PROGRESS_SECONDS

    def progress(self, percent: float, summary: str) -> None:
        now = monotonic()
        if now - self._sent_at >= _PROGRESS_SECONDS:
            self._sent_at = now
            _send(frames.Progress(percent=percent_of(percent), summary=bounded(summary)[:500]))

    def emit(self, chunk: Any) -> None:
        _send(frames.Emitted(chunk=chunk))

    def cancelled(self) -> bool:
        return os.path.exists(self._cancel_path)  # noqa: PTH110 - handlers call it often; half the cost of Path.exists


def _answer(pipeline: Pipeline, run: frames.Run) -> frames.Answer:
    """Run the handler. Returns the frame with the handler's result or error."""
    try:
        work = _work(pipeline, run)
        _use_directory(work.directory)
        return _finished_frame(pipeline.handlers[run.step](work), work.directory)
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 - SystemExit, too: any exception of a handler becomes its answer
        return _frame_of_error(error)
    finally:
        _flush()


# The argument of the handler. This function calls no code of the handler.
def _work(pipeline: Pipeline, run: frames.Run) -> Work:
    try:
        params = params_of_json(pipeline.params, run.params)
    except ValidationError as error:
        raise Permanent("bad_params", str(error)) from error
    files = {name: Path(path) for name, path in run.files.items()}
    directory = Path(run.directory)
    link = _WorkerLink(directory)
    return Work(run.pipeline, run.step, params, files, directory, run.item, link, run.result_limits)


def _use_directory(directory: Path) -> None:
    """Make the run's directory the current directory of the handler, and the directory of its temporary files."""
    os.chdir(directory)
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)


def _finished_frame(done: object, directory: Path) -> frames.Answer:
    if not isinstance(done, Done):
        raise TypeError(f"the handler returned {with_article(type(done).__name__)}, not Done")
    try:
        files = {
            name: frames.OutputFile(
                path=os.path.relpath(directory / file.path, directory), content_type=file.content_type
            )
            for name, file in done.files.items()
        }
        value = None if done.value is None else dict(done.value)
        if (non_finite := path_to_non_finite(value)) is not None:  # readers of the value would get null in its place
            sentence = f"the value of the step has NaN or infinity at {non_finite}: JSON has neither"
            return _failed_frame("permanent", "bad_output", sentence)
        return frames.Finished(files=files, value=value)
    except ValidationError as error:
        return _failed_frame("permanent", "bad_output", text_of(error))


def _frame_of_error(raised: BaseException) -> frames.Failed:
    """The frame for the handler's exception. The frame names the error that the worker will raise. For a group of
    exceptions, `deciding` chooses the exception that counts.
    """
    error = deciding(raised)
    if isinstance(error, Cancelled):
        return frames.Failed(error="cancelled", code="cancelled", message="")
    if isinstance(error, Permanent):
        return _failed_frame("permanent", error.code, error.message, error=raised)
    if isinstance(error, Retryable):
        return _failed_frame("retryable", error.code, error.message, after=error.after, error=raised)
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return _failed_frame("permanent", "file_limit", "a file grew past the step's size limit", error=raised)
    if is_disk_full(error):
        return _failed_frame("retryable", "disk_full", "the disk of the worker is full", error=raised)
    return _failed_frame("unforeseen", "handler_error", text_of(error), error=raised)


def _failed_frame(
    kind: _Kind, code: str, message: str, *, after: timedelta | None = None, error: BaseException | None = None
) -> frames.Failed:
    return frames.Failed(
        error=kind,
        code=bounded(code)[:200] or "unnamed",
        message=bounded(message),
        after=None if after is None else min(max(0.0, after.total_seconds()), frames.MAX_AFTER),
        traceback="" if error is None else bounded_traceback(error),
    )


def bounded(text: str, limit: int = frames.MAX_TEXT) -> str:
    """`text`, cut to the protocol's bound. Lone surrogates are replaced, because they have no UTF-8 form."""
    return text[:limit].encode("utf-8", "replace").decode()


def bounded_traceback(error: BaseException) -> str:
    """The end of the traceback, cut to the protocol's bound."""
    text = "".join(traceback.format_exception(error))
    return text[-frames.MAX_TRACEBACK :].encode("utf-8", "replace").decode()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a handler may have closed them
            stream.flush()
