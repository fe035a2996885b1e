"""Starts the zygotes of a worker before the rest of the worker. A zygote loads the handlers of isolated steps, and
forks the children that run them. While the rest of the worker starts, the zygotes load their handlers on other cores.

`Worker` enters `warm_up` before it opens its other parts. This module must not import the rest of the worker, because
that import would delay the children by about half the time that a zygote needs to load its handlers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from leasehold.domain.result_limits import ResultLimits
from leasehold.runtime.gather import cancel_and_wait
from leasehold.settings import Settings
from leasehold.worker.attempts.workdir import WorkDir
from leasehold.worker.sandbox.children import Children, number_of_children
from leasehold.worker.served_queues import ServedQueues


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The children, and the asyncio task `started`, which starts them. This asyncio task ends when all zygotes have
    loaded their handlers. It raises DeclarationError if a zygote cannot load its handlers.
    """

    work_dir: Path
    children: Children
    started: asyncio.Task[None]


@asynccontextmanager
async def warm_up(
    settings: Settings, queues: ServedQueues, worker: UUID, modules: Sequence[str] = ()
) -> AsyncIterator[WarmUp]:
    """Start the children for the isolated steps of `queues`, without waiting for them. The end of the block kills the
    children and removes the work directory. `modules`: modules that declare tasks of an app; the zygotes import them.
    """
    with WorkDir(_work_root(settings), worker) as work_dir:
        children = Children(
            number_of_children(settings) if queues.isolated_pipelines else 0,
            pipelines=sorted(queues.isolated_pipelines),
            work_dir=work_dir,
            source=settings.pipelines,
            modules=modules,
            result_limits=ResultLimits.of_settings(settings),
        )
        started = asyncio.create_task(children.start(), name="children")
        try:
            yield WarmUp(work_dir, children, started)
        finally:
            await cancel_and_wait(started)
            await children.close()


def _work_root(settings: Settings) -> Path:
    return (
        Path(settings.work_dir)
        if settings.work_dir
        # WorkDir checks who owns this folder.
        else Path(os.environ.get("TMPDIR", "/tmp")) / "leasehold"  # noqa: S108
    )
