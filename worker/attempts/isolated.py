"""Attempts at isolated steps: fetch, run in a child, store, and begin what comes next ahead."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from uuid import UUID

import structlog

from leasehold.db.database import Pool
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.verdicts import Done
from leasehold.runtime import failpoints
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.telemetry import traces
from leasehold.telemetry.logs import say_with_every_line
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Completion
from leasehold.worker import metrics
from leasehold.worker.attempts import inline
from leasehold.worker.attempts.heartbeat import Held
from leasehold.worker.attempts.inputs import Source, fetch, sources_of, work_digest
from leasehold.worker.attempts.output_cache import OutputCache
from leasehold.worker.attempts.publishing import adopt, store_outputs
from leasehold.worker.attempts.reporter import Reporter
from leasehold.worker.attempts.speculation import Speculation, steps_after
from leasehold.worker.sandbox.children import Children

log = structlog.get_logger(__name__)

#: What an attempt reads: name -> (file, sha256).
Fetched = Mapping[str, tuple[Path, str]]


class IsolatedAttempts:
    def __init__(
        self,
        *,
        store: ObjectStore,
        pool: Pool,
        children: Children,
        reporter: Reporter,
        work_dir: Path,
        settings: Settings,
    ) -> None:
        self._store = store
        self._kept = OutputCache()
        self._pool = pool
        self._children = children
        self._reporter = reporter
        self._work_dir = work_dir
        self._settings = settings
        self._ahead: dict[tuple[UUID, str], Speculation] = {}  # by job and step

    def directory(self, claimed: Claimed) -> Path:
        """Where the attempt keeps its files."""
        ahead = self._ahead.get((claimed.job_id, claimed.step))
        if ahead is not None and ahead.taken_by == claimed.lease.task_id:
            return ahead.directory
        return self._work_dir / f"{claimed.lease.task_id}-{claimed.lease.epoch}"

    async def perform(
        self,
        claimed: Claimed,
        pipeline: Pipeline,
        step: Step,
        held: Held,
        timeout: float,
        may_go_on: Callable[[], bool],
    ) -> Completion:
        """Raises what the handler, the child and the store raise. What it begins ahead, if its worker `may_go_on` with
        the next step, is there until `forget`.
        """
        sources = await sources_of(self._pool, pipeline, step, claimed)
        say = partial(self._reporter.say, claimed.lease)
        ahead = self._taken(claimed, sources, say)
        directory = self.directory(claimed)
        try:
            if ahead is None:
                fetched = await self._fetch(sources, step, directory)
            else:
                fetched = {name: (path, ahead.sha256[name]) for name, path in ahead.files.items()}
            failpoints.reach("after_download")
            digest = work_digest(step, claimed, {name: sha256 for name, (_, sha256) in fetched.items()})
            if claimed.lease.epoch > 1:
                adopted = await adopt(self._store, claimed.output_prefix, step, digest, held)
                if adopted is not None:
                    metrics.ADOPTED.labels(claimed.pipeline, step.name).inc()
                    return adopted
            failpoints.reach_during("mid_process")
            with traces.span("run"):
                if ahead is not None:
                    done = await ahead.running
                else:
                    files = {name: path for name, (path, _) in fetched.items()}
                    done = await self._run(claimed, pipeline, step, files, directory, timeout, say)
            if (finisher := pipeline.finishers.get(step.name)) is not None:
                paths = {name: file.path for name, file in done.files.items()}
                await asyncio.to_thread(finisher, self._settings, paths)
            begun = self._begin(claimed, pipeline, step, sources, fetched, done) if may_go_on() else []
            with traces.span("store"):
                kept = self._kept if any(step.name in other.reads for other in pipeline.steps) else None
                completion = await store_outputs(self._store, kept, claimed.output_prefix, step, done, digest, held)
            made = {output.name: output.sha256 for output in completion.outputs}
            for one in begun:
                one.sha256 |= {name: sha256 for name, sha256 in made.items() if name in one.files}
            failpoints.reach("after_upload")
            return completion
        finally:
            if ahead is not None:
                del self._ahead[claimed.job_id, claimed.step]
                ahead.running.cancel()
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True))

    def forget(self, claimed: Claimed, following: Claimed | None) -> None:
        """The attempt is settled: what was begun ahead for it, or by it, is discarded, unless the job goes on here with
        the step that its completion has claimed.
        """
        for key, ahead in list(self._ahead.items()):
            if key != (claimed.job_id, claimed.step) and ahead.begun_by != claimed.lease.task_id:
                continue
            if following is not None and key[0] == following.job_id and key[1] != claimed.step:
                ahead.begun_by = following.lease.task_id
            else:
                del self._ahead[key]
                ahead.discard()

    async def _fetch(self, sources: list[Source], step: Step, directory: Path) -> Fetched:
        (directory / "in").mkdir(parents=True)
        (directory / "out").mkdir()
        with traces.span("fetch"):
            return await fetch(self._store, self._kept, sources, directory / "in", step.limits.file_bytes)

    async def _run(
        self,
        claimed: Claimed,
        pipeline: Pipeline,
        step: Step,
        files: Mapping[str, Path],
        directory: Path,
        timeout: float,
        on_progress: Callable[[float, str], None],
    ) -> Done:
        return await self._children.run(
            pipeline=pipeline.name,
            step=step.name,
            params=claimed.params,
            files=files,
            directory=directory / "out",
            timeout=timeout,
            limits=step.limits,
            item=await inline.item_of(self._pool, claimed) if step.part else None,
            on_progress=on_progress,
        )

    def _taken(
        self, claimed: Claimed, sources: list[Source], on_progress: Callable[[float, str], None]
    ) -> Speculation | None:
        ahead = self._ahead.get((claimed.job_id, claimed.step))
        if ahead is None:
            return None
        if not ahead.serves(claimed, sources):
            del self._ahead[claimed.job_id, claimed.step]
            ahead.discard()
            return None
        ahead.take(claimed, on_progress)
        return ahead

    def _begin(
        self, claimed: Claimed, pipeline: Pipeline, step: Step, sources: list[Source], fetched: Fetched, done: Done
    ) -> list[Speculation]:
        """Begin the step after this one, and further ones in idle children. The last comes first: the job ends with it,
        and one of them waits until the memory of the child that has just ended is free.
        """
        after = [] if claimed.handler is not None else steps_after(pipeline, step)
        begun: list[Speculation] = []
        for one in reversed(after[: max(1, self._children.idle)]):
            if (claimed.job_id, one.name) in self._ahead:
                continue
            known = {source.name: fetched[source.name] for source in sources if source.read in one.reads}
            paths = {name: path for name, (path, _) in known.items()}
            if step.name in one.reads:
                paths |= {name: file.path for name, file in done.files.items()}
            directory = self._work_dir / f"{claimed.lease.task_id}-{claimed.lease.epoch}-{one.name}"
            files = _linked(paths, directory)
            if files is None:
                continue
            sha256 = {name: digest for name, (_, digest) in known.items()}
            ahead = Speculation(claimed.lease.task_id, claimed.params, directory, files, sha256)
            ahead.begin(self._run_ahead(claimed, pipeline, one, ahead))
            self._ahead[claimed.job_id, one.name] = ahead
            begun.append(ahead)
        return begun

    async def _run_ahead(self, claimed: Claimed, pipeline: Pipeline, step: Step, ahead: Speculation) -> Done:
        say_with_every_line({"job_id": claimed.job_id, "step": step.name, "ahead": True})
        timeout = step.timeout.total_seconds()
        return await self._run(claimed, pipeline, step, ahead.files, ahead.directory, timeout, ahead.progress)


def _linked(paths: Mapping[str, Path], directory: Path) -> dict[str, Path] | None:
    """The same files once more, for those of the attempt before go with it; None, and no `directory`, where that cannot
    be done.
    """
    linked = {name: directory / "in" / str(number) for number, name in enumerate(paths)}
    try:
        (directory / "in").mkdir(parents=True)
        (directory / "out").mkdir()
        for name, path in linked.items():
            os.link(paths[name], path, follow_symlinks=False)
    except OSError as error:  # to begin ahead would only have saved time
        log.warning("a step is not begun ahead", reason=str(error))
        shutil.rmtree(directory, ignore_errors=True)
        return None
    return linked
