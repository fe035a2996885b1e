"""The warm pool: child processes with loaded handlers, each running one isolated step at a time.

Every slot of the pool has a keeper task, which starts a child, offers it, waits until it has ended and is
reaped, and starts the next. So replacing a child is nothing but killing it, and warming up overlaps with
other work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import structlog

from leasehold.errors import Cancelled, DeclarationError, LeaseholdError, Permanent, Retryable
from leasehold.pipeline import Limits
from leasehold.verdicts import Done
from worker import frames, metrics, sandbox
from worker.child_process import ChildProcess, Recipe
from worker.outputs import checked

#: A child is replaced after this many runs, so that what leaks, or has crept in, does not stay.
MAX_RUNS = 200
_FIRST_DELAY, _LAST_DELAY = 0.5, 30.0  # seconds between failing attempts to start a child


class Children:
    """`size` child processes that hold the handlers of `pipelines`.

    `source` is "module:callable" and answers the Pipelines registry. Inputs and directories of runs lie
    beneath `work_dir`: children may read and write there and nowhere else.
    """

    def __init__(
        self,
        size: int,
        *,
        pipelines: Sequence[str],
        work_dir: Path,
        source: str = "pipelines:shipped",
        max_runs: int = MAX_RUNS,
    ) -> None:
        self._size = size
        self._recipe = Recipe(source, tuple(pipelines), work_dir.absolute())
        self._max_runs = max_runs
        # the last that ran comes first: its caches and its memory are warm
        self._free: asyncio.LifoQueue[ChildProcess] = asyncio.LifoQueue()
        self._keepers: list[asyncio.Task[None]] = []
        self._alive: set[ChildProcess] = set()
        self._log = structlog.get_logger()
        #: How children are fenced in: "seccomp+landlock", "seccomp", "netns..." or "limits only...".
        self.isolation = "not started"

    @property
    def pids(self) -> frozenset[int]:
        """The process ids of the children that are up."""
        return frozenset(child.pid for child in self._alive)

    @property
    def idle(self) -> int:
        """Children that would begin a run at once."""
        return self._free.qsize()

    async def start(self) -> None:
        """Start all children in parallel and wait until they are warm.

        Raises DeclarationError when a module or a handler is missing.
        """
        self._recipe.work_dir.mkdir(parents=True, exist_ok=True)
        loop = asyncio.get_running_loop()
        warm: list[asyncio.Future[ChildProcess]] = [loop.create_future() for _ in range(self._size)]
        self._keepers = [asyncio.create_task(self._keep(first)) for first in warm]
        try:
            children = await asyncio.gather(*warm)
        except BaseException:
            await self.close()
            raise
        self.isolation = min((child.isolation for child in children), key=len, default="no children")
        if "landlock" not in self.isolation:
            sandbox.hide_memory()  # nothing else keeps a child of our own user out of /proc/{our pid}/environ

    async def close(self) -> None:
        """Kill all children and reap them. Settle the runs first: one under way fails as crashed."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers = []

    async def run(
        self,
        *,
        pipeline: str,
        step: str,
        params: dict[str, Any],
        files: Mapping[str, Path],
        directory: Path,
        timeout: float,
        limits: Limits,
        item: Any = None,
        on_progress: Callable[[float, str], None] = lambda _percent, _summary: None,
    ) -> Done:
        """Run one step in the next free child. `timeout`: seconds from when it starts there.

        A file `cancel` beside `directory` asks the handler to stop at its next checkpoint.
        Raises what the handler raised (Permanent, Retryable, Cancelled), StepTimeout, or ChildCrashed; any other
        exception of the handler becomes Retryable("handler_error"), and an answer that cannot be used
        Permanent("bad_output"). When the caller is cancelled the child is killed at once.
        """
        request = self._request(pipeline, step, params, files, directory, item)
        child = await self._take()
        try:
            child.begin_output(pipeline, step)
            answer = await child.call(request, timeout=timeout, limits=limits, on_progress=on_progress)
            metrics.CHILD_PEAK.labels(pipeline, step).observe(child.peak())
            return self._done(child, answer, directory)
        finally:
            self._put_back(child)

    @staticmethod
    def _request(
        pipeline: str, step: str, params: dict[str, Any], files: Mapping[str, Path], directory: Path, item: Any
    ) -> bytes:
        paths = {name: str(path.absolute()) for name, path in files.items()}
        run = frames.Run(
            pipeline=pipeline, step=step, params=params, files=paths, directory=str(directory.absolute()), item=item
        )
        try:
            return frames.encode(run)
        except frames.FrameError as error:
            raise Permanent("bad_params", f"the parameters cannot be handed over: {error}") from error

    def _done(self, child: ChildProcess, answer: frames.Answer, directory: Path) -> Done:
        if isinstance(answer, frames.Finished):
            try:
                return checked(answer, directory.absolute())
            except Permanent:
                child.kill()  # it may no longer be ours
                raise
        if answer.traceback:
            self._log.warning("handler raised", child=child.pid, code=answer.code, traceback=answer.traceback)
        if answer.error == "cancelled":
            raise Cancelled
        if answer.error == "permanent":
            raise Permanent(answer.code, answer.message)
        after = None if answer.after is None else timedelta(seconds=answer.after)
        raise Retryable(answer.message, code=answer.code, after=after)

    async def _take(self) -> ChildProcess:
        while True:
            child = await self._free.get()
            if child.usable:
                return child
            child.kill()  # it died while it was idle: its keeper is on it

    def _put_back(self, child: ChildProcess) -> None:
        if child.usable and child.runs < self._max_runs and not child.is_worn():
            self._free.put_nowait(child)
        else:
            child.kill()

    async def _keep(self, first: asyncio.Future[ChildProcess]) -> None:
        """One slot of the pool, for as long as the pool is open."""
        delay = _FIRST_DELAY
        while True:
            try:
                child = await ChildProcess.start(self._recipe)
            except (LeaseholdError, OSError) as error:
                if not first.done():
                    first.set_exception(self._as_declaration(error))
                    return
                self._log.error("no replacement child", reason=str(error), retry_seconds=delay)
                await asyncio.sleep(delay)
                delay = min(2 * delay, _LAST_DELAY)
                continue
            delay = _FIRST_DELAY
            if not first.done():
                first.set_result(child)
            await self._offer(child)

    async def _offer(self, child: ChildProcess) -> None:
        """Have it in the pool until it has ended."""
        self._alive.add(child)
        self._free.put_nowait(child)
        try:
            await child.exited()
        finally:
            self._alive.discard(child)
            await child.stop()

    @staticmethod
    def _as_declaration(error: LeaseholdError | OSError) -> DeclarationError:
        if isinstance(error, DeclarationError):
            return error
        return DeclarationError(f"no child process could be started: {error}")
