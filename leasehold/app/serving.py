"""What `App.serving` does beside the block: it looks at the worker, which cannot end the user's program."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from leasehold.runtime.gather import cancel_and_wait

if TYPE_CHECKING:
    from leasehold.worker.worker import Worker

log = structlog.get_logger(__name__)


@asynccontextmanager
async def watched(worker: Worker) -> AsyncIterator[None]:
    """Watch the worker during the block, and drain it at the end of the block.

    If a part of the worker fails, cancel the task that entered the block, and raise the part's error at the end of the
    block in place of the CancelledError. If an operator asks the worker to drain, or most of its threads are stuck,
    drain it: the block goes on.
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
        failure.was_the_only_cancel()  # the block may have caught the CancelledError
        await cancel_and_wait(*tasks)
    if failure.error is not None:
        raise failure.error


class _Failure:
    """The error that ended a part of the worker. Create this in the task that runs the block."""

    def __init__(self, worker: Worker) -> None:
        self.error: BaseException | None = None
        self._worker = worker
        self._block = asyncio.current_task()
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
        """Take back the cancel that the failure made. Returns whether the block was cancelled by nothing else."""
        if not self._has_cancelled or self._block is None:
            return False
        self._has_cancelled = False
        return self._block.uncancel() <= self._cancels_before


async def _drain_if_retired(worker: Worker) -> None:
    await worker.retired.wait()
    log.warning("the worker of this program drains: it was asked to, or most of its threads are stuck")
    await worker.drain()
