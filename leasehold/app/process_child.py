"""The program that runs `process=True` tasks in a separate process. A worker starts the program, and sends it one call
after another.

`python -m leasehold.app.process_child FD PARENT PATH...`. FD: the file descriptor of the channel to the worker. PARENT:
the worker's process id. PATH: an entry of the worker's `sys.path`. The program has the worker's environment, disk and
network. At the time limit of a call, the worker kills the program's process group.
"""

from __future__ import annotations

import importlib
import logging
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock, Thread, current_thread, main_thread
from typing import Any
from uuid import UUID
from weakref import WeakKeyDictionary

from leasehold.app.process_frames import (
    NO_CALL,
    CallOfProcess,
    FailedInProcess,
    Kind,
    LineOfProcess,
    json_of,
    receive,
    send,
)
from leasehold.app.task import Task
from leasehold.domain.errors import Cancelled, Permanent, Retryable, StepError, deciding
from leasehold.domain.registry import import_from_current_folder
from leasehold.domain.storable import storable_text
from leasehold.domain.work import percent_of
from leasehold.runtime.child_imports import import_of_child
from leasehold.runtime.foreign_errors import text_of
from leasehold.telemetry.child_logs import own_fields, structlog_by_logging
from leasehold.worker.sandbox.fences import die_with

#: Held while a frame (a message to the worker) is sent, because several threads of a function may send at the same
#: time.
_send_lock = Lock()
#: Thread -> the number of the call for which the thread works. A thread of a pool works for the call that submitted the
#: function that the thread runs now. Any other thread works for the call that started the thread. The reason for the
#: numbers: a function may leave behind a thread that still sends frames during a later call, and the later call may
#: belong to another tenant. The worker drops frames with the number of an earlier call.
_calls_of_threads: WeakKeyDictionary[Thread, int] = WeakKeyDictionary()
#: The original methods, which `main` replaces by the two functions below.
_start_thread = Thread.start
_submit_to_pool = ThreadPoolExecutor.submit


def _start_in_call(thread: Thread) -> None:
    """Start the thread, and note that it works for the same call as the current thread. This function replaces
    Thread.start.
    """
    _calls_of_threads[thread] = _call_of_this_thread()
    _start_thread(thread)


