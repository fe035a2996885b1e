"""One child process as its parent sees it: start, one run at a time, kill, reap."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
from pydantic import ValidationError

from leasehold.errors import ChildCrashed, DeclarationError, StepTimeout
from leasehold.pipeline import MIB, Limits
from worker import frames, metrics, sandbox
from worker.child_output import ChildOutput

#: What Python needs of the environment; everything else, secrets above all, stays with the worker.
_KEPT = (
    "PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS",
)  # fmt: skip
#: Two malloc arenas: each thread's own would reserve 64 MiB of the address space that the limit counts.
_SET = {"HOME": "/nonexistent", "MALLOC_ARENA_MAX": "2", "PYTHONFAULTHANDLER": "1"}
_WARM_UP_SECONDS = 60
_GRACE_SECONDS = 2  # for a child that closed its channel to exit by itself

_MAX_DESCRIPTOR_GROWTH = 16
_MAX_RESIDENT_GROWTH = 256 * MIB
_MAX_ADDRESS_GROWTH = 1024 * MIB  # address space that was only reserved would raise the next run's allowance


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to start a child."""

    source: str
    pipelines: Sequence[str]
    work_dir: Path

    def command(self, channel: int) -> list[str]:
        return [
            sys.executable, "-B", "-m", "worker.child",
            "--channel", str(channel), "--parent", str(os.getpid()),
            "--source", self.source, "--work-dir", str(self.work_dir), "--", *self.pipelines,
        ]  # fmt: skip


def scrubbed_environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _KEPT if name in os.environ} | _SET


class ChildProcess:
    """A warm child; `start` makes one. Not to be used for two runs at once."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        output: ChildOutput,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._output = output
        self._warm = sandbox.Usage(0, 0, 0.0)
        self._warm_descriptors = 0
        self.pid = process.pid
        self.isolation = ""
        self.runs = 0
        self.killed = False

    @classmethod
    async def start(cls, recipe: Recipe) -> ChildProcess:
        """Start a child and wait until its handlers are loaded and its fences are up.

        Raises DeclarationError with the child's reason, or because it died while loading.
        """
        child = await cls._spawn(recipe)
        try:
            await child.greet()
        except BaseException:
            await child.stop()
            raise
        return child

    @classmethod
    async def _spawn(cls, recipe: Recipe) -> ChildProcess:
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo, theirs:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            undo.callback(writer.close)
            output = ChildOutput()
            undo.callback(output.close)
            process = await asyncio.create_subprocess_exec(
                *recipe.command(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.write_end,
                stderr=output.write_end,
                env=scrubbed_environment(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
            undo.pop_all()
        output.watch(process.pid)
        return cls(process, reader, writer, output)

    async def greet(self) -> None:
        """Wait for the child's first frame. Raises DeclarationError."""
        try:
            async with asyncio.timeout(_WARM_UP_SECONDS):
                greeting = frames.GREETING.validate_json(await self._frame())
        except TimeoutError:
            raise DeclarationError(f"a child was not ready after {_WARM_UP_SECONDS} s") from None
        except (OSError, EOFError, frames.FrameError, ValidationError) as error:
            status = await self._died()
            raise DeclarationError(f"a child died while loading the handlers ({_fate(status)})") from error
        if isinstance(greeting, frames.Refused):
            structlog.get_logger().error("child refused to start", traceback=greeting.traceback)
            raise DeclarationError(greeting.reason)
        self.isolation = greeting.isolation
        self._warm = sandbox.usage(self.pid)
        self._warm_descriptors = sandbox.descriptors(self.pid)

    @property
    def usable(self) -> bool:
        return not self.killed and self._process.returncode is None and not self._has_hung_up()

    def _has_hung_up(self) -> bool:
        """As the kernel knows it, which is before the event loop hears of it: a run given to a child that died while it
        was idle would count as crashed.
        """
        descriptor = self._writer.get_extra_info("socket").fileno()
        if descriptor < 0:
            return True
        poll = select.poll()
        poll.register(descriptor, 0)  # a hang-up is told without being asked for
        return bool(poll.poll(0))

    async def call(
        self, run: bytes, *, timeout: float, limits: Limits, on_progress: Callable[[float, str], None]
    ) -> frames.Answer:
        """Send the encoded `run` and wait at most `timeout` seconds for the answer.

        Raises StepTimeout or ChildCrashed; then, as when it is cancelled, the child has been killed.
        """
        self.runs += 1
        try:
            async with asyncio.timeout(timeout):
                sandbox.limit(self.pid, limits)
                sandbox.begin_peak(self.pid)
                self._writer.write(run)
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

    def is_worn(self) -> bool:
        """Whether it has grown so far beyond its warm size that a fresh one is better."""
        try:
            now = sandbox.usage(self.pid)
            descriptors = sandbox.descriptors(self.pid)
        except OSError:
            return True
        return (
            now.resident > self._warm.resident + _MAX_RESIDENT_GROWTH
            or now.address_space > self._warm.address_space + _MAX_ADDRESS_GROWTH
            or descriptors > self._warm_descriptors + _MAX_DESCRIPTOR_GROWTH
        )

    def peak(self) -> int:
        """The most bytes that it held in its last run; 0 when it has gone meanwhile."""
        try:
            return sandbox.peak(self.pid)
        except (OSError, IndexError):  # a zombie has a status without memory
            return 0

    def begin_output(self, pipeline: str, step: str) -> None:
        self._output.begin(pipeline, step)

    def kill(self) -> None:
        """SIGKILL to the whole group, at once; `exited` tells when it is reaped."""
        self.killed = True
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def exited(self) -> int:
        """Wait until the process has ended and is reaped; its status as subprocess gives it."""
        return await self._process.wait()

    async def stop(self) -> None:
        """Kill, reap, and close what belonged to it; done in full even when the caller is cancelled meanwhile."""
        burial = asyncio.create_task(self._bury())
        try:
            await asyncio.shield(burial)
        except asyncio.CancelledError:
            await burial
            raise

    async def _bury(self) -> None:
        self.kill()
        await self.exited()
        self._writer.close()
        with contextlib.suppress(OSError):  # a reset by the dead end is as good as a close
            await self._writer.wait_closed()
        self._output.close()

    async def _died(self) -> int:
        """Its status, once it is known to have hung up."""
        try:
            async with asyncio.timeout(_GRACE_SECONDS):
                return await self.exited()
        except TimeoutError:
            self.kill()
            return await self.exited()
        finally:
            self.kill()


def _crash(status: int) -> ChildCrashed:
    metrics.CRASHES.labels(_how(status)).inc()
    if status == frames.OUT_OF_MEMORY:
        return ChildCrashed("out_of_memory", "the step needed more memory than its limit allows")
    if status == -signal.SIGXCPU:
        return ChildCrashed("cpu_limit", "the step used more CPU time than its limit allows (SIGXCPU)")
    return ChildCrashed("child_crashed", f"the step's process ended early ({_fate(status)})")


def _how(status: int) -> str:
    """One of a few words: a signal's name, `out_of_memory`, `exit`."""
    if status >= 0:
        return "out_of_memory" if status == frames.OUT_OF_MEMORY else "exit"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return "unknown"


def _fate(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
