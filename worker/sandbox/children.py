"""Runs isolated steps, each run in a child process of its own. The isolated attempts call `Children.run`.

No two runs share a process, because their inputs may belong to two tenants, and a hostile picture may take control of
its decoder. Each pipeline has a zygote: a process that has the handlers loaded and only forks (zygote.py). So a new
child costs milliseconds. A few spare children are forked before a run needs them (spares.py).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import structlog

from leasehold.domain.errors import Cancelled, Permanent, Retryable, StepError, Unforeseen
from leasehold.domain.pipeline import Limits
from leasehold.domain.result_limits import ResultLimits
from leasehold.domain.verdicts import Done
from leasehold.runtime.gather import gather_or_cancel
from leasehold.settings import Settings
from leasehold.telemetry import child_logs
from leasehold.telemetry.attempt_logs import current
from leasehold.worker import metrics
from leasehold.worker.sandbox import fences, frames
from leasehold.worker.sandbox.child_process import ChildProcess
from leasehold.worker.sandbox.outputs import checked
from leasehold.worker.sandbox.spares import Spares
from leasehold.worker.sandbox.zygote_process import Recipe

#: The most seconds that a run waits for a child: for its slot, and for the zygote to fork the child.
_CHILD_SECONDS = 60.0
#: The limit that holds instead if the last try to make a child for the pipeline has failed. It is shorter, because
#: another worker should get the task soon.
_CHILD_SECONDS_WHILE_FAILING = 5.0


class NoChild(Exception):
    """A run got no child in time, because the zygote has not finished loading the handlers, or because other runs
    occupy all slots. The handler of this run has not begun.
    """


class NoneForked(NoChild):
    """A run had a slot, but got no child in time, because its zygote does not start again, or cannot fork."""


class Children:
    """Runs steps of `pipelines`, at most `size` at once.

    `source`: "module:callable" that returns the registry of pipelines. `modules`: the modules that declare tasks of an
    app that `source` names; they are imported before the registry is made. The inputs and directories of all runs lie
    beneath `work_dir`. Each child can reach only the inputs and the directory of its own run. `result_limits`: the
    limits for results of an app's tasks; None: the defaults of the settings.
    """

    def __init__(
        self,
        size: int,
        *,
        pipelines: Sequence[str],
        work_dir: Path,
        source: str = "leasehold.pipelines:shipped",
        modules: Sequence[str] = (),
        result_limits: ResultLimits | None = None,
    ) -> None:
        self._size = size
        self._work_dir = work_dir.absolute()
        self._result_limits = result_limits
        # The name of a pipeline -> its zygote and its spare children.
        self._spares = {name: Spares(Recipe(source, name, self._work_dir, tuple(modules))) for name in pipelines}
        self._slots = asyncio.Semaphore(size)
        self._running: set[ChildProcess] = set()
        self._ending: set[asyncio.Task[None]] = set()  # each waits until a killed child has ended
        self._log = structlog.get_logger()
        #: The fences that all children have (mechanisms of the kernel): "seccomp+landlock", "seccomp", "netns..." or
        #: "limits only...".
        self.isolation = "not started"

    @property
    def pipelines(self) -> Collection[str]:
        """The pipelines whose steps these children run; none after `close`."""
        return self._spares.keys()

    @property
    def pids(self) -> frozenset[int]:
        """The process ids of the zygotes, the spare children, and the children with a run."""
        return frozenset(child.pid for child in self._running).union(*(spares.pids for spares in self._spares.values()))

    @property
    def free_slots(self) -> int:
        """How many more runs have room. A killed child does not count, although the next run in its slot waits until
        the killed child has ended.
        """
        return self._size - len(self._running)

    def failing(self, pipeline: str) -> bool:
        """Whether the last try to make a child for the pipeline has failed. The zygotes go on trying by themselves."""
        return pipeline in self._spares and self._spares[pipeline].failing

    async def start(self) -> None:
        """Start all zygotes, and wait until they have loaded their handlers.

        If there are n cores, n - 1 zygotes (at least one) start at the same time. The remaining core is left to the
        worker, which begins to serve meanwhile.

        Raises DeclarationError when a module or a handler is missing.
        """
        for pipeline in self._spares:
            metrics.NONE_FORKED.labels(pipeline)  # otherwise PromQL's `increase()` would not count the first event
        self._work_dir.mkdir(parents=True, exist_ok=True)
        free_cores = asyncio.Semaphore(max(1, len(os.sched_getaffinity(0)) - 1))
        try:
            await gather_or_cancel(self._start(spares, free_cores) for spares in self._spares.values())
        except BaseException:
            await self.close()
            raise
        isolations = {spares.isolation for spares in self._spares.values()}
        self.isolation = fences.common(isolations) if isolations else "no children"
        # A child has the same user as the worker. Without Landlock it could read the worker's environment in /proc.
        if "landlock" not in self.isolation:
            fences.hide_memory()

    @staticmethod
    async def _start(spares: Spares, free_cores: asyncio.Semaphore) -> None:
        async with free_cores:
            await spares.start()

    async def close(self) -> None:
        """Kill all children and reap them. Call this after all attempts have ended, because a run that is killed here
        counts as crashed.
        """
        for child in self._running:
            child.kill()
        await asyncio.gather(*(child.stop() for child in self._running), *self._ending, return_exceptions=True)
        closed, self._spares = self._spares, {}
        await asyncio.gather(*(spares.close() for spares in closed.values()))

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
        """Run one step in a new child, as soon as there is room. `timeout`: seconds from the start of the run in the
        child. Raises NoChild if the run gets no child in time (`_CHILD_SECONDS`).

        If a file `cancel` appears in the parent of `directory`, the handler stops at its next checkpoint. When the
        caller is cancelled, the child is killed immediately.

        Raises what the handler raised (Permanent, Retryable, Cancelled), StepTimeout, or ChildCrashed. Any other
        exception of the handler becomes Unforeseen. An answer with a name, path, type or value that is not allowed
        becomes Permanent("bad_output"). An answer that breaks the protocol becomes ChildCrashed.
        """
        confinement, request = self._requests(pipeline, step, params, files, directory, item)
        child = await self._take_child(pipeline)
        self._running.add(child)
        try:
            child.begin_output(pipeline, step)
            answer = await child.call(
                confinement,
                request,
                timeout=timeout,
                limits=limits,
                on_progress=on_progress,
                on_line=_Lines(child.pid),
                on_chunk=_emit_to_stream,
            )
            metrics.CHILD_PEAK.labels(pipeline, step).observe(child.peak())
        finally:
            self._end(child)
        return self._verdict_of(child, answer, directory)

    async def _take_child(self, pipeline: str) -> ChildProcess:
        """A child, in a slot that the caller must release. Raises NoChild."""
        has_slot = False
        seconds = _CHILD_SECONDS_WHILE_FAILING if self.failing(pipeline) else _CHILD_SECONDS
        try:
            async with asyncio.timeout(seconds):
                await self._slots.acquire()
                has_slot = True
                try:
                    return await self._spares[pipeline].take()
                except BaseException:
                    self._slots.release()
                    raise
        except TimeoutError:
            reason = f"no child process was ready within {seconds:g} s"
            raise (NoneForked if has_slot else NoChild)(reason) from None

    def _requests(
        self, pipeline: str, step: str, params: dict[str, Any], files: Mapping[str, Path], directory: Path, item: Any
    ) -> tuple[bytes, bytes]:
        """The two messages to a child: its confinement (the paths that it may use), and the step to run. Raises
        Permanent `bad_params`.
        """
        paths = {name: str(path.absolute()) for name, path in files.items()}
        writable = str(directory.absolute())
        run = frames.Run(
            pipeline=pipeline,
            step=step,
            params=params,
            files=paths,
            directory=writable,
            item=item,
            result_limits=self._result_limits,
            log_level=child_logs.level(),
        )
        try:
            return frames.encode(frames.Confinement(files=list(paths.values()), directory=writable)), frames.encode(run)
        except frames.FrameError as error:
            raise Permanent("bad_params", f"the parameters cannot be sent to a child process: {error}") from error

    def _end(self, child: ChildProcess) -> None:
        """Kill the child now. Its slot becomes free later, together with its memory."""
        child.kill()
        self._running.discard(child)
        ending = asyncio.create_task(self._stop_child(child))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    # Wait until the killed child has ended. Then free its slot, and reap the child.
    async def _stop_child(self, child: ChildProcess) -> None:
        try:
            await child.ended()
        finally:
            self._slots.release()
            await child.stop()

    # The checked result of the step. If the answer is an error, raises this error.
    def _verdict_of(self, child: ChildProcess, answer: frames.Answer, directory: Path) -> Done:
        if isinstance(answer, frames.Finished):
            result_bytes = 0 if self._result_limits is None else self._result_limits.inline_bytes
            return checked(answer, directory.absolute(), result_bytes)
        if answer.error == "cancelled":
            raise Cancelled
        error = _error_of(answer)
        error.trace = answer.traceback
        if answer.error == "unforeseen" and answer.traceback:
            self._log.error("handler raised", child=child.pid, code=answer.code, traceback=answer.traceback)
        raise error


def _error_of(answer: frames.Failed) -> StepError:
    """The error that the handler raised, made again from the child's answer."""
    if answer.error == "permanent":
        return Permanent(answer.code, answer.message)
    if answer.error == "unforeseen":
        return Unforeseen(answer.message)
    after = None if answer.after is None else timedelta(seconds=answer.after)
    return Retryable(answer.message, code=answer.code, after=after)


def _emit_to_stream(chunk: Any) -> None:
    """Emit the child's chunk as a chunk of its attempt. Drop a chunk that has no JSON form, because a hostile child may
    send anything.
    """
    recorder = current()
    if recorder is not None and recorder.stream is not None:
        with suppress(TypeError, ValueError):
            recorder.stream.emit(chunk)


class _Lines:
    """Logs the lines that the handler logs in its child, up to a bound."""

    def __init__(self, child: int) -> None:
        self._child = child
        self._remaining = frames.MAX_LOG_LINES

    def __call__(self, line: frames.LogLine) -> None:
        if self._remaining:
            self._remaining -= 1
            child_logs.log_line(
                line.logger, line.level, line.message, trace=line.traceback, child=self._child, fields=line.fields
            )


def number_of_children(settings: Settings) -> int:
    """How many isolated steps the worker runs at once: the setting `worker_children`, or one for each core."""
    return settings.worker_children or os.cpu_count() or 1