def _submit_in_call(
    pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Future[Any]:
    """Submit the function. While the pool runs it, note that the pool's thread works for the current call. The note is
    needed, because threads of a pool may live longer than a call. This function replaces ThreadPoolExecutor.submit.
    """
    call_number = _call_of_this_thread()

    def run() -> Any:
        thread = current_thread()
        number_before = _call_of_this_thread()
        _calls_of_threads[thread] = call_number
        try:
            return function(*args, **kwargs)
        finally:
            _calls_of_threads[thread] = number_before

    return _submit_to_pool(pool, run)


def _call_of_this_thread() -> int:
    # NO_CALL: it is unknown for which call this thread works.
    return _calls_of_threads.get(current_thread(), NO_CALL)


def _send(channel: socket.socket, kind: Kind, call_number: int, body: bytes) -> None:
    with _send_lock:
        send(channel, kind, call_number, body)


class _LogSender(logging.Handler):
    """Sends the function's log lines to the worker, which stores them with the job and bounds their number."""

    def __init__(self, channel: socket.socket) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            error = record.exc_info[1] if record.exc_info else None
            trace = "" if error is None else "".join(traceback.format_exception(error))
            line = LineOfProcess(
                level=record.levelno,
                logger=record.name,
                message=record.getMessage(),
                trace=trace,
                fields={name: _field_value(value) for name, value in own_fields(record).items()},
            )
            _send(self._channel, Kind.LOG, _call_of_this_thread(), line.model_dump_json().encode())
        except Exception:  # noqa: BLE001 - a handler of `logging` raises nothing
            self.handleError(record)


def _field_value(value: object) -> bool | int | float | str | None:
    return value if isinstance(value, bool | int | float | str | None) else str(value)


class ProcessAttempt:
    """The attempt as the user's function gets it from `leasehold.current()` in this process."""

    opened = None  # what the app has opened in the worker cannot be sent to this process

    def __init__(self, call: CallOfProcess, call_number: int, channel: socket.socket) -> None:
        self.job_id = UUID(call.job_id)
        self.task_id = UUID(call.task_id)
        self.tenant_id = call.tenant
        self.number = call.number
        self.directory = Path(call.directory)
        self.log = logging.getLogger(call.task)
        self._call_number = call_number
        self._channel = channel

    def progress(self, percent: float, summary: str = "") -> None:
        # JSON has no NaN, and no half of a surrogate pair. `percent_of` and `storable_text` return values without them.
        body = json_of([percent_of(percent), storable_text(summary)])
        _send(self._channel, Kind.PROGRESS, self._call_number, body)

    def emit(self, chunk: Any) -> None:
        _send(self._channel, Kind.EMIT, self._call_number, json_of(chunk))

    def checkpoint(self) -> None:
        if _Stop.requested:
            raise Cancelled


class _Stop:
    """Whether the worker has asked the function, by SIGTERM, to stop at its next checkpoint. The worker calls no
    further function in such a process (`Processes.run`), so `requested` stays True.
    """

    requested = False

    @classmethod
    def on_signal(cls, *_signal: object) -> None:
        cls.requested = True


def main() -> None:
    descriptor, parent = map(int, sys.argv[1:3])
    die_with(parent)  # the kernel then kills this process when the worker ends
    signal.signal(signal.SIGTERM, _Stop.on_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = sys.argv[3:]  # the worker's sys.path
    import_from_current_folder()
    Thread.start = _start_in_call  # type: ignore[assignment,method-assign]
    ThreadPoolExecutor.submit = _submit_in_call  # type: ignore[assignment,method-assign]
    with socket.socket(fileno=descriptor) as channel:
        logging.getLogger().addHandler(_LogSender(channel))
        structlog_by_logging()  # before a call imports the user's modules, which may configure structlog themselves
        while (frame := receive(channel)) is not None:
            call_number, call_json = frame
            _calls_of_threads[main_thread()] = call_number
            call = CallOfProcess.model_validate_json(call_json)
            logging.getLogger().setLevel(call.log_level)
            _send(channel, Kind.BEGUN, call_number, b"")
            kind, body = _run_call(call, ProcessAttempt(call, call_number, channel))
            _send(channel, kind, call_number, body)


def _run_call(call: CallOfProcess, attempt: ProcessAttempt) -> tuple[Kind, bytes]:
    """Call the function. Returns the kind and the body of the last frame to the worker. If the function raises a group
    of errors, `deciding` picks the error that decides how the attempt ends.
    """
    try:
        task = task_of(call.module, call.task)
        encoded = task.handling.call_with_json(call.params, attempt)  # calls the user's function
        call.result_limits.is_small(encoded)  # called only because it raises Permanent for a result that is too large
    except BaseException as error:  # noqa: BLE001 - also SystemExit, because the worker gets all errors
        if isinstance(deciding(error), Cancelled):
            return Kind.CANCELLED, b""
        return Kind.FAILED, _failure_of(error).model_dump_json().encode()
    return Kind.DONE, encoded


def task_of(module: str, name: str) -> Task[..., Any]:
    """The task `name` that the module declares at its top level. Raises Permanent if the module lacks the task, or if
    its import raises ImportError. Any other error of the import passes unchanged.
    """
    try:
        with import_of_child():  # in it, an app that the module serves does not start a worker
            values = vars(importlib.import_module(module)).values()
    except ImportError as error:
        sentence = f"the process of the task {name} cannot import the module {module}: {error}"
        raise Permanent("task_not_found", sentence) from error
    for value in values:
        if isinstance(value, Task) and value.name == name:
            return value
    raise Permanent("task_not_found", f"the module {module} has no module-level task {name}")


def _failure_of(error: BaseException) -> FailedInProcess:
    trace = "".join(traceback.format_exception(error))
    error = deciding(error)
    if isinstance(error, StepError):
        after = error.after.total_seconds() if isinstance(error, Retryable) and error.after is not None else None
        permanent = isinstance(error, Permanent)
        return FailedInProcess(code=error.code, message=error.message, permanent=permanent, after=after, trace=trace)
    return FailedInProcess(code="handler_error", message=text_of(error), permanent=False, trace=trace)


if __name__ == "__main__":
    main()
