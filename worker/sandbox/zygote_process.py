"""`Zygote`: the worker's handle for a zygote. The worker starts a zygote, lets it fork and reap children, and stops it.

A zygote is a process that has loaded a pipeline's handlers. Each child that it forks runs one isolated step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import structlog
from pydantic import ValidationError

from leasehold.domain.errors import DeclarationError
from leasehold.runtime.exits import describe_exit
from leasehold.runtime.import_path import import_path
from leasehold.worker.sandbox import frames
from leasehold.worker.sandbox.child_output import ChildOutput
from leasehold.worker.sandbox.child_process import ChildProcess, hung_up, kill_child

#: The environment variables that a zygote inherits, because Python needs them. A zygote inherits no other variables,
#: because these may be secrets.
_PASSED_ON = (
    "PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS",
)  # fmt: skip
#: Defaults, which the worker's environment overrides. With them a child uses one core, and the zygote starts no threads
#: before it forks.
_DEFAULTS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
#: Settings of malloc (GLIBC_TUNABLES). With the thresholds, glibc keeps large blocks that a step frees, for the step's
#: next allocation. `hugetlb` asks for huge pages. The kernel provides a page only when a new child first touches it, so
#: fewer and larger pages save time. With small pages this took a tenth of the time of a step of the media pipeline.
_MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=268435456"
#: MALLOC_ARENA_MAX: without it, malloc would have an arena for each thread, and each arena would reserve 64 MiB of the
#: limited address space. ORT_DISABLE_TELEMETRY: without it, the ONNX runtime would start a thread for its telemetry.
_FIXED_VARIABLES = {
    "HOME": "/nonexistent",
    "MALLOC_ARENA_MAX": "2",
    "GLIBC_TUNABLES": _MALLOC,
    "PYTHONFAULTHANDLER": "1",
    "ORT_DISABLE_TELEMETRY": "1",
}
#: A zygote must load the handlers within this many seconds.
_WARM_UP_SECONDS = 60
#: The worker kills and replaces a zygote that does not answer for this many seconds, for example on a machine that has
#: too little memory and swaps all the time.
_ANSWER_SECONDS = 60.0
#: A zygote's first frame has at most this many bytes.
_GREETING_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to start a zygote. `source`: `module:callable` that returns the registry of pipelines. `pipeline`: the
    pipeline whose handlers the zygote loads. `work_dir`: the folder for the files of attempts. `modules`: modules to
    import before the registry is made.
    """

    source: str
    pipeline: str
    work_dir: Path
    modules: tuple[str, ...] = ()

    def command(self, control_fd: int) -> list[str]:
        return [
            sys.executable, "-B", "-P", "-m", "leasehold.worker.sandbox.zygote",
            "--control", str(control_fd), "--parent", str(os.getpid()),
            "--source", self.source, "--work-dir", str(self.work_dir),
            *(f"--module={module}" for module in self.modules),
            *(f"--import-path={entry}" for entry in import_path()), "--", self.pipeline,
        ]  # fmt: skip


