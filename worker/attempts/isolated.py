"""Runs attempts at isolated steps: fetches the inputs, runs the handler in a child process, publishes the outputs.

While the outputs are published, the attempt may start the next steps speculatively, which means before a worker has
claimed them (speculation.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import structlog

from leasehold.db.database import Pool
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.verdicts import Done
from leasehold.runtime import failpoints
from leasehold.runtime.foreign_errors import call_in_thread
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.telemetry import traces
from leasehold.telemetry.attempt_logs import current, record_in
from leasehold.telemetry.logs import set_facts_of_lines
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Completion
from leasehold.worker import metrics
from leasehold.worker.attempts.directories import Directories
from leasehold.worker.attempts.inputs import Source, fetch, item_of, sources_of, work_digest
from leasehold.worker.attempts.output_cache import OutputCache
from leasehold.worker.attempts.publishing import find_published, publish_outputs
from leasehold.worker.attempts.reporter import Reporter
from leasehold.worker.attempts.speculation import Speculation, steps_after
from leasehold.worker.leases.held_lease import HeldLease
from leasehold.worker.sandbox.children import Children, NoChild

log = structlog.get_logger(__name__)

#: The most seconds that an attempt waits until the worker has warmed up.
_WARM_UP_SECONDS = 30.0

#: The inputs of an attempt: name -> (file, sha256).
Fetched = Mapping[str, tuple[Path, str]]


class IsolatedAttempts:
    """All isolated attempts of one worker. For each attempt the runner calls `perform`, and `discard_speculations` when
    the attempt has ended.

    `warming`: this asyncio task ends when the children have loaded their handlers, and the worker has decided whether
    the children's fences suffice. If the fences do not suffice, the children are closed by then. `reporter`: records
    the progress of attempts. `directories`: makes the directories of attempts.
    """

    def __init__(
        self,
        *,
        store: ObjectStore,
        pool: Pool,
        children: Children,
        warming: asyncio.Task[Any],
        reporter: Reporter,
        directories: Directories,
        settings: Settings,
    ) -> None:
        self._store = store
        self._pool = pool
        self._children = children
        self._warming = warming
        self._reporter = reporter
        self._directories = directories
        self._settings = settings
        self._output_cache = OutputCache()
        self._speculations: dict[tuple[UUID, str], Speculation] = {}  # by job and step

    @property
    def pipelines(self) -> Collection[str]:
        """The pipelines whose isolated steps this worker can run. At the end of the warm-up, the worker may find that
        it can run none of them.
        """
        return self._children.pipelines

    def failing(self, pipeline: str) -> bool:
        """Whether this worker cannot make a child for the pipeline's isolated steps now."""
        return self._children.failing(pipeline)

    async def may_perform(self, pipeline: Pipeline) -> bool:
        """Wait until the worker has warmed up. Returns whether it can run the pipeline's isolated steps. Raises NoChild
        if the warm-up takes too long.

        A worker serves its inline queues while it warms up, and a task of an isolated step may stand in such a queue.
        But no child may run the task before the worker knows that the child is confined.
        """
        await asyncio.wait([self._warming], timeout=_WARM_UP_SECONDS)
        if not self._warming.done():
            raise NoChild(f"the worker has not loaded its isolated steps within {_WARM_UP_SECONDS:g} s")
        return pipeline.name in self._children.pipelines

    async def perform(
        self,
        claimed: Claimed,
        pipeline: Pipeline,
        step: Step,
        held: HeldLease,
        timeout: float,
        may_continue: Callable[[], bool],
    ) -> Completion:
        """Run the attempt: fetch the inputs, run the handler in a child, publish the outputs. If this worker has
        started the step speculatively, the attempt uses that execution. If an earlier attempt has published the outputs
        of the same work, the attempt returns those outputs and runs nothing.

        `may_continue`: whether this worker may go on with the job's later steps. If it returns True after the handler
        has ended, start later steps speculatively. The attempt at such a step takes over the speculative execution. If
        no attempt does, `discard_speculations` ends the execution. Raises what the handler, the child and the store
        raise, and NoChild.
        """
        sources = await sources_of(self._pool, held, pipeline, step, claimed)
        on_progress = partial(self._reporter.report, claimed.lease)
        speculation = self._take_speculation(claimed, sources, on_progress)
        try:
            with held.beyond_limit():  # the time limit is for the handler; the store has limits of its own
                fetched = await self._inputs(claimed, step, sources, speculation)
            if held.cancelled:  # a cancel before the directory existed could not write the stop file
                self._directories.request_stop(claimed.lease)
            failpoints.reach("after_download")  # a failpoint: here a test can stop or kill the process
            item = await item_of(self._pool, held) if step.part else None
            # `digest` identifies the work. Two attempts with the same parameters, inputs and item have the same digest.
            digest = work_digest(step, claimed, {name: sha256 for name, (_, sha256) in fetched.items()}, item)
            if claimed.lease.epoch > 1:  # an earlier attempt may have published all outputs of the same work
                with held.beyond_limit():
                    published = await find_published(self._store, claimed.output_prefix, step, digest, held)
                if published is not None:
                    metrics.ADOPTED.labels(claimed.pipeline, step.name).inc()
                    return published
            failpoints.reach_during("mid_process")
            with traces.span("run"):
                if speculation is not None:
                    done = await speculation.running
                else:
                    files = {name: path for name, (path, _) in fetched.items()}
                    directory = self._directories.path_of(claimed.lease)
                    done = await self._run(claimed, pipeline, step, files, directory, timeout, on_progress, item)
            await self._run_finisher(pipeline, step, done)
            new_speculations = (
                self._speculate(claimed, pipeline, step, sources, fetched, done) if may_continue() else []
            )
            with held.beyond_limit():
                completion = await self._publish(claimed, pipeline, step, done, digest, held)
            for new_speculation in new_speculations:
                new_speculation.complete_digests({output.name: output.sha256 for output in completion.outputs})
            failpoints.reach("after_upload")
            return completion
        finally:
            if speculation is not None:
                # If the attempt has failed early, the execution may still run.
                self._speculations.pop((claimed.job_id, claimed.step), None)
                speculation.running.cancel()
            await self._directories.remove(claimed.lease)

    def discard_speculations(self, claimed: Claimed, next_claimed: Claimed | None) -> None:
        """Call this when the attempt has ended. Discards the speculation that the attempt used, and the speculations
        that it started and that no other attempt has taken.

        Exception: if this worker goes on with `next_claimed`, the job's next step, the started speculations stay. From
        then on they belong to the attempt at that step.
        """
        if not self._speculations:
            return
        used_key = (claimed.job_id, claimed.step)
        # `bound_to`: the lease of the attempt at whose end the speculation is discarded. Compare with `is`, because two
        # attempts may have equal leases after a failover that has lost a claim (see Heartbeat.hold). Only the older
        # attempt is valid. The end of the newer attempt must not discard the speculations of the older attempt.
        bound_keys = [key for key, speculation in self._speculations.items() if speculation.bound_to is claimed.lease]
        for key in bound_keys:
            if next_claimed is None or key == used_key:
                self._discard(key)
            else:
                self._speculations[key].bound_to = next_claimed.lease

    # --- the steps of `perform`

    async def _inputs(
        self, claimed: Claimed, step: Step, sources: list[Source], speculation: Speculation | None
    ) -> Fetched:
        """The inputs, in the attempt's directory. If the attempt uses a speculation, the directory has them already;
        otherwise this method downloads them.
        """
        if speculation is not None:
            return {name: (path, speculation.sha256[name]) for name, path in speculation.files.items()}
        directory = self._directories.make(claimed.lease)
        with traces.span("fetch"):
            return await fetch(self._store, self._output_cache, sources, directory / "in", step.limits.file_bytes)

    async def _run(
        self,
        claimed: Claimed,
        pipeline: Pipeline,
        step: Step,
        files: Mapping[str, Path],
        directory: Path,
        timeout: float,
        on_progress: Callable[[float, str], None],
        item: Any = None,
    ) -> Done:
        return await self._children.run(
            pipeline=pipeline.name,
            step=step.name,
            params=claimed.params,
            files=files,
            directory=directory / "out",
            timeout=timeout,
            limits=step.limits,
            item=item,
            on_progress=on_progress,
        )

    async def _run_finisher(self, pipeline: Pipeline, step: Step, done: Done) -> None:
        """Run the step's finisher, if it has one. A finisher is a function that changes the step's files before they
        are published. It runs in the worker, because it may need a secret that no child gets.
        """
        finisher = pipeline.finishers.get(step.name)
        if finisher is not None:
            paths = {name: file.path for name, file in done.files.items()}
            await call_in_thread(finisher, self._settings, paths)

    async def _publish(
        self, claimed: Claimed, pipeline: Pipeline, step: Step, done: Done, digest: str, held: HeldLease
    ) -> Completion:
        # The cache of outputs gets only those that a later step reads.
        is_read_later = any(step.name in other.reads for other in pipeline.steps)
        cache = self._output_cache if is_read_later else None
        with traces.span("store"):
            return await publish_outputs(self._store, cache, claimed.output_prefix, step, done, digest, held)

    # --- speculative execution

    def _take_speculation(
        self, claimed: Claimed, sources: list[Source], on_progress: Callable[[float, str], None]
    ) -> Speculation | None:
        """The speculative execution of this step with these inputs, or None. A speculation of the step with other
        inputs is discarded.
        """
        key = (claimed.job_id, claimed.step)
        speculation = self._speculations.get(key)
        if speculation is None:
            return None
        if not speculation.fits(claimed, sources):
            self._discard(key)
            return None
        speculation.take(claimed, on_progress)
        self._directories.adopt(claimed.lease, speculation.directory)
        return speculation

    def _discard(self, key: tuple[UUID, str]) -> None:
        speculation = self._speculations.pop(key, None)
        if speculation is not None:
            speculation.discard()

    def _speculate(
        self, claimed: Claimed, pipeline: Pipeline, step: Step, sources: list[Source], fetched: Fetched, done: Done
    ) -> list[Speculation]:
        """Start as many of the next steps as there is room for (`Children.free_slots`). If there is no room, start one
        step; it waits until some child has ended and its memory is free.

        Of these steps, the last in the pipeline's order starts first, because the job cannot end before that step.
        """
        if claimed.handler is not None:  # a job of a template, whose next steps are not those of `pipeline`
            return []
        started: list[Speculation] = []
        next_steps = steps_after(pipeline, step)[: max(1, self._children.free_slots)]
        for next_step in reversed(next_steps):
            if (claimed.job_id, next_step.name) in self._speculations:
                continue
            try:
                speculation = self._link_inputs(claimed, step, next_step, sources, fetched, done)
            except OSError as error:  # go on without it, because a speculation only saves time
                log.warning("a step cannot start speculatively", reason=str(error))
                continue
            # The recorder of this attempt makes one for the speculation. The new recorder keeps the lines that the
            # handler logs until an attempt takes the speculation.
            recorder = current()
            speculation.recorder = None if recorder is None else recorder.for_later()
            speculation.start(self._run_speculatively(claimed, pipeline, next_step, speculation))
            self._speculations[claimed.job_id, next_step.name] = speculation
            started.append(speculation)
        return started

    def _link_inputs(
        self, claimed: Claimed, step: Step, next_step: Step, sources: list[Source], fetched: Fetched, done: Done
    ) -> Speculation:
        """A speculation of `next_step`. Its directory has links to two kinds of inputs: the files that the attempt at
        `step` has fetched, and the files that this attempt has made. When that attempt has published the files that it
        made, it gives their digests to the speculation (`complete_digests`). Raises OSError.
        """
        shared = {source.name: fetched[source.name] for source in sources if source.read in next_step.reads}
        paths = {name: path for name, (path, _) in shared.items()}
        if step.name in next_step.reads:
            paths |= {name: file.path for name, file in done.files.items()}
        directory, files = self._directories.make_linked(claimed.lease, next_step.name, paths)
        sha256 = {name: digest for name, (_, digest) in shared.items()}
        return Speculation(claimed.lease, claimed.params, directory, files, sha256)

    async def _run_speculatively(
        self, claimed: Claimed, pipeline: Pipeline, step: Step, speculation: Speculation
    ) -> Done:
        # The log lines of this asyncio task name the job and the step, and the speculation's recorder collects them.
        set_facts_of_lines({"job_id": claimed.job_id, "step": step.name, "speculative": True})
        record_in(speculation.recorder)
        timeout = step.timeout.total_seconds()
        files, directory = speculation.files, speculation.directory
        return await self._run(claimed, pipeline, step, files, directory, timeout, speculation.progress)
