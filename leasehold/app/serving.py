"""The parts of `App.serving`, which runs a worker inside the user's own program while a block of this program runs.
`worker_of` makes the worker, and `watched` watches it during the block. The worker cannot end the user's program.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from leasehold.app.program import AppOfProgram, check_program, modules_of, source_of_children
from leasehold.runtime.gather import cancel_and_wait
from leasehold.worker.served_queues import ServedQueues
from leasehold.worker.worker import Worker

if TYPE_CHECKING:
    from leasehold.settings import Settings

log = structlog.get_logger(__name__)


def worker_of(app: AppOfProgram, settings: Settings) -> Worker:
    """The worker that serves the app in this process. Some tasks run in child processes, which import the app. Raises
    DeclarationError if they cannot import it, or if the import would run the program again.
    """
    pipelines = app.pipelines()
    queues = ServedQueues.chosen(pipelines, settings)
    # Tasks that this worker runs in child processes (`process=True`). `imported`: the modules that children import.
    in_processes = [
        task for task in app.tasks.values() if task.terms.process and task.pipeline.steps[0].queue in queues.every
    ]
    imported = modules_of(in_processes)
    modules: list[str] = []
    if queues.isolated_pipelines:
        source, modules = source_of_children(app, queues.isolated_pipelines, settings)
        settings = settings.model_copy(update={"pipelines": source})
        imported += [source.partition(":")[0], *modules]
    check_program(imported)
    return Worker(settings, pipelines, modules=modules)


@asynccontextmanager
async def watched(worker: Worker) -> AsyncIterator[None]:
    """Watch the worker during the block, and drain it at the end of the block.

    If a part of the worker fails, cancel the asyncio task that entered the block, and raise the part's error at the end
    of the block in place of the CancelledError. If an operator asks the worker to drain, or if most of its threads are
    stuck, drain the worker, and let the block continue.
    """
    failure = _Failure(worker)
    tasks = [asyncio.create_task(failure.watch()), asyncio.create_task(_drain_if_retired(worker))]
    try:
        try:
            yield
        finally:
            if failure.error is None:
                await worker.drain()
    except asyncio.CancelledError:
        if not failure.was_the_only_cancel():
            raise
    finally:
        failure.was_the_only_cancel()  # takes the cancel back, even if the block has caught the CancelledError
        await cancel_and_wait(*tasks)
    if failure.error is not None:
        raise failure.error


class _Failure:
    """Watches for the error of a part of the worker (`error`). Create this object in the asyncio task that runs the
    block.
    """

    def __init__(self, worker: Worker) -> None:
        self.error: BaseException | None = None
        self._worker = worker
        self._block = asyncio.current_task()
        # How many cancels of this asyncio task were requested before the block.
        self._cancels_before = 0 if self._block is None else self._block.cancelling()
        self._has_cancelled = False

    async def watch(self) -> None:
        try:
            await self._worker.failed()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            log.exception("the worker of this program has failed, and runs nothing more")
            self.error = error
            self._has_cancelled = self._block is not None and self._block.cancel()

    def was_the_only_cancel(self) -> bool:
        """Take back the cancel that this object requested. Returns True if nothing else has cancelled the block."""
        if not self._has_cancelled or self._block is None:
            return False
        self._has_cancelled = False
        return self._block.uncancel() <= self._cancels_before


async def _drain_if_retired(worker: Worker) -> None:
    await worker.retired.wait()
    log.warning("the worker of this program drains: it was asked to, or most of its threads are stuck")
    await worker.drain()