def scrubbed_environment() -> dict[str, str]:
    return _DEFAULTS | {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | _FIXED_VARIABLES


class Zygote:
    """A zygote, made by `start`. Several asyncio tasks may call its methods at once."""

    def __init__(
        self, process: asyncio.subprocess.Process, control: socket.socket, output: ChildOutput, greeting: frames.Ready
    ) -> None:
        self._process = process
        self._control = control
        self._output = output
        self._asking = asyncio.Lock()  # held from a request to its answer
        self._discarding: set[asyncio.Task[None]] = set()  # forks whose callers were cancelled (see `_discard`)
        self.pid = process.pid
        self.isolation = greeting.isolation  # the mechanisms that confine the children, as text for people

    @classmethod
    async def start(cls, recipe: Recipe) -> Zygote:
        """Start a zygote, and wait until it has confined itself (the kernel then keeps it from files and the network)
        and loaded the handlers.

        Raises DeclarationError if the zygote refuses to start, dies, or takes too long.
        """
        worker_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as undo, child_end:
            undo.enter_context(worker_end)
            worker_end.setblocking(False)
            output = ChildOutput()
            undo.callback(output.close)
            process = await asyncio.create_subprocess_exec(
                *recipe.command(child_end.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.write_end,
                stderr=output.write_end,
                env=scrubbed_environment(),
                pass_fds=(child_end.fileno(),),
                start_new_session=True,
            )
            undo.pop_all()
        output.watch(process.pid)
        try:
            return cls(process, worker_end, output, await _greeting(process, worker_end, recipe))
        except BaseException:
            await asyncio.shield(_kill_and_reap(process, worker_end, output))
            raise

    @property
    def alive(self) -> bool:
        """Whether the zygote lives. When a zygote dies, the kernel closes the zygote's control socket before it kills
        the children. So this property checks the socket, and `Spares.take` (which hands out waiting children) returns
        no child that is about to die.
        """
        return not hung_up(self._control)

    async def fork(self) -> ChildProcess:
        """Fork a child. Raises OSError or EOFError if the zygote has died or the system has no room for a process."""
        forking = asyncio.create_task(self._fork())
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            discarding = asyncio.create_task(_discard(forking))
            self._discarding.add(discarding)
            discarding.add_done_callback(self._discarding.discard)
            await asyncio.shield(discarding)  # after a second cancel this returns immediately, and `discarding` goes on
            raise

    async def _fork(self) -> ChildProcess:
        # The zygote gets the child's ends of a socket (to talk with the worker) and of a pipe (for the child's output).
        worker_end, child_end = socket.socketpair()
        with contextlib.ExitStack() as undo, child_end:
            undo.enter_context(worker_end)
            output = ChildOutput()
            undo.callback(output.close)
            pid = await self._ask(frames.FORK, [child_end.fileno(), output.write_end])
            if pid < 0:  # a negative answer is the error number of the failed fork
                raise OSError(-pid, os.strerror(-pid))
            try:
                child = await ChildProcess.adopt(pid, worker_end, output, self.reap)
            except BaseException:
                await self._end_child(pid)
                raise
            undo.pop_all()
        return child

    async def _end_child(self, pid: int) -> None:
        """Kill and reap a child that could not be adopted."""
        kill_child(pid)
        with contextlib.suppress(OSError, EOFError):  # the zygote died, and its children with it
            await self.reap(pid)

    async def reap(self, pid: int) -> int:
        """Reap an ended child. Returns its exit status in the form of `subprocess`. Raises OSError or EOFError."""
        return await self._ask(pid, [])

    async def _ask(self, number: int, descriptors: list[int]) -> int:
        """Send a request and return the zygote's answer. `number`: FORK, or the process id of the child to reap. Raises
        OSError or EOFError.

        The zygote answers in the order of the requests. If it is too slow, or if the caller is cancelled, this method
        kills the zygote. Otherwise the next request would get the answer to this request.
        """
        async with self._asking:
            socket.send_fds(self._control, [frames.NUMBER.pack(number)], descriptors)
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    answer = await asyncio.get_running_loop().sock_recv(self._control, frames.NUMBER.size)
            except TimeoutError:
                self._give_up()
                raise EOFError("the zygote does not answer") from None
            except asyncio.CancelledError:
                self._give_up()
                raise
        if not answer:
            raise EOFError("the zygote has ended")
        return int(frames.NUMBER.unpack(answer)[0])

    def _give_up(self) -> None:
        """Kill the zygote, and let every later request fail. The killed zygote may live a moment longer, and a later
        request could otherwise get the late answer to an earlier request.
        """
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._end_requests()

    def _end_requests(self) -> None:
        """Shut the channel down. A request that waits then gets no answer, and later requests cannot be sent."""
        with contextlib.suppress(OSError):  # the zygote has ended
            self._control.shutdown(socket.SHUT_RDWR)

    async def exited(self) -> None:
        await self._process.wait()

    async def stop(self) -> None:
        """Kill the zygote and reap it. Its children die with it."""
        self._end_requests()
        async with self._asking:
            await asyncio.shield(_kill_and_reap(self._process, self._control, self._output))


async def _discard(forking: asyncio.Task[ChildProcess]) -> None:
    """End the child of a fork whose caller was cancelled."""
    with contextlib.suppress(OSError, EOFError):  # the fork failed, or the zygote died with its children
        await (await forking).stop()


async def _greeting(process: asyncio.subprocess.Process, control: socket.socket, recipe: Recipe) -> frames.Ready:
    """Wait for the zygote's first frame. Raises DeclarationError, as `Zygote.start` does."""
    try:
        async with asyncio.timeout(_WARM_UP_SECONDS):
            body = await asyncio.get_running_loop().sock_recv(control, _GREETING_BYTES)
        greeting = frames.GREETING.validate_json(body)
    except TimeoutError:
        raise DeclarationError(f"the handlers were not loaded within {_WARM_UP_SECONDS} s") from None
    except (OSError, ValidationError) as error:
        with contextlib.suppress(ProcessLookupError):
            await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=2)
            process.kill()
        raise DeclarationError(
            f"the process that loads the handlers died ({describe_exit(await process.wait())})"
        ) from error
    log = structlog.get_logger()
    if isinstance(greeting, frames.Refused):
        log.error("the handlers cannot be loaded", pipeline=recipe.pipeline, traceback=greeting.traceback)
        raise DeclarationError(greeting.reason)
    if greeting.threads > 1:
        log.warning(
            "handlers started threads while they were loaded; a fork does not copy threads, so no run has them",
            pipeline=recipe.pipeline,
            threads=greeting.threads - 1,
        )
    return greeting


async def _kill_and_reap(process: asyncio.subprocess.Process, control: socket.socket, output: ChildOutput) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    control.close()
    output.close()
