"""Isolated steps, each run in a process of its own, which is forked for it and ends with it.

No two runs share a process, for their inputs may be two tenants', and whoever writes a picture may write what takes its
decoder over. A zygote a pipeline (worker/sandbox/zygote.py) has the handlers loaded, so that a fresh process costs
milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import structlog

from leasehold.domain.errors import Cancelled, Permanent, Retryable, Unforeseen
from leasehold.domain.pipeline import Limits
from leasehold.domain.verdicts import Done
from leasehold.worker import metrics
from leasehold.worker.sandbox import fences as sandbox
from leasehold.worker.sandbox import frames
from leasehold.worker.sandbox.child_process import ChildProcess
from leasehold.worker.sandbox.outputs import checked
from leasehold.worker.sandbox.spares import Spares
from leasehold.worker.sandbox.zygote_process import Recipe


class Children:
    """At most `size` runs at once of steps of `pipelines`.

    `source` is "module:callable" and answers the Pipelines registry. Inputs and directories of runs lie
    beneath `work_dir`; each child reads and writes its own run's and no others.
    """

    def __init__(
        self, size: int, *, pipelines: Sequence[str], work_dir: Path, source: str = "leasehold.pipelines:shipped"
    ) -> None:
        self._size = size
        self._work_dir = work_dir.absolute()
        self._spares = {name: Spares(Recipe(source, name, self._work_dir)) for name in pipelines}
        self._slots = asyncio.Semaphore(size)
        self._running: set[ChildProcess] = set()
        self._burials: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger()
        #: How children are fenced in: "seccomp+landlock", "seccomp", "netns..." or "limits only...".
        self.isolation = "not started"

    @property
    def pids(self) -> frozenset[int]:
        """The process ids of all that is up: zygotes, children that wait, children that run."""
        return frozenset(child.pid for child in self._running).union(*(one.pids for one in self._spares.values()))

    @property
    def idle(self) -> int:
        """Runs that would begin at once."""
        return self._size - len(self._running)

    async def start(self) -> None:
        """Start all zygotes in parallel and wait until they are warm.

        Raises DeclarationError when a module or a handler is missing.
        """
        self._work_dir.mkdir(parents=True, exist_ok=True)
        try:
            await asyncio.gather(*(one.start() for one in self._spares.values()))
        except BaseException:
            await self.close()
            raise
        self.isolation = min((one.isolation for one in self._spares.values()), key=len, default="no children")
        if "landlock" not in self.isolation:
            sandbox.hide_memory()  # nothing else keeps a child of our own user out of /proc/{our pid}/environ

    async def close(self) -> None:
        """Kill all children and reap them. Settle the runs first: one under way fails as crashed."""
        for child in self._running:
            child.kill()
        await asyncio.gather(*(child.stop() for child in self._running), *self._burials, return_exceptions=True)
        await asyncio.gather(*(one.close() for one in self._spares.values()))

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
        """Run one step in a fresh child, as soon as there is room. `timeout`: seconds from when it starts there.

        A file `cancel` beside `directory` asks the handler to stop at its next checkpoint.
        Raises what the handler raised (Permanent, Retryable, Cancelled), StepTimeout, or ChildCrashed; any other
        exception of the handler becomes Unforeseen, and an answer that cannot be used
        Permanent("bad_output"). When the caller is cancelled the child is killed at once.
        """
        place, request = _requests(pipeline, step, params, files, directory, item)
        await self._slots.acquire()
        try:
            child = await self._spares[pipeline].take()
        except BaseException:
            self._slots.release()
            raise
        self._running.add(child)
        try:
            child.begin_output(pipeline, step)
            answer = await child.call(place, request, timeout=timeout, limits=limits, on_progress=on_progress)
            metrics.CHILD_PEAK.labels(pipeline, step).observe(child.peak())
        finally:
            self._end(child)
        return self._done(child, answer, directory)

    def _end(self, child: ChildProcess) -> None:
        """Kill it now; its slot is free when its memory is."""
        child.kill()
        self._running.discard(child)
        burial = asyncio.create_task(self._bury(child))
        self._burials.add(burial)
        burial.add_done_callback(self._burials.discard)

    async def _bury(self, child: ChildProcess) -> None:
        try:
            await child.gone()
        finally:
            self._slots.release()
            await child.stop()

    def _done(self, child: ChildProcess, answer: frames.Answer, directory: Path) -> Done:
        if isinstance(answer, frames.Finished):
            return checked(answer, directory.absolute())
        if answer.traceback:
            self._log.error("handler raised", child=child.pid, code=answer.code, traceback=answer.traceback)
        if answer.error == "cancelled":
            raise Cancelled
        if answer.error == "permanent":
            raise Permanent(answer.code, answer.message)
        if answer.error == "unforeseen":
            raise Unforeseen(answer.message)
        after = None if answer.after is None else timedelta(seconds=answer.after)
        raise Retryable(answer.message, code=answer.code, after=after)


def _requests(
    pipeline: str, step: str, params: dict[str, Any], files: Mapping[str, Path], directory: Path, item: Any
) -> tuple[bytes, bytes]:
    paths = {name: str(path.absolute()) for name, path in files.items()}
    own = str(directory.absolute())
    run = frames.Run(pipeline=pipeline, step=step, params=params, files=paths, directory=own, item=item)
    try:
        return frames.encode(frames.Place(files=list(paths.values()), directory=own)), frames.encode(run)
    except frames.FrameError as error:
        raise Permanent("bad_params", f"the parameters cannot be handed over: {error}") from error
