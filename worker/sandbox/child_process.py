"""`ChildProcess`: the worker's handle for one child process. The worker sends the child one run, and kills the child
after the run. The zygote (the process that forked the child) then reaps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import ValidationError

from leasehold.domain.errors import ChildCrashed, StepTimeout
from leasehold.domain.pipeline import Limits
from leasehold.runtime.exits import describe_exit
from leasehold.worker import metrics
from leasehold.worker.sandbox import fences, frames
from leasehold.worker.sandbox.child_output import ChildOutput

_GRACE_SECONDS = 2  # the time for a child that has closed its channel to exit by itself

#: A function that makes the zygote reap an ended child, and returns the child's exit status. It raises OSError or
#: EOFError if the zygote has died.
Reap = Callable[[int], Awaitable[int]]


class ChildProcess:
    """A child that a zygote forked for one run. The system does not reuse the child's process id before `stop` has
    reaped the child.
    """

    def __init__(
        self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, output: ChildOutput, reap: Reap
    ) -> None:
        self.pid = pid
        self._reader = reader
        self._writer = writer
        self._output = output
        self._reap = reap
        self._pidfd = os.pidfd_open(pid)  # a file descriptor that becomes readable when the child ends
        self._ended = asyncio.Event()
        self._stopping: asyncio.Task[int] | None = None
        self.killed = False
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    @classmethod
    async def adopt(cls, pid: int, channel: socket.socket, output: ChildOutput, reap: Reap) -> ChildProcess:
        """Make the handle of the child `pid`, which the zygote has just forked. If this raises OSError, the caller must
        kill and reap the child.
        """
        output.watch(pid)
        reader, writer = await asyncio.open_unix_connection(sock=channel)
        try:
            return cls(pid, reader, writer, output, reap)
        except BaseException:
            writer.close()
            raise

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._ended.set()

    @property
    def usable(self) -> bool:
        """Whether the child lives. This reads the state of the channel from the kernel, because the event loop learns
        of a death later. Children wait for a run as spares. If a run were sent to a dead spare, the run would count as
        crashed.
        """
        return not self.killed and not hung_up(self._writer.get_extra_info("socket"))

    async def call(
        self,
        confinement: bytes,
        run: bytes,
        *,
        timeout: float,
        limits: Limits,
        on_progress: Callable[[float, str], None],
        on_line: Callable[[frames.LogLine], None],
        on_chunk: Callable[[Any], None],
    ) -> frames.Answer:
        """Send the encoded frames Confinement and Run, and wait at most `timeout` seconds for the answer.

        Raises StepTimeout or ChildCrashed. After any error, and when the caller is cancelled, the child is killed.
        """
        try:
            async with asyncio.timeout(timeout):
                fences.limit(self.pid, limits)  # limits the memory, CPU time, file size and open files
                self._writer.write(confinement + run)
                await self._writer.drain()
                while True:
                    frame = frames.FROM_CHILD.validate_json(await self._frame())
                    if isinstance(frame, frames.Progress):
                        on_progress(frame.percent, frame.summary)
                    elif isinstance(frame, frames.LogLine):
                        on_line(frame)
                    elif isinstance(frame, frames.Emitted):
                        on_chunk(frame.chunk)
                    else:
                        self._output.read()  # the rest of the output that the handler printed before it answered
                        return frame
        except TimeoutError:
            self.kill()
            raise StepTimeout("step_timeout", f"the step ran longer than {timeout:g} s") from None
        except (OSError, EOFError):
            raise _crash(await self._status_of_end()) from None
        except (frames.FrameError, ValidationError):
            self.kill()
            raise ChildCrashed("child_crashed", "the child process sent an invalid answer") from None
        except BaseException:
            self.kill()
            raise

    async def _frame(self) -> bytes:
        header = await self._reader.readexactly(frames.LENGTH.size)
        return await self._reader.readexactly(frames.length(header))

    def peak(self) -> int:
        """The most bytes of memory that the child has held so far; 0 if the child has ended."""
        try:
            return fences.peak(self.pid)
        except (OSError, IndexError):  # the status of an ended child has no memory
            return 0

    def begin_output(self, pipeline: str, step: str) -> None:
        self._output.begin(pipeline, step)

    def kill(self) -> None:
        """Send SIGKILL to the child and its group immediately. `stop` reaps the child."""
        self.killed = True
        if not self._ended.is_set():
            kill_child(self.pid)

    async def ended(self) -> None:
        """Wait until the child has ended. An ended child holds no memory, even before it is reaped."""
        await self._ended.wait()

    async def stop(self) -> int:
        """Kill the child, reap it, and close its channel and output. If the caller is cancelled, the stop continues.

        Returns the exit status in the form of `subprocess`: a signal is a negative number.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        return await asyncio.shield(self._stopping)

    async def _stop(self) -> int:
        self.kill()
        await self._ended.wait()
        try:
            status = await self._reap(self.pid)
        except (OSError, EOFError):  # the zygote died, and its children died with it; init reaps them
            status = -signal.SIGKILL
            with contextlib.suppress(ChildProcessError):  # if this worker is init itself, it reaps the child here
                os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)  # noqa: ASYNC222 - WNOHANG: no waiting
        os.close(self._pidfd)
        self._writer.close()
        with contextlib.suppress(OSError):  # the connection was reset, so it is closed already
            await self._writer.wait_closed()
        self._output.close()
        return status

    async def _status_of_end(self) -> int:
        """Wait for the end of a child that has closed its channel. Kill the child if it does not exit soon. Returns its
        exit status.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_SECONDS):
                await self._ended.wait()
        return await self.stop()


def kill_child(pid: int) -> None:
    """Send SIGKILL to a child that is not reaped yet, and to its whole group."""
    for kill in (os.killpg, os.kill):  # a child that was forked just now may have no group of its own yet
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def hung_up(connection: socket.socket) -> bool:
    """Whether the other end is closed. The event loop would report that later than the kernel does."""
    if connection.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), 0)  # poll reports a hang-up even if no flag asks for it
    return bool(poll.poll(0))


# Count the crash of a child, and return its error. `status`: the exit status, as `stop` returns it.
def _crash(status: int) -> ChildCrashed:
    metrics.CRASHES.labels(_cause_of(status)).inc()
    if status == frames.OUT_OF_MEMORY:
        return ChildCrashed("out_of_memory", "the step needed more memory than its limit allows")
    if status == -signal.SIGXCPU:
        return ChildCrashed("cpu_limit", "the step used more CPU time than its limit allows (SIGXCPU)")
    return ChildCrashed("child_crashed", f"the step's process ended early ({describe_exit(status)})")


def _cause_of(status: int) -> str:
    """The value of the metric's label: a signal's name, `out_of_memory`, `exit` or `other`."""
    if status >= 0:
        return "out_of_memory" if status == frames.OUT_OF_MEMORY else "exit"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        return "other"
    return name if name in metrics.HOW_CHILDREN_CRASH else "other"
