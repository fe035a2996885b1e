"""One child process as its worker sees it: one run, kill, reap."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
from collections.abc import Awaitable, Callable

from pydantic import ValidationError

from leasehold.domain.errors import ChildCrashed, StepTimeout
from leasehold.domain.pipeline import Limits
from leasehold.worker import metrics
from leasehold.worker.sandbox import fences as sandbox
from leasehold.worker.sandbox import frames
from leasehold.worker.sandbox.child_output import ChildOutput

_GRACE_SECONDS = 2  # for a child that closed its channel to exit by itself

#: Asks a zygote for the status of one of its children that has ended. Raises OSError or EOFError.
Reap = Callable[[int], Awaitable[int]]


class ChildProcess:
    """A child that a zygote forked, good for one run. Its process id is its own until `stop` has reaped it."""

    def __init__(
        self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, output: ChildOutput, reap: Reap
    ) -> None:
        self.pid = pid
        self._reader = reader
        self._writer = writer
        self._output = output
        self._reap = reap
        self._handle = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        self._burial: asyncio.Task[int] | None = None
        self.killed = False
        asyncio.get_running_loop().add_reader(self._handle, self._has_ended)

    @classmethod
    async def meet(cls, pid: int, channel: socket.socket, output: ChildOutput, reap: Reap) -> ChildProcess:
        """Take over what belongs to the child `pid`, which has just been forked."""
        output.watch(pid)
        reader, writer = await asyncio.open_unix_connection(sock=channel)
        return cls(pid, reader, writer, output, reap)

    def _has_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        self._ended.set()

    @property
    def usable(self) -> bool:
        """As the kernel knows it: a run given to a child that died while it was idle would count as crashed."""
        return not self.killed and not hung_up(self._writer.get_extra_info("socket"))

    async def call(
        self,
        place: bytes,
        run: bytes,
        *,
        timeout: float,
        limits: Limits,
        on_progress: Callable[[float, str], None],
    ) -> frames.Answer:
        """Send the encoded `place` and `run` and wait at most `timeout` seconds for the answer.

        Raises StepTimeout or ChildCrashed; then, as when it is cancelled, the child has been killed.
        """
        try:
            async with asyncio.timeout(timeout):
                sandbox.limit(self.pid, limits)
                self._writer.write(place + run)
                await self._writer.drain()
                while isinstance(said := frames.SAID.validate_json(await self._frame()), frames.Progress):
                    on_progress(said.percent, said.summary)
                return said
        except TimeoutError:
            self.kill()
            raise StepTimeout("step_timeout", f"the step ran longer than {timeout:g} s") from None
        except (OSError, EOFError):
            raise _crash(await self._died()) from None
        except (frames.FrameError, ValidationError):
            self.kill()
            raise ChildCrashed("child_crashed", "the child process answered with nonsense") from None
        except BaseException:
            self.kill()
            raise

    async def _frame(self) -> bytes:
        header = await self._reader.readexactly(frames.LENGTH.size)
        return await self._reader.readexactly(frames.length(header))

    def peak(self) -> int:
        """The most bytes that it has held; 0 when it has gone meanwhile."""
        try:
            return sandbox.peak(self.pid)
        except (OSError, IndexError):  # a zombie has a status without memory
            return 0

    def begin_output(self, pipeline: str, step: str) -> None:
        self._output.begin(pipeline, step)

    def kill(self) -> None:
        """SIGKILL to the whole group, at once; `stop` reaps it."""
        self.killed = True
        if not self._ended.is_set():
            for end in (os.killpg, os.kill):  # it may not have made its group yet
                with contextlib.suppress(ProcessLookupError):
                    end(self.pid, signal.SIGKILL)

    async def gone(self) -> None:
        """Wait until it has ended: it holds no memory any more, whoever reaps it."""
        await self._ended.wait()

    async def stop(self) -> int:
        """Kill, reap, and close what belonged to it; done in full even when the caller is cancelled meanwhile.

        Answers its status, as subprocess gives it.
        """
        if self._burial is None:
            self._burial = asyncio.create_task(self._bury())
        return await asyncio.shield(self._burial)

    async def _bury(self) -> int:
        self.kill()
        await self._ended.wait()
        try:
            status = await self._reap(self.pid)
        except (OSError, EOFError):  # the zygote died, and its children with it: the system reaps them
            status = -signal.SIGKILL
            with contextlib.suppress(ChildProcessError):  # which we are, where nothing but us is above
                os.waitid(os.P_PIDFD, self._handle, os.WEXITED | os.WNOHANG)  # noqa: ASYNC222 - it does not wait
        os.close(self._handle)
        self._writer.close()
        with contextlib.suppress(OSError):  # a reset by the dead end is as good as a close
            await self._writer.wait_closed()
        self._output.close()
        return status

    async def _died(self) -> int:
        """Its status, once it is known to have hung up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_SECONDS):
                await self._ended.wait()
        return await self.stop()


def hung_up(connection: socket.socket) -> bool:
    """Whether the other end is closed, which the kernel knows before the event loop hears of it."""
    if connection.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), 0)  # a hang-up is told without being asked for
    return bool(poll.poll(0))


def _crash(status: int) -> ChildCrashed:
    metrics.CRASHES.labels(_how(status)).inc()
    if status == frames.OUT_OF_MEMORY:
        return ChildCrashed("out_of_memory", "the step needed more memory than its limit allows")
    if status == -signal.SIGXCPU:
        return ChildCrashed("cpu_limit", "the step used more CPU time than its limit allows (SIGXCPU)")
    return ChildCrashed("child_crashed", f"the step's process ended early ({fate(status)})")


def _how(status: int) -> str:
    """One of a few words: a signal's name, `out_of_memory`, `exit`."""
    if status >= 0:
        return "out_of_memory" if status == frames.OUT_OF_MEMORY else "exit"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return "unknown"


def fate(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
