"""The pool of processes in which a worker runs `process=True` tasks. A process runs one call after another. The worker
and a process exchange frames (messages, process_frames.py) over a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from leasehold.app.process_frames import HEAD, NO_CALL, CallOfProcess, FailedInProcess, Kind, LineOfProcess
from leasehold.domain.errors import Cancelled, ChildCrashed, LeaseLost, Permanent, Retryable, StepError
from leasehold.runtime.exits import describe_exit
from leasehold.runtime.gather import cancel_and_wait
from leasehold.runtime.import_path import import_path
from leasehold.telemetry import child_logs

if TYPE_CHECKING:
    from leasehold.settings import Settings

#: Seconds for which a call waits for a process. After this time the attempt of the call ends with a snooze, which means
#: that a later attempt runs the task.
WAIT_SECONDS = 5.0
#: Seconds between two checks whether the run of a call was cancelled.
_CHECK_SECONDS = 0.2
_STREAM_BYTES = 1 << 20  # the size of the buffer for a process's frames


class Process:
    """One child process. It leads a separate process group, so that `kill` also ends the processes that it started."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._call_number = NO_CALL  # the number of the present call, which each of its frames carries

    @classmethod
    async def start(cls) -> Process:
        """Start a child process. Raises NoneForked if the machine has no room for a process. The worker then snoozes
        the task, and counts no failure.
        """
        from leasehold.worker.sandbox.children import NoneForked  # noqa: PLC0415 - declaring a task loads no worker

        with contextlib.ExitStack() as on_error:
            try:
                worker_end, child_end = socket.socketpair()
                on_error.callback(worker_end.close)
                with child_end:
                    process = await asyncio.create_subprocess_exec(
                        sys.executable, "-P", "-m", "leasehold.app.process_child",
                        str(child_end.fileno()), str(os.getpid()), *import_path(),
                        pass_fds=(child_end.fileno(),), stdin=asyncio.subprocess.DEVNULL, start_new_session=True,
                    )  # fmt: skip
            except OSError as error:
                raise NoneForked(f"no process could be started: {error}") from error
            on_error.pop_all()
        reader, writer = await asyncio.open_connection(sock=worker_end, limit=_STREAM_BYTES)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._process.returncode is None

    async def call(self, call: CallOfProcess, on_frame: Callable[[Kind, bytes], None]) -> tuple[Kind, bytes]:
        """Run the call, and return its last frame. The process sends the frame BEGUN before the user's code begins.
        `on_frame` gets each frame between BEGUN and the last frame. Frames of earlier calls are dropped. Such frames
        can come because the functions of these calls may have left threads behind. Raises NoneForked if the process
        ends before the user's code begins, and ChildCrashed if it ends later. The import of the task's module counts as
        the user's code.
        """
        from leasehold.worker.sandbox.children import NoneForked  # noqa: PLC0415 - declaring a task loads no worker

        has_begun = False
        self._call_number += 1
        body = call.model_dump_json().encode()
        try:
            self._writer.write(HEAD.pack(Kind.CALL, self._call_number, len(body)) + body)
            await self._writer.drain()
            while True:
                kind, call_number, length = HEAD.unpack(await self._reader.readexactly(HEAD.size))
                kind, body = Kind(kind), await self._reader.readexactly(length)
                if call_number != self._call_number:
                    continue
                if kind in (Kind.DONE, Kind.FAILED, Kind.CANCELLED):
                    return kind, body
                if kind is Kind.BEGUN:
                    has_begun = True
                else:
                    on_frame(kind, body)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            exit_text = describe_exit(await self._process.wait())
            if not has_begun:
                raise NoneForked(f"the process of the task ended before it began ({exit_text})") from error
            raise ChildCrashed("child_crashed", f"the process of the task ended early ({exit_text})") from error

    def request_stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            # The process leads a process group. The id of the group is the process's id, even after the process has
            # ended.
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._writer.close()


class Processes:
    """The worker's pool of processes for one app. A process is reused, unless its last call was interrupted."""

    def __init__(self, settings: Settings) -> None:
        # One place for each process that may run at the same time.
        self._places = asyncio.Semaphore(settings.worker_children or os.cpu_count() or 1)
        self._idle_processes: list[Process] = []  # processes that run no call, and may be reused

    @contextlib.asynccontextmanager
    async def room(self) -> AsyncIterator[bool]:
        """Reserve one of the pool's processes for one `run` in the block, and yield True. If no process becomes free
        within WAIT_SECONDS, reserve nothing, and yield False.
        """
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._places.acquire()
        except TimeoutError:
            yield False
            return
        try:
            yield True
        finally:
            self._places.release()

    async def run(self, call: CallOfProcess, attempt: Any) -> bytes:
        """Run the call, and return the JSON of its result. `attempt`: the attempt of the task, which gets the
        function's progress, chunks and log lines. Raises Cancelled or a StepError if the function raises an error.
        Raises NoneForked if the function could not begin. If the caller's asyncio task is cancelled, the process is
        killed.
        """
        process = await self._take_process()
        call = call.model_copy(update={"log_level": child_logs.level()})
        watch_task = asyncio.create_task(_watch(process, attempt))
        is_reusable = False
        try:
            kind, body = await process.call(call, partial(_report, attempt, process.pid))
            # `_watch` ends only after it has asked the process to stop. Such a process is not reused, because it would
            # also stop its next call.
            is_reusable = kind is not Kind.CANCELLED and not watch_task.done()
        finally:
            try:
                await cancel_and_wait(watch_task)
            finally:  # also if the current asyncio task is cancelled while it waits here
                if is_reusable:
                    self._idle_processes.append(process)
                else:
                    await process.kill()
        match kind:
            case Kind.CANCELLED:
                raise Cancelled
            case Kind.FAILED:
                raise error_of(FailedInProcess.model_validate_json(body))
        return body

    async def _take_process(self) -> Process:
        while self._idle_processes:
            process = self._idle_processes.pop()
            if process.lives:
                return process
            await process.kill()
        return await Process.start()

    async def close(self) -> None:
        while self._idle_processes:
            await self._idle_processes.pop().kill()


async def _watch(process: Process, attempt: Any) -> None:
    """Wait until the run is cancelled, or the worker has lost the task's lease. Then ask the process to stop."""
    while True:
        await asyncio.sleep(_CHECK_SECONDS)
        try:
            attempt.checkpoint()
        except (Cancelled, LeaseLost):
            process.request_stop()
            return


def _report(attempt: Any, child: int, kind: Kind, body: bytes) -> None:
    """Pass to the attempt what its function reports. `child`: the id of the function's process."""
    if kind is Kind.PROGRESS:
        attempt.progress(*orjson.loads(body))
    elif kind is Kind.EMIT:
        attempt.emit(orjson.loads(body))
    elif kind is Kind.LOG:
        line = LineOfProcess.model_validate_json(body)
        child_logs.log_line(line.logger, line.level, line.message, trace=line.trace, child=child, fields=line.fields)


def error_of(failed: FailedInProcess) -> StepError:
    """The error that the worker raises for an exception of the function."""
    error: StepError
    if failed.permanent:
        error = Permanent(failed.code, failed.message)
    else:
        after = None if failed.after is None else timedelta(seconds=failed.after)
        error = Retryable(failed.message, code=failed.code, after=after)
    error.trace = failed.trace
    return error
